"""Reads the event log of a run directory, finished or growing. Knows files and attempts, not what events mean.

A line is an event only if it ends in a newline: what follows the last newline is a torn tail, which a live reader
leaves for later. A run that was resumed holds some rounds twice; an event of an attempt counts only if its sequence
number is below the first one of every later attempt, so each round is read once, as it finally happened. Where an
attempt begins is in the name of its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from esper.karn.codec import LineError, NewerSchema, decode_line
from esper.leyline import LoggedEvent, record
from esper.leyline.files import open_regular
from esper.leyline.rundir import EVENTS_DIR, EventFile, event_files

MAX_NAMED = 5
"""Runs that an error names; a folder may hold hundreds."""


@record
class BadLine:
    """A line that is not an event although it ends in a newline: the file was damaged after it was written."""

    file: str
    """Relative to the run directory."""
    offset: int
    """Where the line begins, in bytes."""
    reason: str


LogItem = LoggedEvent | BadLine
MAX_LINE_BYTES = 1 << 24
"""A longer line is damage, and is not held in memory."""


def is_run(folder: Path) -> bool:
    """True if the folder holds an event log.

    Raises:
        ValueError: It is one of an older format.
    """
    return bool(event_files(folder)) or (folder / EVENTS_DIR).is_dir()


def find_run(folder: Path) -> Path:
    """Checks that a folder is a run directory. The error names the runs below it, if there are any."""
    if is_run(folder):
        return folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected a run directory with {EVENTS_DIR}/")
    runs = _runs_in(folder)
    below = ", ".join(map(str, runs[-MAX_NAMED:])) or "none"
    if len(runs) > MAX_NAMED:
        below = f"{len(runs)}, the last {below}"
    raise ValueError(f"{folder} holds no event log ({EVENTS_DIR}/). Runs inside it: {below}")


def find_runs(folder: Path) -> tuple[Path, ...]:
    """The run directories that a path means: itself, or those directly inside it."""
    if is_run(folder):
        return (folder,)
    runs = _runs_in(folder) if folder.is_dir() else ()
    if not runs:
        raise ValueError(f"no runs in {folder}: expected a run directory, or a folder of run directories")
    return runs


def _runs_in(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(child for child in folder.iterdir() if child.is_dir() and is_run(child)))


@record
class LoggedLine:
    """One whole line of a file, and what it says."""

    offset: int
    end: int
    """Where the next line begins."""
    text: bytes
    """The first `MAX_LINE_BYTES` of a line that is longer."""
    item: LogItem
    superseded: bool
    """True if a later attempt wrote this part of the run again."""


def read_log(run_dir: Path) -> Iterator[tuple[EventFile, Iterator[LoggedLine]]]:
    """The files of a log in order of writing, each with its lines."""
    files = event_files(run_dir)
    for file in files:
        yield file, read_file(file, files)


def read_file(file: EventFile, files: list[EventFile], start: int = 0) -> Iterator[LoggedLine]:
    """Every whole line of a file from an offset on; none if the file is gone, as that of a withdrawn attempt is.

    One process wrote the file, so a line of a newer version among others is damage.

    Raises:
        NewerSchema: There are no others: the file is of a newer Esper.
    """
    limit = min((later.first_seq for later in files if later.attempt > file.attempt), default=None)
    newer: NewerSchema | None = None
    any_event = start > 0
    try:
        stream = open(open_regular(file.path), "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with stream:
        offset = stream.seek(start)
        while line := stream.readline(MAX_LINE_BYTES):
            last = line
            while len(last) == MAX_LINE_BYTES and not last.endswith(b"\n"):
                last = stream.readline(MAX_LINE_BYTES)
            if not last.endswith(b"\n"):
                break
            item: LogItem
            try:
                if last is not line:
                    raise LineError(f"longer than the {MAX_LINE_BYTES:,} bytes that a line may have")
                item, any_event = decode_line(line), True
            except (LineError, NewerSchema) as error:
                item = BadLine(file=file.name, offset=offset, reason=str(error))
                if newer is None and isinstance(error, NewerSchema):
                    newer = NewerSchema(f"{file.path} at byte {offset}: {error}")
            superseded = isinstance(item, LoggedEvent) and limit is not None and item.seq >= limit
            end = stream.tell()
            yield LoggedLine(offset=offset, end=end, text=line, item=item, superseded=superseded)
            offset = end
    if newer is not None and not any_event:
        raise newer


def replay(run_dir: Path) -> Iterator[LogItem]:
    """Every event that counts, in order, and every damaged line."""
    for _, lines in read_log(run_dir):
        yield from (line.item for line in lines if not line.superseded)


@record
class NewItems:
    """What a look at a growing log brought."""

    restarted: bool
    """True if a new attempt took over: earlier items no longer count, and these begin with the run's first event."""
    items: tuple[LogItem, ...]


class Follower:
    """Reads a log that another process is writing, as far as it has come. It opens, reads and closes; never locks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._files: list[EventFile] = []
        self._offsets: dict[int, int] = {}
        """Where each attempt was read to."""

    def poll(self) -> NewItems:
        """Everything that was written since the last call."""
        files = event_files(self.run_dir)
        restarted = bool(self._files) and files != self._files
        if restarted:
            self._offsets.clear()
        self._files = files
        items: list[LogItem] = []
        for file in files:
            for line in read_file(file, files, self._offsets.get(file.attempt, 0)):
                self._offsets[file.attempt] = line.end
                if not line.superseded:
                    items.append(line.item)
        return NewItems(restarted=restarted, items=tuple(items))
