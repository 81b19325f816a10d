"""Errors that a person can mend: one line, and a code that tells scripts what kind it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline import CheckpointError, DataDamaged, DataNotFound, ExitCode, ModelFileError, RunBusy, StorageError
from esper.scripts import cli
from tests.karn.logs import write_run

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("wrong"), 2),
        (DataNotFound("wrong"), 2),
        (DataDamaged("wrong"), 2),
        (ModelFileError("wrong"), 2),
        (RunBusy("wrong"), 2),
        (PermissionError("wrong"), 2),
        (PermissionError(errno.EACCES, "wrong", "runs/a"), 2),
        (FileNotFoundError(errno.ENOENT, "wrong", "runs/a"), 6),
        (OSError(errno.EIO, "wrong"), 6),
        (CheckpointError("wrong"), 4),
        (StorageError("what is wrong", FULL, needed_bytes=5000, free_bytes=12), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_ends_the_command_with_its_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "tasks", command)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tasks"])
    assert stopped.value.code == code
    reported = capsys.readouterr().err
    assert len(reported.splitlines()) == 1
    assert ("wrong" in reported) == (code != 130)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "runs/a"), "runs/a: Is a directory; it is a folder; name a"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), "runs/a: Permission denied; check the perm"),
        (OSError(errno.EROFS, "Read-only file system", "/mnt/a"), "/mnt/a: Read-only file system; the disk is"),
        (OSError(errno.EIO, "Input/output\nerror", "runs/a"), "runs/a: Input/output error; check the path and the"),
        (FULL, "cannot write the output, or read or write a file: No space left on device; free space there"),
        (OSError("no number"), "no number"),
    ],
)
def test_an_error_of_the_system_names_path_reason_and_remedy(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "tasks", command)
    with pytest.raises(SystemExit):
        cli.main(["tasks"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"esper: error: {words}")
    assert "Errno" not in line


@pytest.mark.parametrize("args", [["tasks"], ["tasks", "--json"], ["--help"], ["status", "--json", "run"]])
def test_output_that_nothing_can_take_is_one_line(args: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "run", rounds=1)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "esper.scripts.cli", *args]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, cwd=tmp_path)
    assert done.returncode == ExitCode.STORAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith("esper: error: cannot write the output")


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = f"{sys.executable} -m esper.scripts.cli tasks --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


OPENING = """
import os
from esper.scripts import cli

def command():
    print("said to nobody")
    cli.sys.stderr.write("so is this")
    raise SystemExit(os.open(os.devnull, os.O_RDONLY))

cli.COMMANDS["tasks"] = command
cli.main(["tasks"])
"""


def test_no_file_gets_the_place_of_a_standard_stream_that_was_closed() -> None:
    """A log there would take whatever a library writes to standard error."""
    command = f"{sys.executable} -c '{OPENING}' <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command]).returncode == 3


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise KeyError("ours")

    monkeypatch.setitem(cli.COMMANDS, "tasks", command)
    with pytest.raises(KeyError):
        cli.main(["tasks"])


def test_a_storage_error_says_what_is_known() -> None:
    reported = str(StorageError("runs/a", FULL, needed_bytes=5000, free_bytes=12))
    assert reported == "cannot write runs/a: No space left on device (5,000 bytes needed, 12 bytes free)"
    reported = str(StorageError("runs/a", FULL, needed_bytes=None, free_bytes=None))
    assert reported == "cannot write runs/a: No space left on device"


def test_codes_are_what_scripts_rely_on() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "UNEXPECTED": 1,
        "USAGE": 2,
        "LOG_INCOMPLETE": 3,
        "CHECKPOINT": 4,
        "NUMERIC": 5,
        "STORAGE": 6,
        "WORKERS": 7,
        "HANGUP": 129,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }
