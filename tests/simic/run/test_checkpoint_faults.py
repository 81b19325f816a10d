"""A save that is killed, refused or torn: earlier checkpoints stay, and nothing half-made counts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import StorageError
from esper.leyline.rundir import MANIFEST_FILE
from esper.simic.run.checkpoint import RETRY_PAUSES_S, load_checkpoint, save_checkpoint
from esper.simic.run.checkpoint_schedule import remove_old_checkpoints
from esper.simic.run.run_dir import RunDir
from tests.simic.run.saving import contents, facts, names, newest, run_with, save
from tests.simic.run.system_calls import Before, watched

ROOT = Path(__file__).parents[3]
STORAGE_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT)


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True)


def test_killed_before_or_inside_any_system_call_the_newest_commit_loads(tmp_path: Path) -> None:
    done = python("-m", "tests.simic.run.system_calls", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for points in json.loads(done.stdout):
        assert {point["call"] for point in points} == {"mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"}
        assert all(point["whole"] for point in points)
        assert {point["rejected"] for point in points} == {0}
        # Before the rename the old one is the newest, from then on the new one is: there is no third state.
        renamed = [point["call"] for point in points].index("rename")
        assert [point["newest"] for point in points] == [2] * (renamed + 1) + [3] * (len(points) - renamed - 1)
        # The next owner finds no trace of the death.
        assert {tuple(point["after"]) for point in points} == {("ckpt-00000002", "ckpt-00000003")}


def test_a_checkpoint_gets_its_name_when_all_in_it_is_durable_and_reports_when_the_name_is(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    opened: dict[int, Path] = {}
    synced: set[str] = set()
    dirty: set[Path] = set()
    dirty_when_renamed: list[set[Path]] = []
    manifest_after: set[str] = set()

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "rename":
            dirty_when_renamed.append(set(dirty))

    def after(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            opened[result] = Path(args[0])
            if args[1] & os.O_CREAT:
                assert args[1] & os.O_EXCL
                dirty.update((opened[result], opened[result].parent))
                if opened[result].name == MANIFEST_FILE:
                    manifest_after.update(path.name for path in dirty if path.suffix in (".json", ".safetensors"))
        elif name == "mkdir":
            dirty.add(Path(args[0]).parent)
        elif name == "write":
            dirty.add(opened[args[0]])
        elif name == "fsync":
            dirty.discard(opened[args[0]])
            synced.add(opened[args[0]].name)
        elif name == "rename":
            dirty.add(Path(args[1]).parent)

    with watched(before, after):
        saved = save(run, 2)
    assert manifest_after == {MANIFEST_FILE}, "the manifest is begun when everything else is durable"
    # The folder of checkpoints has a new name in it, which nobody needs yet.
    assert dirty_when_renamed == [{run.checkpoints}]
    assert dirty == set()
    assert {"agent.json", "policy.safetensors", MANIFEST_FILE, "checkpoints"} <= synced
    assert load_checkpoint(saved.path).files == contents(2)


# ---- a disk that refuses


Chooses = Callable[[int, str, tuple[Any, ...]], bool]


def failing(number: int, fails: Chooses) -> Before:
    def before(call: int, name: str, args: tuple[Any, ...]) -> None:
        if fails(call, name, args):
            raise OSError(number, os.strerror(number))

    return before


def at(point: int) -> Chooses:
    return lambda call, name, args: call == point


def adding_from(point: int) -> Chooses:
    """From this call on, all that a full disk refuses; taking away needs no space."""

    def fails(call: int, name: str, args: tuple[Any, ...]) -> bool:
        creates = name == "open" and bool(args[1] & os.O_CREAT)
        return call >= point and (creates or name in ("mkdir", "write", "fsync", "rename"))

    return fails


def num_calls(tmp_path: Path) -> int:
    seen: list[str] = []
    run = run_with(tmp_path / "counted", 1)
    with watched(lambda number, name, args: seen.append(name)):
        save(run, 2)
    return len(seen)


def test_one_error_at_any_call_is_survived(tmp_path: Path) -> None:
    run = run_with(tmp_path, 0)
    for point in range(num_calls(tmp_path)):
        with watched(failing(STORAGE_ERRORS[point % 5], at(point))):
            save(run, 1 + point)
        assert newest(run)[0].files == contents(1 + point)
        assert len(names(run)) == 2 + point, f"call {point} left something behind"


def test_errors_from_any_call_on_are_reported_and_leave_nothing(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1, 2)
    before = names(run)
    reported = []
    for point in range(num_calls(tmp_path)):
        with watched(failing(errno.ENOSPC, adding_from(point))):
            try:
                save(run, 3)
            except StorageError as error:
                reported.append(error)
        assert names(run) == before, f"from call {point} on"
    assert len(reported) == num_calls(tmp_path / "again"), "every one of them was needed"
    assert newest(run)[0].facts.index == 2


@pytest.mark.parametrize("number", STORAGE_ERRORS)
def test_a_save_is_tried_three_times_then_reported_with_all_that_helps(number: int, tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    pauses: list[float] = []
    tries: list[str] = []

    def refuse(call: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "write":
            tries.append(name)
            raise OSError(number, os.strerror(number))

    with watched(refuse), pytest.raises(StorageError) as raised:
        save_checkpoint(run, facts(2), contents(2), sleep=pauses.append)
    assert (len(tries), tuple(pauses)) == (3, RETRY_PAUSES_S)
    error, message = raised.value, str(raised.value)
    assert error.errno == number
    assert error.needed_bytes is not None
    assert error.free_bytes is not None
    assert error.needed_bytes > sum(map(len, contents(2).values()))
    for words in (str(run.checkpoints / "ckpt-00000002"), os.strerror(number), f"{error.needed_bytes:,} bytes needed"):
        assert words in message
    assert f"{error.free_bytes:,} bytes free" in message
    assert names(run) == ["ckpt-00000001"]


def test_a_file_that_outgrows_its_limit_is_a_storage_error(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    code = (
        "import resource, sys\n"
        "from esper.leyline import StorageError\n"
        "from esper.simic.run.checkpoint import save_checkpoint\n"
        "from esper.simic.run.run_dir import open_run\n"
        "from tests.simic.run.saving import facts, no_sleep\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "try:\n"
        "    save_checkpoint(open_run(sys.argv[1]), facts(2), {'big': bytes(8193)}, sleep=no_sleep)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = python("-c", code, str(run.path))
    assert f"ckpt-00000002: {os.strerror(errno.EFBIG)}" in done.stdout, done.stderr
    assert names(run) == ["ckpt-00000001"]


def test_bytes_that_come_back_changed_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path, 1)
    honest = os.write

    def forgetful(descriptor: int, content: memoryview) -> int:
        honest(descriptor, bytes(content).replace(b"rounds", b"r0unds"))
        return len(content)

    monkeypatch.setattr(os, "write", forgetful)
    with pytest.raises(StorageError, match="read back differ"):
        save(run, 2)
    assert names(run) == ["ckpt-00000001"]


def test_writes_that_take_a_part_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path)
    honest = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: honest(descriptor, content[:100]))
    save(run, 1)
    assert newest(run)[0].files == contents(1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; injected EACCES covers it")
def test_a_folder_without_the_right_to_write_is_a_storage_error(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    run.checkpoints.chmod(0o500)
    try:
        with pytest.raises(StorageError, match=os.strerror(errno.EACCES)):
            save(run, 2)
    finally:
        run.checkpoints.chmod(0o700)


def test_a_run_directory_that_vanished_is_a_storage_error(tmp_path: Path) -> None:
    run = RunDir(path=tmp_path / "gone")
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        save(run, 1)


# ---- retention on a disk that refuses


def test_a_victim_stops_being_a_checkpoint_before_it_loses_a_file(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1, 2)

    def refuse_all_but_manifests(call: int, name: str, args: tuple[Any, ...]) -> None:
        if name in ("unlink", "rmdir") and Path(args[0]).name != MANIFEST_FILE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with watched(refuse_all_but_manifests):
        left_over = remove_old_checkpoints(run, last=1, resumed_from=None)
    assert [(stuck.name, os.strerror(errno.EIO) in stuck.reason) for stuck in left_over] == [("ckpt-00000001", True)]
    left = {path.relative_to(run.checkpoints / "ckpt-00000001").as_posix()
            for path in (run.checkpoints / "ckpt-00000001").rglob("*") if path.is_file()}  # fmt: skip
    assert left == set(contents(1))
    assert remove_old_checkpoints(run, last=1, resumed_from=None) == ()
    assert names(run) == ["ckpt-00000002"]
