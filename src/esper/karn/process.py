"""Is the process that writes a run still there? Reads the heartbeat file and asks the operating system."""

from __future__ import annotations

import os
import socket
from enum import Enum
from pathlib import Path

import msgspec

from esper.leyline import record
from esper.leyline.files import loads_json, read_regular
from esper.leyline.rundir import STATUS_FILE, RunStatus, process_started_s

MAX_STATUS_BYTES = 1_000_000
MAX_PID = 2**31 - 1
# The start of a process is given in clock ticks since boot, so two readings of it agree within a tick or two.
SAME_START_S = 1.0


class ProcessState(str, Enum):
    """What became of the process that wrote the heartbeat."""

    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "on another host"


@record
class Heartbeat:
    """What the status file says, how old it is, and whether its writer still runs. Never evidence."""

    status: RunStatus
    age_s: float
    process: ProcessState


def read_heartbeat(run_dir: Path, wall: float) -> Heartbeat | None:
    """Reads the status file of a run; None if there is none that can be read."""
    try:
        status = msgspec.convert(loads_json(read_regular(run_dir / STATUS_FILE, MAX_STATUS_BYTES)), RunStatus)
    except (OSError, ValueError, msgspec.ValidationError):
        return None
    if not 0 < status.pid <= MAX_PID:
        return None
    return Heartbeat(status=status, age_s=max(wall - status.written_wall, 0.0), process=_state_of(status))


def _state_of(status: RunStatus) -> ProcessState:
    if status.host != socket.gethostname():
        return ProcessState.ELSEWHERE
    return ProcessState.ALIVE if _runs(status.pid, status.process_started_s) else ProcessState.GONE


def _runs(pid: int, started_s: float | None) -> bool:
    """True if the process exists and is not a later one with the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to somebody else
        pass
    now_s = process_started_s(pid)
    return started_s is None or now_s is None or abs(now_s - started_s) <= SAME_START_S
