"""Run folders that somebody else has made or changed: nothing is followed out of them, nothing of others is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from esper.leyline import CheckpointError
from esper.leyline.rundir import LOCK_FILE, MANIFEST_FILE
from esper.simic.run.checkpoint import load_checkpoint, save_checkpoint
from esper.simic.run.checkpoint_schedule import remove_old_checkpoints
from esper.simic.run.run_dir import RunDir, create_run, open_run
from tests.simic.run.saving import contents, facts, names, newest, run_with, save


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def another_run(folder: Path, *indices: int, score: float | None = 99.0) -> RunDir:
    run = create_run(folder, "other")
    for index in indices:
        save_checkpoint(run, facts(index, run_id="other", score=score), contents(index))
    return run


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_and_not_followed(kind: str, tmp_path: Path) -> None:
    run, mine = run_with(tmp_path), tmp_path / "mine.txt"
    mine.write_text("precious")
    lock = run.path / LOCK_FILE
    {
        "link": lambda: lock.symlink_to(mine),
        "dangling": lambda: lock.symlink_to(tmp_path / "new"),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    with pytest.raises(OSError, match="regular files only"), run.lock():
        pass
    assert mine.read_text() == "precious"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", "checkpoints", "events", "metrics", "wandb"])
def test_a_linked_folder_is_refused(name: str, tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    for folder in ("events", "metrics", "wandb"):
        (run.path / folder).mkdir()
    place = run.path / name
    real = place.rename(tmp_path / "elsewhere")
    place.symlink_to(real)
    before = everything(real)
    with pytest.raises(ValueError, match=r"is a link\. Expected a run directory"):
        open_run(run.path)
    assert everything(real) == before


def test_a_linked_checkpoint_is_rejected(tmp_path: Path) -> None:
    run, other = run_with(tmp_path, 1), another_run(tmp_path, 2)
    link = run.checkpoints / "ckpt-00000002"
    link.symlink_to(other.checkpoints / link.name)
    with pytest.raises(CheckpointError, match="a link"):
        load_checkpoint(link)
    found, rejected = newest(run)
    assert (found.facts.index, [one.name for one in rejected]) == (1, [link.name])


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_place_of_a_checkpoint_makes_way(dangling: bool, tmp_path: Path) -> None:
    run, other = run_with(tmp_path, 1), another_run(tmp_path, 2)
    before = everything(other.path)
    link = run.checkpoints / "ckpt-00000002"
    link.symlink_to("nowhere" if dangling else other.checkpoints / link.name)
    save(run, 2)
    assert newest(run)[0].facts.run_id == "run"
    assert (run.checkpoints / "rejected-ckpt-00000002-0").is_symlink()
    assert everything(other.path) == before


@pytest.mark.parametrize("own", [False, True])
def test_retention_removes_nothing_through_a_link(own: bool, tmp_path: Path) -> None:
    run, other = run_with(tmp_path, 1, 2, 3, 4), another_run(tmp_path, 1, score=None)
    link = run.checkpoints / "ckpt-00000001"
    kept = link.rename(tmp_path / "kept") if own else other.checkpoints / link.name
    before = everything(kept)
    if not own:
        shutil.rmtree(link)
    link.symlink_to(kept)
    assert remove_old_checkpoints(run, last=1, resumed_from=None) == ()
    assert everything(kept) == before
    assert newest(run)[0].facts.index == 4


def test_a_whole_checkpoint_of_another_run_makes_way(tmp_path: Path) -> None:
    run, other = run_with(tmp_path, 1), another_run(tmp_path, 2)
    shutil.copytree(other.checkpoints / "ckpt-00000002", run.checkpoints / "ckpt-00000002")
    save(run, 2)
    found, rejected = newest(run)
    assert (found.facts.index, found.facts.run_id, rejected) == (2, "run", ())
    assert load_checkpoint(other.checkpoints / "ckpt-00000002").facts.run_id == "other"
    assert names(run) == ["ckpt-00000001", "ckpt-00000002", "rejected-ckpt-00000002-0"]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_not_of_this_run_displaces_none_of_its_checkpoints(damaged: bool, tmp_path: Path) -> None:
    run, other = run_with(tmp_path, 1, 2), another_run(tmp_path, 70)
    intruder = Path(shutil.copytree(other.checkpoints / "ckpt-00000070", run.checkpoints / "ckpt-00000070"))
    if damaged:
        (intruder / MANIFEST_FILE).write_bytes(b"{")
    remove_old_checkpoints(run, last=1, resumed_from=None)
    assert names(run) == ["ckpt-00000002", "ckpt-00000070"]


def test_the_folder_of_scales_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'calibrations' is not allowed"):
        create_run(tmp_path / "runs", "calibrations")
    assert list(tmp_path.iterdir()) == []
