"""One way to replace a file: the old content or the new, and nothing left over."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline import RunBusy, files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_bytes(b"old and longer")
    files.write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["a.json"]


def test_the_file_is_durable_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(stat.S_ISDIR(os.fstat(fd).st_mode)) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace") or replace(old, new))
    files.write_atomic(tmp_path / "a", b"1")
    assert calls == [False, "replace", True]
    calls.clear()
    files.write_atomic(tmp_path / "a", b"2", durable=False)
    assert calls == ["replace"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:1])
        raise error

    monkeypatch.setattr(files, "write_all", half)
    with pytest.raises(type(error)):
        files.write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_new_file_takes_no_name_that_is_there_not_even_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "link", b"x")
    assert not (tmp_path / "elsewhere").exists()


def test_the_file_has_the_permissions_of_its_owners_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "device", "large"])
def test_only_a_regular_file_of_its_size_is_read(kind: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"secret")
    path = tmp_path / "status.json"
    {
        "link": lambda: path.symlink_to(other),
        "dangling": lambda: path.symlink_to("nowhere"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "large": lambda: path.write_bytes(b"12345"),
    }[kind]()
    with pytest.raises(OSError, match="more than the 4 bytes" if kind == "large" else "regular files only") as caught:
        files.read_regular(path, 4)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_regular_file_is_read_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    assert files.read_regular(tmp_path / "a", 4) == b"1234"
    with pytest.raises(FileNotFoundError):
        files.read_regular(tmp_path / "b", 4)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"[NaN]",
        b"[-Infinity]",
        b"[1e400]",
        b"[9223372036854775808]",
        b"[" + b"9" * 6_000 + b"]",
        b'"\xff"',
        b'{"a": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b"{",
        b"",
    ],
)
def test_json_that_some_reader_could_not_hold_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        files.loads_json(text)


def test_json_is_decoded() -> None:
    text = '{"a": [1.5, -9223372036854775808, 9223372036854775807, null], "b": "ä\\ud83c\\udf31"}'
    assert files.loads_json(text) == files.loads_json(text.encode())
    assert files.loads_json(text) == {"a": [1.5, -(2**63), 2**63 - 1, None], "b": "ä\N{SEEDLING}"}


# ---- folders


def test_a_folder_gets_its_name_when_all_is_in_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    with files.write_folder(target) as unfinished:
        (unfinished / "a").write_bytes(b"1")
        assert not target.exists()
    assert names(target) == ["a"]
    assert names(target.parent) == ["folder"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_that_was_not_finished_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    def fail(unfinished: Path) -> None:
        (unfinished / "half").write_bytes(b"1")
        raise error

    with pytest.raises(type(error)), files.write_folder(tmp_path / "a") as unfinished:
        fail(unfinished)
    assert names(tmp_path) == []


def test_a_folder_takes_the_place_of_an_empty_one_only(tmp_path: Path) -> None:
    for place in ("empty", "full"):
        (tmp_path / place).mkdir()
    (tmp_path / "full" / "precious").touch()
    with files.write_folder(tmp_path / "empty") as unfinished:
        (unfinished / "a").touch()
    with pytest.raises(OSError, match="not empty"), files.write_folder(tmp_path / "full") as unfinished:
        (unfinished / "a").touch()
    assert (names(tmp_path), names(tmp_path / "full")) == (["empty", "full"], ["precious"])


def test_a_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with files.sole_user(folder):
        with pytest.raises(RunBusy, match="another process writes to"), files.sole_user(folder):
            pass
        (folder / "mine").touch()
    with files.sole_user(folder):
        assert names(folder) == ["mine"]


def test_a_killed_user_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from esper.leyline.files import sole_user\n"
        "with sole_user(pathlib.Path(sys.argv[1])):\n    print('in', flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"in\n")
    with files.sole_user(tmp_path / "a"):
        pass


def test_a_folder_that_stays_empty_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "a" / "b", tmp_path / "there"):
        with files.sole_user(folder):
            assert folder.is_dir()
    assert names(tmp_path) == ["there"]


def test_what_a_killed_process_left_in_its_scratch_folder_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os; from esper.leyline.files import scratch_folder\n"
        "with scratch_folder() as folder:\n    (folder / 'large').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = names(tmp_path)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{files.SCRATCH_PREFIX}link").symlink_to(tmp_path / "elsewhere")
    with files.scratch_folder() as first, files.scratch_folder() as second:
        (first / "mine").touch()
        assert left not in names(tmp_path)
        with files.scratch_folder():
            assert (first / "mine").exists()
        assert second.is_dir()
    assert names(tmp_path) == [f"{files.SCRATCH_PREFIX}link"]
