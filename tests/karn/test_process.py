"""Whether the process behind a run still lives, asked with real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from esper.karn.process import SAME_START_S, ProcessState, read_heartbeat
from esper.leyline import process_started_s
from tests.karn.logs import WALL
from tests.karn.test_diagnosis import status

HERE: Mapping[str, object] = {"pid": os.getpid(), "host": socket.gethostname()}


def write(folder: Path, **fields: object) -> None:
    (folder / "status.json").write_bytes(msgspec.json.encode(status(**{**HERE, **fields})))


def state(folder: Path) -> ProcessState:
    found = read_heartbeat(folder, WALL)
    assert found is not None
    return found.process


def test_this_process_is_alive(tmp_path: Path) -> None:
    write(tmp_path, process_started_s=process_started_s(os.getpid()))
    found = read_heartbeat(tmp_path, WALL + 2.5)
    assert found is not None
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


def test_a_status_file_that_is_missing_or_half_written_is_no_heartbeat(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path, WALL) is None
    write(tmp_path)
    whole = (tmp_path / "status.json").read_bytes()
    (tmp_path / "status.json").write_bytes(whole[: len(whole) // 2])
    assert read_heartbeat(tmp_path, WALL) is None


def test_a_clock_that_runs_behind_does_not_make_a_negative_age(tmp_path: Path) -> None:
    write(tmp_path)
    found = read_heartbeat(tmp_path, WALL - 100.0)
    assert found is not None
    assert found.age_s == 0.0


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**40, 2**70])
def test_a_status_with_a_number_that_no_process_has_is_no_heartbeat(pid: int, tmp_path: Path) -> None:
    write(tmp_path, pid=1)
    path = tmp_path / "status.json"
    path.write_text(path.read_text().replace('"pid":1,', f'"pid":{pid},'))
    assert read_heartbeat(tmp_path, WALL) is None


def test_a_status_that_is_nested_or_too_large_is_no_heartbeat(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "status.json"
    whole = path.read_bytes()
    path.write_bytes(b"[" * 4000)
    assert read_heartbeat(tmp_path, WALL) is None
    path.write_bytes(whole.replace(b"{", b'{"x":' + b"[" * 4000 + b"]" * 4000 + b",", 1))
    assert read_heartbeat(tmp_path, WALL) is None
    path.write_bytes(whole + b" " * 1_000_000)
    assert read_heartbeat(tmp_path, WALL) is None
