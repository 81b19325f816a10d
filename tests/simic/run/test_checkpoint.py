"""Saving and loading: what went in comes out, and nothing that is not proved does."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import CheckpointError, ModelFileError
from esper.leyline.rundir import MANIFEST_FILE
from esper.simic.run.checkpoint import (
    CheckpointFacts,
    LoadedCheckpoint,
    checkpoint_folders,
    load_checkpoint,
    newest_valid,
    save_checkpoint,
)
from esper.simic.run.run_dir import create_run
from tests.simic.run.saving import contents, facts, names, newest, run_with, save


def test_what_went_in_comes_out(tmp_path: Path) -> None:
    run = run_with(tmp_path, 3, 12)
    saved = save(run, 104)
    loaded, rejected = newest(run)
    assert rejected == ()
    assert loaded == LoadedCheckpoint(path=saved.path, facts=facts(104), files=contents(104))
    assert names(run) == ["ckpt-00000003", "ckpt-00000012", "ckpt-00000104"]
    assert list(checkpoint_folders(run)) == [3, 12, 104]
    assert checkpoint_folders(run)[104] == saved.path
    assert saved.size_bytes == sum(file.stat().st_size for file in saved.path.rglob("*") if file.is_file())
    assert saved.manifest_sha256 == json.loads((saved.path / MANIFEST_FILE).read_bytes())["sha256"]
    assert saved.save_ms > 0


def test_the_newest_is_reported_by_number_not_by_text_or_time(tmp_path: Path) -> None:
    run = run_with(tmp_path, 100_000_000, 99_999_999)
    assert newest(run)[0].facts.index == 100_000_000


def test_file_and_manifest_hashes_are_plain_sha256(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    manifest = json.loads((run.checkpoints / "ckpt-00000001" / MANIFEST_FILE).read_bytes())
    policy = contents(1)["policy.safetensors"]
    assert manifest["files"]["policy.safetensors"] == {
        "sha256": hashlib.sha256(policy).hexdigest(),
        "size": len(policy),
    }
    own = manifest.pop("sha256")
    assert own == hashlib.sha256(json.dumps(manifest, indent=1, sort_keys=True).encode()).hexdigest()


@given(
    files=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,12}\.safetensors", fullmatch=True),
        st.binary(max_size=200).map(lambda content: bytes(8) + b"{" + content) | st.just(b""),
        max_size=4,
    ),
    identity=st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.booleans(), max_size=4),
    index=st.integers(0, 10**10),
    score=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
@settings(max_examples=50, deadline=None)
def test_whatever_is_saved_loads_unchanged(
    files: dict[str, bytes], identity: dict[str, str | int | bool], index: int, score: float | None
) -> None:
    given = CheckpointFacts(index=index, run_id="run", attempt=2, next_seq=5, score=score, identity=identity)
    with TemporaryDirectory() as folder:
        run = create_run(folder)
        save_checkpoint(run, given, files)
        loaded, rejected = newest(run)
    assert (loaded.files, loaded.facts, rejected) == (files, given, ())


def test_a_fact_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        save(run, 1, score=float("nan"))
    assert names(run) == []


# ---- damage

Damage = Callable[[Path], object]
POLICY = "policy.safetensors"


def rewrite(file: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_bytes(change(path.read_bytes()))

    return damage


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda content: bytes(byte ^ (index == position) for index, byte in enumerate(content))


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


def add(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def swap_with_older(file: str) -> Damage:
    return lambda folder: shutil.copy(folder.with_name("ckpt-00000041") / file, folder / file)


def link(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to(folder.with_name("ckpt-00000041") / "state.json")


def file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def of_format(version: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), "format": version}).encode()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (rewrite(POLICY, lambda content: content[:-1]), "policy.safetensors has 408 bytes, expected 409"),
    "zeroed": (rewrite(POLICY, lambda content: bytes(len(content))), "policy.safetensors sha256 mismatch"),
    "empty": (rewrite(POLICY, lambda content: b""), "policy.safetensors has 0 bytes, expected 409"),
    "header bit": (rewrite(POLICY, flip(0)), "policy.safetensors sha256 mismatch"),
    "payload bit": (rewrite(POLICY, flip(300)), "policy.safetensors sha256 mismatch"),
    "manifest bit": (rewrite(MANIFEST_FILE, flip(150)), "manifest.json is damaged"),
    "manifest value": (
        rewrite(MANIFEST_FILE, replace(b'"next_seq": 420', b'"next_seq": 421')),
        "its sha256 does not match",
    ),
    "manifest spaces": (rewrite(MANIFEST_FILE, lambda content: content + b"\n"), "its sha256 does not match"),
    "manifest truncated": (rewrite(MANIFEST_FILE, lambda content: content[:-9]), "manifest.json is damaged: not JSON"),
    "manifest empty": (rewrite(MANIFEST_FILE, lambda content: b""), "manifest.json is damaged: not JSON"),
    "manifest no object": (rewrite(MANIFEST_FILE, lambda content: b"[" * 10**5), "manifest.json is damaged: not JSON"),
    "manifest of an older one": (swap_with_older(MANIFEST_FILE), "manifest.json belongs to ckpt-00000041"),
    "manifest huge": (lambda folder: os.truncate(folder / MANIFEST_FILE, 2**25), "has more than the 16,777,216 bytes"),
    "manifest deleted": (lambda folder: (folder / MANIFEST_FILE).unlink(), "manifest.json is missing"),
    "deleted": (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
    "added": (add("notes.txt", b"hi"), "notes.txt does not belong to it"),
    "added below": (lambda folder: (folder / "envs").mkdir(), "envs is not a file"),
    "of an older one": (swap_with_older(POLICY), "policy.safetensors sha256 mismatch"),
    "link": (link, "state.json is not a file"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is not a file"),
    "older format": (rewrite(MANIFEST_FILE, of_format(1)), "checkpoint format 1; this release reads format 2 only"),
    "no format": (rewrite(MANIFEST_FILE, lambda content: b"{}"), "checkpoint format None; this release reads"),
    "pickle": (add("policy.pt", b""), "policy.pt is a pickle file; Esper reads safetensors checkpoints only"),
    "pickled content": (add(POLICY, pickle.dumps({"w": 1})), "policy.safetensors is a pickle file; Esper reads"),
    "zip of pickles": (add(POLICY, b"PK\x03\x04" + bytes(60)), "policy.safetensors is a pickle file; Esper reads"),
    "a file": (file_in_its_place, "not a folder"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_the_newest_is_named_and_the_older_one_used(kind: str, tmp_path: Path) -> None:
    damage, reason = DAMAGES[kind]
    run = run_with(tmp_path, 40, 41, 42)
    damage(run.checkpoints / "ckpt-00000042")
    loaded, (rejected,) = newest(run)
    assert (loaded.facts.index, loaded.files) == (41, contents(41))
    assert rejected.name == "ckpt-00000042"
    assert reason in rejected.reason


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if "older" not in kind and kind != "manifest value"])
def test_damage_to_all_is_an_error_that_names_each(kind: str, tmp_path: Path) -> None:
    damage, reason = DAMAGES[kind]
    run = run_with(tmp_path, 41, 42)
    for index in (42, 41):
        damage(run.checkpoints / f"ckpt-{index:08d}")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is valid") as raised:
        newest(run)
    assert str(raised.value).count(reason) == 2


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_changed_byte_gets_past(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        run = run_with(Path(folder), 5)
        path = run.checkpoints / "ckpt-00000005"
        file = data.draw(st.sampled_from([POLICY, "state.json", "agent.json", MANIFEST_FILE]))
        content = bytearray((path / file).read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        (path / file).write_bytes(content)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_a_manifest_made_to_match_does_not_smuggle_in_a_pickle(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path.joinpath("touched").touch, ())

    run = run_with(tmp_path)
    files = {POLICY: pickle.dumps(Harmful())}
    save_checkpoint(run, facts(1), files)
    with pytest.raises(CheckpointError, match="is a pickle file"):
        newest(run)
    assert not tmp_path.joinpath("touched").exists()


def test_a_safetensors_length_that_looks_like_a_pickle_is_none(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    for index, start in enumerate((b"\x80\x02", b"\x80\x04", b"PK\x03\x04")):
        content = start.ljust(8, b"\0") + b'{"a": 1}'
        save_checkpoint(run, facts(index), {POLICY: content})
        assert newest(run)[0].files == {POLICY: content}


def test_contents_that_the_caller_cannot_use_count_as_rejected(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1, 2, 3)

    def check(loaded: LoadedCheckpoint) -> None:
        if loaded.facts.index > 1:
            raise ModelFileError("unknown blueprint 'c'. Known: a, b")

    loaded, _, rejected = newest_valid(run, check)
    assert loaded.facts.index == 1
    assert [(r.name, r.reason) for r in rejected] == [
        (name, "unknown blueprint 'c'. Known: a, b") for name in ("ckpt-00000003", "ckpt-00000002")
    ]


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    run = run_with(tmp_path, 7)
    shutil.copytree(run.checkpoints / "ckpt-00000007", run.checkpoints / "ckpt-00000009")
    shutil.copytree(run.checkpoints / "ckpt-00000007", run.checkpoints / "ckpt-00000007.bak")
    shutil.copytree(run.checkpoints / "ckpt-00000007", run.checkpoints / ".tmp-1-0")
    loaded, rejected = newest(run)
    assert loaded.facts.index == 7
    assert [(r.name, r.reason) for r in rejected] == [("ckpt-00000009", "manifest.json belongs to ckpt-00000007")]
    shutil.rmtree(run.checkpoints / "ckpt-00000007")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints"):
        newest(run)


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint yet"):
        newest(run_with(tmp_path))


# ---- the place is taken


def test_a_valid_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    run = run_with(tmp_path, 4)
    before = (run.checkpoints / "ckpt-00000004" / MANIFEST_FILE).read_bytes()
    with pytest.raises(CheckpointError, match="ckpt-00000004 is saved already"):
        save(run, 4, score=1.0)
    assert (run.checkpoints / "ckpt-00000004" / MANIFEST_FILE).read_bytes() == before


def test_a_rejected_checkpoint_makes_way_and_is_kept_aside(tmp_path: Path) -> None:
    run = run_with(tmp_path, 3, 4)
    for _ in range(2):
        rewrite(POLICY, flip(50))(run.checkpoints / "ckpt-00000004")
        assert newest(run)[0].facts.index == 3
        save(run, 4)
        assert newest(run) == (load_checkpoint(run.checkpoints / "ckpt-00000004"), ())
    assert names(run) == [
        "ckpt-00000003", "ckpt-00000004", "rejected-ckpt-00000004-0", "rejected-ckpt-00000004-1",
    ]  # fmt: skip
