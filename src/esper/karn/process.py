"""Is the process that writes a run still there? Reads the heartbeat file and asks the operating system."""

from __future__ import annotations

from enum import Enum

from esper.leyline import record


class ProcessState(str, Enum):
    """What became of the process that wrote the heartbeat."""

    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    """On another host, where it cannot be asked."""


@record
class RunStatus:
    """What is known about a run besides its log. A convenience, never evidence."""

    process: ProcessState
    pid: int
    heartbeat_age_s: float
    silence_s: float | None
    """Since the training thread last made progress; None if it never did."""
    write_failing: bool
    """True while the log cannot be written."""
