"""A run directory: its name, its first write, its one owner."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline import RunBusy, StorageError
from esper.leyline.files import free_bytes
from esper.simic.run import run_dir
from esper.simic.run.run_dir import RunDir, create_run, open_run, space_warning
from tests.simic.run.system_calls import watched

HOLD = """
import sys
from esper.simic.run.run_dir import open_run
with open_run(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(run: RunDir) -> subprocess.Popen[str]:
    """Another process that has the run, until its stdin is closed or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_names_itself_by_time_and_random_digits(tmp_path: Path) -> None:
    runs = [create_run(tmp_path / "made" / "on the way") for _ in range(20)]
    assert len({run.run_id for run in runs}) == 20
    for run in runs:
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", run.run_id)
        assert [path.name for path in run.path.iterdir()] == ["checkpoints"]
        assert list(run.checkpoints.iterdir()) == []
        assert open_run(run.path) == run


@pytest.mark.parametrize("run_id", ["a", "A-b_c.9", "x" * 64])
def test_plain_names_are_allowed(run_id: str, tmp_path: Path) -> None:
    assert create_run(tmp_path, run_id).path == tmp_path / run_id


@pytest.mark.parametrize("run_id", ["", ".hidden", "..", "a/b", "../a", "a b", "a\n", "é", "x" * 65, "a\0b"])
def test_names_that_could_lead_astray_are_not(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run id .* is not allowed. Expected 1 to 64"):
        create_run(tmp_path / "runs", run_id)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_begun_again(tmp_path: Path) -> None:
    run = create_run(tmp_path, "mine")
    (run.checkpoints / "precious").touch()
    with pytest.raises(ValueError, match=r"there is a run mine in .* already\. Resume it"):
        create_run(tmp_path, "mine")
    assert (run.checkpoints / "precious").exists()


def test_a_file_where_the_folder_should_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(StorageError, match="runs/mine"):
        create_run(tmp_path / "runs", "mine")
    with pytest.raises(StorageError, match="runs/below/mine: Not a directory"):
        create_run(tmp_path / "runs" / "below", "mine")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_no_bytes_is_found_before_training(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(run_dir, "write_new", refuse)
    with pytest.raises(StorageError, match=os.strerror(number)) as raised:
        create_run(tmp_path, "mine")
    assert raised.value.errno == number
    assert raised.value.free_bytes is not None
    assert list(tmp_path.iterdir()) == []


def test_scarce_space_is_reported(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    free = free_bytes(tmp_path)
    assert free is not None
    assert space_warning(run, 1000) is None
    reported = space_warning(run, free)
    assert reported is not None
    assert "Make room for at least 3" in reported
    assert f"{free:,}" in reported


def test_what_is_no_run_is_refused_with_what_it_is(tmp_path: Path) -> None:
    run = create_run(tmp_path, "mine")
    (run.checkpoints / "ckpt-00000001").mkdir()
    (tmp_path / "policy.pt").write_bytes(pickle.dumps({}))
    (tmp_path / "notes.txt").write_text("hi")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "nowhere", "there is no run directory"),
        (tmp_path / "policy.pt", "policy.pt is a pickle file; Esper reads safetensors checkpoints only"),
        (tmp_path / "notes.txt", "notes.txt is no folder. Expected a run directory"),
        (tmp_path / "empty", "is not a run directory: it has no folder checkpoints"),
        (run.checkpoints / "ckpt-00000001", f"Expected the run directory itself: {run.path}"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            open_run(path)


# ---- one owner


def test_a_second_process_is_reported_who_has_the_run(tmp_path: Path) -> None:
    run = create_run(tmp_path, "mine")
    with holder(run) as other:
        expected = rf"mine is in use by process {other.pid} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC\. Wait"
        with pytest.raises(RunBusy, match=expected), run.lock():
            raise AssertionError("two owners")
        other.communicate("")
    with run.lock():
        pass


def test_a_killed_owner_holds_nothing(tmp_path: Path) -> None:
    run = create_run(tmp_path, "mine")
    with holder(run) as other:
        other.kill()
        assert other.wait() == -9
        with run.lock():
            pass


def test_one_process_cannot_own_a_run_twice(tmp_path: Path) -> None:
    run = create_run(tmp_path, "mine")
    with run.lock():
        with pytest.raises(RunBusy, match=f"in use by process {os.getpid()} since"), run.lock():
            raise AssertionError("two owners")
        with pytest.raises(RunBusy), run.lock():
            raise AssertionError("the failed attempt gave the lock away")


def test_leftovers_go_only_under_the_lock(tmp_path: Path) -> None:
    run = create_run(tmp_path, "mine")
    (run.checkpoints / "ckpt-00000001").mkdir()
    with holder(run) as other:
        unfinished = run.checkpoints / ".tmp-4711-0"
        (unfinished / "envs").mkdir(parents=True)
        (unfinished / "envs" / "000.json").write_text("{}")
        (run.checkpoints / ".tmp-4712-0").touch()
        (run.checkpoints / ".tmp-link").symlink_to(run.checkpoints / "ckpt-00000001")
        with pytest.raises(RunBusy), run.lock():
            raise AssertionError("two owners")
        assert (unfinished / "envs" / "000.json").exists()
        (run.path / "events").mkdir()
        (run.path / "events" / ".tmp-4713-0").touch()
        (run.path / "events" / "a000-s0.jsonl").touch()
        other.communicate("")
    with run.lock():
        assert [path.name for path in run.checkpoints.iterdir()] == ["ckpt-00000001"]
        assert [path.name for path in (run.path / "events").iterdir()] == ["a000-s0.jsonl"]


def test_killed_before_any_system_call_a_new_run_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path, calls = tmp_path / "a", []

    def before(number: int, name: str, args: tuple[object, ...]) -> None:
        calls.append(name)
        assert not path.exists() or open_run(path).run_id == "a"

    with watched(before):
        create_run(tmp_path, "a")
    assert calls.count("rename") == 1
    assert len(calls) > 5
