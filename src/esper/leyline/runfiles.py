"""What the small files of a run directory say. One side writes them, the other reads; neither knows the other."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from esper.leyline.record import record

_SEGMENT = re.compile(r"a(\d{3,})-p(\d{4,})\.(jsonl|parquet)")


@record
class AttemptEntry:
    """One start of the run."""

    attempt: int
    first_seq: int
    """An event of an earlier attempt counts only if its sequence number is below this one."""
    started_wall: float


@record
class SegmentEntry:
    """A closed file of the log. It is never edited again."""

    name: str
    attempt: int
    first_seq: int | None
    last_seq: int | None
    """None in a segment without a whole line."""
    num_lines: int
    num_bytes: int
    """Of the whole file, a torn tail included; the hash covers the same bytes."""
    sha256: str
    torn_tail_bytes: int
    """Bytes after the last newline: a line that was being written when the process died."""


@record
class RunManifest:
    """`manifest.json`: what the log of a run consists of. It can be made again from the segments."""

    v: int
    run: str
    group: str
    attempts: tuple[AttemptEntry, ...]
    segments: tuple[SegmentEntry, ...]
    active: SegmentEntry | None = None
    """The active file as it was when its process ended in good order; None while it is written, and after a crash."""


@record
class RunStatus:
    """`status.json`: the heartbeat. A convenience, never evidence."""

    run: str
    attempt: int
    pid: int
    host: str
    process_started_s: float | None
    """Start of the process, to tell it from a later one with the same number; None where that cannot be known."""
    written_wall: float
    closed: bool
    """True once the hub was closed in good order."""
    phase: str
    round: int | None
    epoch: int | None
    last_seq: int
    """The last sequence number given out; -1 before the first."""
    silence_s: float
    """Time since the training thread last reported progress."""
    median_epoch_s: float | None
    num_dropped: Mapping[str, int]
    num_held: int
    """Events waiting in memory because the log cannot be written."""
    log_error: str | None
    disk_free_bytes: int | None


def segment_name(attempt: int, part: int) -> str:
    """The name of a closed segment."""
    return f"a{attempt:03d}-p{part:04d}.jsonl"


def segment_position(name: str) -> tuple[int, int] | None:
    """Attempt and part of a segment, in either form; None for any other file."""
    found = _SEGMENT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def process_started_s(pid: int) -> float | None:
    """When a process of this machine began, in Unix seconds; None if it is gone or the system does not tell."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    ticks_since_boot = int(after_name[19])
    return int(boot.split()[1]) + ticks_since_boot / os.sysconf("SC_CLK_TCK")
