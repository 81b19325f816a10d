"""The files of a run directory: their names, and what the small ones say. Who writes and who reads is unknown here.

The event log is one file per attempt, `events/a<attempt>-s<first sequence number>.jsonl`. It is only appended to, and
gets a checksum file beside it (`sha256sum -c` reads it) when the attempt ends, or when the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from esper.leyline.record import record

CONFIG_FILE = "config.json"
"""The resolved configuration, complete."""
MANIFEST_FILE = "manifest.json"
"""Inside a checkpoint: its files and their hashes."""
EVENTS_DIR = "events"
"""The event log, one file per attempt."""
STATUS_FILE = "status.json"
"""The heartbeat. A convenience, never evidence."""
LOCK_FILE = "run.lock"
CHECKPOINTS_DIR = "checkpoints"
METRICS_DIR = "metrics"
"""TensorBoard files."""
WANDB_DIR = "wandb"
"""Where that library puts its files."""
REPORT_FILE = "report.html"
EVALUATION_PICTURES = ("frontier.png", "compute.png", "paired.png", "curves.png", "growth.png")
"""Figures in the folder of an evaluation, in the order in which they are shown."""
MAX_PICTURE_BYTES = 20_000_000
"""Of each; a larger file is none and is not read."""
DEFAULT_GROUP = "main"
"""Cohort of a run that nobody named one for."""
_EVENT_FILE = re.compile(r"a(\d{3,9})-s(\d{1,18})\.jsonl")


@record
class EventFile:
    """The log of one attempt."""

    path: Path
    attempt: int
    """Which start of the run wrote it: 0 first, +1 per resume."""
    first_seq: int
    """Events of earlier attempts count only if their sequence number is below this one."""

    @property
    def name(self) -> str:
        """Relative to the run directory."""
        return f"{EVENTS_DIR}/{self.path.name}"

    @property
    def checksum_path(self) -> Path:
        """Where its hash is, once no more is written to it."""
        return self.path.with_name(f"{self.path.name}.sha256")

    def checksum(self, sha256: str) -> str:
        """What the checksum file says for a hash."""
        return f"{sha256}  {self.path.name}\n"


def event_file(run_dir: Path, attempt: int, first_seq: int) -> EventFile:
    """The file that an attempt writes."""
    path = run_dir / EVENTS_DIR / f"a{attempt:03d}-s{first_seq}.jsonl"
    return EventFile(path=path, attempt=attempt, first_seq=first_seq)


def event_files(run_dir: Path) -> list[EventFile]:
    """The log of a run in order of attempts; empty if there is none.

    Raises:
        ValueError: The folder holds a log of format 1, or links, pipes or folders in place of the files of its log.
    """
    if (run_dir / EVENTS_DIR).is_symlink():
        raise ValueError(f"{run_dir / EVENTS_DIR} is a link; the log of a run must lie in its own folder")
    if (run_dir / "events.jsonl").exists() or (run_dir / "segments").is_dir():
        raise ValueError(
            f"{run_dir} holds an event log of format 1 (events.jsonl, segments/); this Esper reads format 2 "
            f"({EVENTS_DIR}/). Read or resume it with the Esper that wrote it, or start a new run"
        )
    found = [(path, _EVENT_FILE.fullmatch(path.name)) for path in (run_dir / EVENTS_DIR).glob("*.jsonl")]
    files = [EventFile(path=path, attempt=int(name[1]), first_seq=int(name[2])) for path, name in found if name]
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # that of a withdrawn attempt
            if not stat.S_ISREG(file.path.lstat().st_mode):
                raise ValueError(f"{file.path} is not a regular file, as a log must be; nothing of this run was read")
    return sorted(files, key=lambda file: (file.attempt, file.first_seq))


@record
class RunStatus:
    """`status.json`: the heartbeat. A convenience, never evidence."""

    run: str
    attempt: int
    pid: int
    host: str
    process_started_s: float | None = None
    """Start of the process in seconds since boot, to tell it from a later one with the same number; None: not known."""
    written_wall: float
    closed: bool
    """True once the hub was closed in good order."""
    phase: str
    round: int | None = None
    epoch: int | None = None
    last_seq: int
    """The last sequence number given out; -1 before the first."""
    silence_s: float
    """Time since the training thread last reported progress."""
    median_epoch_s: float | None = None
    num_dropped: Mapping[str, int]
    num_held: int
    """Events waiting in memory because the log cannot be written."""
    log_error: str | None = None
    disk_free_bytes: int | None = None


def process_started_s(pid: int) -> float | None:
    """When a process of this machine began, in seconds since boot; None if it is gone or the system does not say.

    Not as a time of day, which changes for a living process whenever the clock is set.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")
