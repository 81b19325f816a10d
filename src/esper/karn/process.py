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
SAME_START_S = 0.1
"""The start of a process is given in clock ticks since boot, so two readings of it agree within a tick or two."""


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
    """A heartbeat of this host that lies ahead was written before the clock was set back: it is as old as that."""
    process: ProcessState


@record
class UnreadableStatus:
    """There is something in the place of the status file, and it is none."""

    reason: str


def read_heartbeat(run_dir: Path, wall: float) -> Heartbeat | UnreadableStatus | None:
    """Reads the status file of a run; None if there is none."""
    try:
        status = msgspec.convert(loads_json(read_regular(run_dir / STATUS_FILE, MAX_STATUS_BYTES)), RunStatus)
        if not 0 < status.pid <= MAX_PID:
            raise ValueError(f"no process has the number {status.pid}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        return UnreadableStatus(reason=f"{STATUS_FILE} is not a heartbeat: {error}")
    process, age_s = _state_of(status), wall - status.written_wall
    # Clocks of two hosts may differ, so that one which lies ahead says nothing there.
    return Heartbeat(
        status=status, age_s=max(age_s, 0.0) if process is ProcessState.ELSEWHERE else abs(age_s), process=process
    )


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
