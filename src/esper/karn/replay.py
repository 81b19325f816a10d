"""Reads the event log of a run directory, finished or growing. Knows files and attempts, not what events mean.

A line is an event only if it ends in a newline: what follows the last newline is a torn tail, which a live reader
leaves for later. A run that was resumed holds some rounds twice; an event of an attempt counts only if its sequence
number is below the first one of every later attempt, so each round is read once, as it finally happened. Where an
attempt begins is in the name of its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from esper.karn.codec import LineError, NewerSchema, decode_line
from esper.leyline import SCHEMA_VERSION, LoggedEvent, record
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


@record
class PassedOver:
    """Events of a long past, one after the other, that were counted and not decoded."""

    seq: int
    """Of the first."""
    last_seq: int


LogItem = LoggedEvent | BadLine
MAX_LINE_BYTES = 1 << 24
"""A longer line is damage, and is not held in memory."""
RECENT_BYTES = 32_000_000
"""The end of a log that screens decode in full: more than they show. It takes about a second."""
_STEP_HEAD = re.compile(
    rb'\{"type":"(?:EPOCH_COMPLETED|ACTION_TAKEN|GATE_EVALUATED|COALITION_MEASURED|SEED_STAGE_CHANGED)",'
    rb'"severity":"(?:debug|info)","round":\d+,"episode":\d+,"env":\d+,"epoch":\d+,'
    rb'"v":%d,"run":"[^"\\]*","attempt":\d+,"seq":(\d{1,18}),' % SCHEMA_VERSION
)
"""How a line about a single step begins, as the hub writes it. Nine tenths of a log are such lines."""
MAX_PASSED = 2_000
"""Events that are passed over in one go."""


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
    limit = first_seq_after(file, files)
    newer: NewerSchema | None = None
    any_event = start > 0
    try:
        stream = open(open_regular(file.path), "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with stream:
        for offset, line in _whole_lines(stream, start):
            item: LogItem
            try:
                if not line.endswith(b"\n"):
                    raise LineError(f"longer than the {MAX_LINE_BYTES:,} bytes that a line may have")
                item, any_event = decode_line(line), True
            except (LineError, NewerSchema) as error:
                item = BadLine(file=file.name, offset=offset, reason=str(error))
                if newer is None and isinstance(error, NewerSchema):
                    newer = NewerSchema(f"{file.path} at byte {offset}: {error}")
            superseded = isinstance(item, LoggedEvent) and limit is not None and item.seq >= limit
            yield LoggedLine(offset=offset, end=stream.tell(), text=line, item=item, superseded=superseded)
    if newer is not None and not any_event:
        raise newer


def _whole_lines(stream: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and the line. One that is too long comes without its end, a torn one not at all."""
    offset = stream.seek(start)
    while line := stream.readline(MAX_LINE_BYTES):
        last = line
        while len(last) == MAX_LINE_BYTES and not last.endswith(b"\n"):
            last = stream.readline(MAX_LINE_BYTES)
        if not last.endswith(b"\n"):
            return
        yield offset, line
        offset = offset + len(line) if last is line else stream.tell()


def replay(run_dir: Path) -> Iterator[LogItem]:
    """Every event that counts, in order, and every damaged line."""
    for _, lines in read_log(run_dir):
        yield from (line.item for line in lines if not line.superseded)


@record
class NewItems:
    """What a look at a growing log brought."""

    restarted: bool
    """True if a new attempt took over: earlier items no longer count, and these begin with the run's first event."""
    items: tuple[LogItem | PassedOver, ...]
    behind: bool
    """True if more is waiting to be read."""


