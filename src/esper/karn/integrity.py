"""Is the record of a run whole? Compares files with the manifest and sequence numbers with each other. Changes nothing.

A run is sound if every closed file has its hash, every line decodes, every missing number is explained by the log
itself, and the log has an end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from esper.karn.replay import BadLine, LogFile, attempt_starts, counts, open_log, read_item, read_manifest
from esper.leyline import (
    SCHEMA_VERSION,
    EventsDropped,
    LoggedEvent,
    RunManifest,
    SegmentEntry,
    TelemetryEventType,
    record,
)
from esper.leyline.rundir import EVENTS_FILE, MANIFEST_FILE, SEGMENTS_DIR

MAX_PROBLEMS = 100
"""Problems that are spelled out; a damaged disk can make millions."""
NO_END = "no end marker: the last event is not RUN_ENDED"


@record
class Integrity:
    """What a check of a run directory found."""

    run: str | None
    group: str | None
    num_lines: int
    num_malformed: int
    torn_tail_bytes: int
    """After the last newline of the files, together. A crash leaves them; they are no damage."""
    num_superseded: int
    """Events that a later attempt wrote again."""
    num_missing_seq: int
    num_dropped: int
    """Of the missing ones, those that the log itself reports as dropped."""
    has_end: bool
    problems: tuple[str, ...]
    """Why the record is not sound, at most `MAX_PROBLEMS` of them."""

    @property
    def complete(self) -> bool:
        """True if nothing is wrong with the record."""
        return not self.problems

    @property
    def damage(self) -> tuple[str, ...]:
        """Problems that a run which is still going cannot have."""
        return tuple(problem for problem in self.problems if problem != NO_END)


Sink = Callable[[LoggedEvent, bytes], None]


def check_run(run_dir: Path, sink: Sink | None = None) -> Integrity:
    """Reads the whole log of a run and checks it.

    Args:
        run_dir: The run directory.
        sink: Is handed every event that counts, with its line, for readers that want both in one pass.
    """
    with open_log(run_dir) as files:
        starts = attempt_starts(run_dir, files)
        scan = _Scan(sink)
        for file in files:
            scan.read(file, starts)
        problems = [*_against_manifest(run_dir, files, scan.run), *scan.problems()]
    return Integrity(
        run=scan.run,
        group=scan.group,
        num_lines=scan.num_lines,
        num_malformed=len(scan.bad),
        torn_tail_bytes=scan.torn_tail_bytes,
        num_superseded=scan.num_superseded,
        num_missing_seq=sum(gap.stop - gap.start for gap in scan.gaps),
        num_dropped=sum(sum(drop.counts.values()) for drop in scan.drops),
        has_end=scan.has_end,
        problems=tuple(problems[:MAX_PROBLEMS]),
    )


class _Scan:
    """One pass over the log. Gaps are ranges, so that a lost million costs no memory."""

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink
        self.run: str | None = None
        self.group: str | None = None
        self.num_lines = 0
        self.torn_tail_bytes = 0
        self.num_superseded = 0
        self.has_end = False
        self.bad: list[BadLine] = []
        self.gaps: list[range] = []
        self.drops: list[EventsDropped] = []
        self.other: list[str] = []
        self._next_seq = 0

    def read(self, file: LogFile, starts: Mapping[int, int]) -> None:
        end = 0
        for offset, line in file.lines():
            self.num_lines += 1
            end = offset + len(line)
            item = read_item(file, offset, line)
            if isinstance(item, BadLine):
                self.bad.append(item)
            elif counts(item, starts):
                self._take(file.name, offset, item)
                if self.sink is not None:
                    self.sink(item, line)
            else:
                self.num_superseded += 1
        self.torn_tail_bytes += file.num_bytes() - end

    def _take(self, name: str, offset: int, event: LoggedEvent) -> None:
        self.run = self.run or event.run
        self.group = self.group or event.group
        if (event.run, event.group) != (self.run, self.group):
            self.other.append(
                f"{name} at byte {offset}: run {event.run} of group {event.group} in the log of {self.run}"
            )
        if event.seq < self._next_seq:
            self.other.append(f"{name} at byte {offset}: seq {event.seq} comes twice or too late")
        elif event.seq > self._next_seq:
            self.gaps.append(range(self._next_seq, event.seq))
        self._next_seq = max(self._next_seq, event.seq + 1)
        self.has_end = event.type is TelemetryEventType.RUN_ENDED
        if isinstance(event.data, EventsDropped):
            self.drops.append(event.data)

    def problems(self) -> Iterator[str]:
        for bad in self.bad:
            yield f"{bad.file} at byte {bad.offset}: {bad.reason}"
        yield from self.other
        yield from _unexplained(self.gaps, self.drops)
        if not self.has_end:
            yield NO_END


def _unexplained(gaps: Sequence[range], drops: Sequence[EventsDropped]) -> Iterator[str]:
    """Gaps that no EVENTS_DROPPED covers, and reports of loss that the gaps do not bear out. Gaps are in order."""
    begins = [gap.start for gap in gaps]
    explained = [0] * len(gaps)
    for drop in drops:
        first = max(bisect_right(begins, drop.first_seq) - 1, 0)
        missing = 0
        for place in range(first, bisect_right(begins, drop.last_seq)):
            inside = _overlap(gaps[place], drop)
            explained[place] += inside
            missing += inside
        reported = sum(drop.counts.values())
        if missing != reported:
            span = f"seq {drop.first_seq} to {drop.last_seq}"
            yield f"EVENTS_DROPPED reports {reported} lost events in {span}, but {missing} are missing there"
    in_order = sorted(drops, key=lambda drop: drop.first_seq)
    for drop, later in pairwise(in_order):
        if later.first_seq <= drop.last_seq:
            yield f"EVENTS_DROPPED reports seq {later.first_seq} twice, so other gaps may lack an explanation"
    for gap, covered in zip(gaps, explained, strict=True):
        if covered < gap.stop - gap.start:
            yield f"seq {gap.start} to {gap.stop - 1} are missing, and EVENTS_DROPPED does not explain all of them"


def _overlap(gap: range, drop: EventsDropped) -> int:
    return max(min(gap.stop, drop.last_seq + 1) - max(gap.start, drop.first_seq), 0)


def contradictions(run_dir: Path) -> tuple[str, ...]:
    """What forbids to replace the manifest: files that are not what it says, or a version that is newer.

    A manifest that is missing or damaged says nothing.
    """
    with open_log(run_dir) as files:
        try:
            manifest = read_manifest(run_dir)
        except (OSError, msgspec.DecodeError):
            return ()
        if manifest.v > SCHEMA_VERSION:
            return (f"it has version {manifest.v}, this Esper writes {SCHEMA_VERSION}",)
        return tuple(_against_entries(run_dir, _entries(manifest), files))


def _against_manifest(run_dir: Path, files: Sequence[LogFile], run: str | None) -> Iterator[str]:
    try:
        manifest = read_manifest(run_dir)
    except FileNotFoundError:
        yield f"{MANIFEST_FILE} is missing; make it again with --rebuild"
        return
    except msgspec.DecodeError as error:
        yield f"{MANIFEST_FILE} is damaged ({error}); make it again with --rebuild"
        return
    if run is not None and manifest.run != run:
        yield f"{MANIFEST_FILE} is of run {manifest.run}, the log of run {run}"
    listed = _entries(manifest)
    yield from _against_entries(run_dir, listed, files)
    for file in files:
        if file.name not in listed and file.name != EVENTS_FILE:
            yield f"{file.name} is not in {MANIFEST_FILE}; make it again with --rebuild"


def _entries(manifest: RunManifest) -> Mapping[str, SegmentEntry]:
    """What the manifest vouches for: closed files, and the active one once its process has ended in good order."""
    closed = {f"{SEGMENTS_DIR}/{segment.name}": segment for segment in manifest.segments}
    return closed if manifest.active is None else closed | {EVENTS_FILE: manifest.active}


def _against_entries(run_dir: Path, listed: Mapping[str, SegmentEntry], files: Sequence[LogFile]) -> Iterator[str]:
    there = {file.name: file for file in files}
    for name, entry in listed.items():
        file = there.get(name) or _renamed(run_dir / name, files)
        if file is None:
            yield f"{name} is in {MANIFEST_FILE} but not on disk"
        else:
            yield from _against_entry(file, entry)


def _renamed(path: Path, files: Sequence[LogFile]) -> LogFile | None:
    """The active file, if a rotation has given it this name since it was opened."""
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return None
    return next((file for file in files if file.inode == inode), None)


def _against_entry(file: LogFile, entry: SegmentEntry) -> Iterator[str]:
    size, found = file.num_bytes(), file.sha256()
    hashes = f"expected {entry.sha256}, got {found}"
    if size != entry.num_bytes:
        yield f"{file.name} has {size} bytes, {MANIFEST_FILE} says {entry.num_bytes}; sha256 {hashes}"
    elif found != entry.sha256:
        yield f"{file.name}: sha256 mismatch (bit damage?): {hashes}"
