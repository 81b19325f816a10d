"""Whether the process behind a run still lives, asked with real processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esper.karn.process import SAME_START_S, Heartbeat, ProcessState, UnreadableStatus, read_heartbeat
from esper.leyline import process_started_s
from tests.karn.logs import WALL
from tests.karn.test_diagnosis import status

HERE: Mapping[str, object] = {"pid": os.getpid(), "host": socket.gethostname()}


def write(folder: Path, **fields: object) -> None:
    (folder / "status.json").write_bytes(msgspec.json.encode(status(**{**HERE, **fields})))


def state(folder: Path) -> ProcessState:
    found = read_heartbeat(folder, WALL)
    assert isinstance(found, Heartbeat)
    return found.process


def test_this_process_is_alive(tmp_path: Path) -> None:
    write(tmp_path, process_started_s=process_started_s(os.getpid()))
    found = read_heartbeat(tmp_path, WALL + 2.5)
    assert isinstance(found, Heartbeat)
    assert (found.process, found.age_s) == (ProcessState.ALIVE, 2.5)


def test_a_later_process_with_the_same_number_is_another_one(tmp_path: Path) -> None:
    began = process_started_s(os.getpid())
    if began is None:
        pytest.skip("this system does not tell when a process began")
    write(tmp_path, process_started_s=began - 10 * SAME_START_S)
    assert state(tmp_path) is ProcessState.GONE


def test_a_process_that_ended_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    write(tmp_path, pid=child.pid)
    assert state(tmp_path) is ProcessState.GONE


def test_a_process_on_another_host_cannot_be_asked(tmp_path: Path) -> None:
    write(tmp_path, host="some-other-host")
    assert state(tmp_path) is ProcessState.ELSEWHERE


def test_a_clock_that_is_set_makes_no_living_process_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then gives another time of the boot, and so of the start of every process."""
    write(tmp_path, process_started_s=process_started_s(os.getpid()))
    read_text = Path.read_text

    def an_hour_later(path: Path, *given: Any, **named: Any) -> str:
        text = read_text(path, *given, **named)
        return re.sub(r"btime (\d+)", lambda found: f"btime {int(found[1]) + 3600}", text)

    monkeypatch.setattr(Path, "read_text", an_hour_later)
    assert state(tmp_path) is ProcessState.ALIVE


def unreadable(folder: Path) -> str:
    found = read_heartbeat(folder, WALL)
    assert isinstance(found, UnreadableStatus)
    return found.reason


def test_a_status_file_that_is_missing_or_half_written_is_no_heartbeat(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path, WALL) is None
    write(tmp_path)
    whole = (tmp_path / "status.json").read_bytes()
    (tmp_path / "status.json").write_bytes(whole[: len(whole) // 2])
    assert "status.json is not a heartbeat" in unreadable(tmp_path)


def test_a_heartbeat_ahead_of_the_clock_is_old_here_and_says_nothing_elsewhere(tmp_path: Path) -> None:
    for host, age_s in ((socket.gethostname(), 100.0), ("some-other-host", 0.0)):
        write(tmp_path, host=host)
        found = read_heartbeat(tmp_path, WALL - 100.0)
        assert isinstance(found, Heartbeat)
        assert found.age_s == age_s


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**40, 2**70])
def test_a_status_with_a_number_that_no_process_has_is_no_heartbeat(pid: int, tmp_path: Path) -> None:
    write(tmp_path, pid=1)
    path = tmp_path / "status.json"
    path.write_text(path.read_text().replace('"pid":1,', f'"pid":{pid},'))
    assert str(pid) in unreadable(tmp_path)


def test_a_status_that_is_nested_or_too_large_is_no_heartbeat(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "status.json"
    whole = path.read_bytes()
    path.write_bytes(b"[" * 4000)
    assert "nested too deeply" in unreadable(tmp_path)
    path.write_bytes(whole.replace(b"{", b'{"x":' + b"[" * 4000 + b"]" * 4000 + b",", 1))
    assert "nested too deeply" in unreadable(tmp_path)
    path.write_bytes(whole + b" " * 1_000_000)
    assert "more than the 1,000,000 bytes" in unreadable(tmp_path)