class Follower:
    """Reads a log that another process is writing, as far as it has come. It opens, reads and closes; never locks.

    Args:
        run_dir: The run directory.
        recent_bytes: Events about single steps are passed over if they lie further from the end of the log than this
            when it is first looked at; None reads all. What is passed over is not checked for damage.
    """

    def __init__(self, run_dir: Path, recent_bytes: int | None = None) -> None:
        self.run_dir = run_dir
        self._recent_bytes = recent_bytes
        self._files: list[EventFile] = []
        self._offsets: dict[int, int] = {}
        """Where each attempt was read to."""
        self._skim_until: dict[int, int] = {}
        """Up to where events about single steps are passed over."""

    def poll(self, max_bytes: int | None = None) -> NewItems:
        """What was written since the last call, up to about `max_bytes` of it."""
        files = event_files(self.run_dir)
        restarted = bool(self._files) and files != self._files
        if restarted or not self._files:
            self._offsets.clear()
            self._skim_until = self._find_recent(files)
        self._files = files
        items: list[LogItem | PassedOver] = []
        begun = self.bytes_read
        for file in files:
            for end, item in self._read(file):
                self._offsets[file.attempt] = end
                if item is not None:
                    items.append(item)
                if max_bytes is not None and self.bytes_read - begun >= max_bytes:
                    return NewItems(restarted=restarted, items=tuple(items), behind=True)
        return NewItems(restarted=restarted, items=tuple(items), behind=False)

    @property
    def bytes_read(self) -> int:
        return sum(self._offsets.values())

    def _find_recent(self, files: list[EventFile]) -> dict[int, int]:
        """Where the recent part of each file begins, counted from the end of the last file."""
        if self._recent_bytes is None:
            return {}
        left, found = self._recent_bytes, {}
        for file in reversed(files):
            size = file_size(file.path)
            found[file.attempt] = max(size - left, 0)
            left = max(left - size, 0)
        return found

    def _read(self, file: EventFile) -> Iterator[tuple[int, LogItem | PassedOver | None]]:
        """Where each further line ends, and what it says; None if a later attempt wrote it again."""
        start = self._offsets.get(file.attempt, 0)
        stop = self._skim_until.get(file.attempt, 0)
        if start < stop:
            for end, item in _skim_file(file, self._files, start, stop):
                start = end
                yield end, item
        for line in read_file(file, self._files, start):
            yield line.end, None if line.superseded else line.item


def _skim_file(
    file: EventFile, files: list[EventFile], start: int, stop: int
) -> Iterator[tuple[int, LogItem | PassedOver | None]]:
    """Like `read_file` up to an offset, but events about single steps are passed over."""
    limit = first_seq_after(file, files)
    try:
        stream = open(open_regular(file.path), "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    first, last, end = 0, -1, start
    """The events passed over since the last item, and where they end."""
    with stream:
        for offset, line in _whole_lines(stream, start):
            if offset >= stop:
                break
            head = _STEP_HEAD.match(line)
            seq = -1 if head is None else int(head[1])
            if head is not None and seq == last + 1 <= first + MAX_PASSED and (limit is None or seq < limit):
                last, end = seq, offset + len(line)
                continue
            if last >= first:
                yield end, PassedOver(seq=first, last_seq=last)
            end = offset + len(line) if line.endswith(b"\n") else stream.tell()
            if head is not None:
                first, last = (seq, seq) if limit is None or seq < limit else (0, -1)
                continue
            first, last = 0, -1
            item = _decode(file, offset, line)
            superseded = isinstance(item, LoggedEvent) and limit is not None and item.seq >= limit
            yield end, None if superseded else item
        if last >= first:
            yield end, PassedOver(seq=first, last_seq=last)


def _decode(file: EventFile, offset: int, line: bytes) -> LogItem:
    """What a line in the middle of a log says.

    Raises:
        NewerSchema: It is the first line, and of a newer Esper.
    """
    try:
        return decode_line(line)
    except (LineError, NewerSchema) as error:
        if offset == 0 and isinstance(error, NewerSchema):
            raise NewerSchema(f"{file.path}: {error}") from None
        return BadLine(file=file.name, offset=offset, reason=str(error))


def first_seq_after(file: EventFile, files: list[EventFile]) -> int | None:
    """The sequence number at which later attempts wrote this part of the run again; None if none did."""
    return min((later.first_seq for later in files if later.attempt > file.attempt), default=None)


def log_bytes(run_dir: Path) -> int:
    """The size of a log, all attempts together."""
    return sum(file_size(file.path) for file in event_files(run_dir))


def file_size(path: Path) -> int:
    """In bytes; 0 if the file is gone, as that of a withdrawn attempt is."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
