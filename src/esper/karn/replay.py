"""Reads the event log of a run directory, finished or growing. Knows files and attempts, not what events mean.

A line is an event only if it ends in a newline: what follows the last newline is a torn tail, which a live reader
leaves for later. A run that was resumed holds some rounds twice; an event of an attempt counts only if its sequence
number is below the first one of every later attempt, so each round is read once, as it finally happened. Where an
attempt begins is what the manifest says; without one, the first line of the attempt that can be read says it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path

import msgspec

from esper.karn.codec import LineError, NewerSchema, decode_line
from esper.karn.records import RecordDecoder
from esper.leyline import LoggedEvent, RunManifest, record, segment_position
from esper.leyline.rundir import EVENTS_FILE, MANIFEST_FILE, SEGMENTS_DIR

_MANIFEST = RecordDecoder(RunManifest)
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


def is_run(folder: Path) -> bool:
    """True if the folder holds an event log."""
    return (folder / EVENTS_FILE).is_file() or (folder / SEGMENTS_DIR).is_dir()


def find_run(folder: Path) -> Path:
    """Checks that a folder is a run directory. The error names the runs below it, if there are any."""
    if is_run(folder):
        return folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected a run directory with {EVENTS_FILE} or {SEGMENTS_DIR}/")
    runs = _runs_in(folder)
    below = ", ".join(map(str, runs[-MAX_NAMED:])) or "none"
    if len(runs) > MAX_NAMED:
        below = f"{len(runs)}, the last {below}"
    raise ValueError(f"{folder} holds no event log ({EVENTS_FILE} or {SEGMENTS_DIR}/). Runs inside it: {below}")


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
class LogFile:
    """One file of the log, open for reading."""

    name: str
    """Relative to the run directory."""
    path: Path
    inode: int
    """What stays the same when rotation renames the active file into the segments."""
    stream: BufferedReader

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """(offset, line with its newline) of every whole line from an offset on."""
        offset = start
        self.stream.seek(start)
        for line in self.stream:
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)

    def num_bytes(self) -> int:
        """The size of the file, a torn tail included."""
        return os.fstat(self.stream.fileno()).st_size

    def sha256(self) -> str:
        """The hash of the whole file, a torn tail included."""
        self.stream.seek(0)
        return hashlib.file_digest(self.stream, "sha256").hexdigest()


@contextmanager
def open_log(run_dir: Path) -> Iterator[list[LogFile]]:
    """All files in order of writing: closed segments, then the active file.

    The active file is opened first: a rotation that happens meanwhile can neither hide it nor show it twice.
    """
    with ExitStack() as stack:
        try:
            last = [_open(run_dir, run_dir / EVENTS_FILE, stack)]
        except FileNotFoundError:  # a rotation closed it, and nothing was written since
            last = []
        segments = [_open(run_dir, path, stack) for path in segment_paths(run_dir)]
        yield [file for file in segments if file.inode not in {file.inode for file in last}] + last


def segment_paths(run_dir: Path) -> list[Path]:
    """The closed segments in order of writing."""
    found = ((segment_position(path.name), path) for path in (run_dir / SEGMENTS_DIR).glob("*.jsonl"))
    return [path for _, path in sorted((position, path) for position, path in found if position is not None)]


def _open(run_dir: Path, path: Path, stack: ExitStack) -> LogFile:
    stream = stack.enter_context(path.open("rb"))
    inode = os.fstat(stream.fileno()).st_ino
    return LogFile(name=str(path.relative_to(run_dir)), path=path, inode=inode, stream=stream)


def read_manifest(run_dir: Path) -> RunManifest:
    """What the run directory says its log consists of.

    Raises:
        OSError: There is no manifest, or it cannot be opened.
        msgspec.DecodeError: It is damaged.
    """
    return _MANIFEST.decode((run_dir / MANIFEST_FILE).read_bytes())


def read_item(file: LogFile, offset: int, line: bytes) -> LogItem:
    """Decodes one line. A line that is no event is an item too: that some are of another version is for others."""
    try:
        return decode_line(line)
    except (LineError, NewerSchema) as error:
        return BadLine(file=file.name, offset=offset, reason=str(error))


def attempt_starts(run_dir: Path, files: Sequence[LogFile]) -> Mapping[int, int]:
    """The first sequence number of every attempt.

    Raises:
        NewerSchema: A file was written by a newer Esper.
    """
    firsts = [event for file in files if (event := _first_event(file)) is not None]
    starts: dict[int, int] = {}
    for event in firsts:
        starts.setdefault(event.attempt, event.seq)
    return starts | _listed_starts(run_dir, {event.run for event in firsts})


def _first_event(file: LogFile) -> LoggedEvent | None:
    """The first line that can be read: a file holds one attempt. None if there is none.

    One process wrote the file, so a line of a newer version among others is damage. If there are no others, the file
    is of a newer Esper.
    """
    newer: NewerSchema | None = None
    for offset, line in file.lines():
        try:
            return decode_line(line)
        except LineError:
            pass
        except NewerSchema as error:
            newer = newer or NewerSchema(f"{file.path} at byte {offset}: {error}")
    if newer is not None:
        raise newer
    return None


def _listed_starts(run_dir: Path, runs: Set[str]) -> dict[int, int]:
    """Where attempts begin by the manifest. One that cannot be read, or speaks of another run, says nothing."""
    try:
        manifest = read_manifest(run_dir)
    except (OSError, msgspec.DecodeError):
        return {}
    if runs and manifest.run not in runs:
        return {}
    return {entry.attempt: entry.first_seq for entry in manifest.attempts}


def counts(event: LoggedEvent, starts: Mapping[int, int]) -> bool:
    """The rule of attempts: an event counts if no later attempt wrote this part of the run again."""
    return all(event.seq < seq for attempt, seq in starts.items() if attempt > event.attempt)


def replay(run_dir: Path) -> Iterator[LogItem]:
    """Every event that counts, in order, and every damaged line."""
    with open_log(run_dir) as files:
        starts = attempt_starts(run_dir, files)
        for file in files:
            for offset, line in file.lines():
                item = read_item(file, offset, line)
                if isinstance(item, BadLine) or counts(item, starts):
                    yield item


@record
class Batch:
    """What a look at a growing log brought."""

    restarted: bool
    """True if a new attempt took over: earlier items no longer count, and these begin with the run's first event."""
    items: tuple[LogItem, ...]


class Follower:
    """Reads a log that another process is writing, as far as it has come. It opens, reads and closes; never locks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._starts: Mapping[int, int] = {}
        self._offsets: dict[int, int] = {}

    def poll(self) -> Batch:
        """Everything that was written since the last call."""
        with open_log(self.run_dir) as files:
            starts = attempt_starts(self.run_dir, files)
            restarted = bool(self._starts) and starts != self._starts
            if restarted:
                self._offsets.clear()
            self._starts = starts
            items = self._read_on(files)
        kept = tuple(item for item in items if isinstance(item, BadLine) or counts(item, starts))
        return Batch(restarted=restarted, items=kept)

    def _read_on(self, files: Sequence[LogFile]) -> list[LogItem]:
        items = []
        for file in files:
            for offset, line in file.lines(self._offsets.get(file.inode, 0)):
                items.append(read_item(file, offset, line))
                self._offsets[file.inode] = offset + len(line)
        return items
