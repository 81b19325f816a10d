"""Is the record of a run whole? Compares files with their checksums and sequence numbers with each other.

A run is sound if every file that ended has its hash, every line decodes, every missing number is explained by the log
itself, the log has an end, and it reaches as far as the checkpoints say it did.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec

from esper.karn.replay import BadLine, LoggedLine, read_log
from esper.leyline import EventsDropped, LoggedEvent, TelemetryEventType, record
from esper.leyline.files import loads_json, open_regular, read_regular
from esper.leyline.rundir import CHECKPOINTS_DIR, EVENTS_DIR, MANIFEST_FILE, EventFile, event_files

MAX_PROBLEMS = 100
"""Problems that are spelled out; a damaged disk can make millions."""
MAX_CHECKSUM_BYTES = 10_000
MAX_CHECKPOINT_MANIFEST_BYTES = 1 << 20
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
    saved = list(_saved_events(run_dir))  # before the log is read: a run that goes on writes the log first
    scan = _Scan(sink)
    for file, lines in read_log(run_dir):
        scan.read(file, lines)
    problems = [
        *_against_checksums(run_dir, has_end=scan.has_end),
        *_against_checkpoints(saved, scan.run, scan.ends),
        *scan.problems(),
    ]
    return Integrity(
        run=scan.run,
        group=scan.group,
        num_lines=scan.num_lines,
        num_malformed=len(scan.bad),
        torn_tail_bytes=scan.torn_tail_bytes,
        num_superseded=scan.num_superseded,
        num_missing_seq=sum(gap.stop - gap.start for gap in scan.gaps),
        num_dropped=min(sum(sum(drop.counts.values()) for drop in scan.drops), 2**63 - 1),
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
        self.ends: dict[int, int] = {}
        """By attempt: the number after its last one."""
        self._next_seq = 0

    def read(self, file: EventFile, lines: Iterator[LoggedLine]) -> None:
        end = 0
        for line in lines:
            self.num_lines += 1
            end = line.end
            if isinstance(line.item, BadLine):
                self.bad.append(line.item)
                continue
            self._check_owner(file, line.offset, line.item)
            self.ends[file.attempt] = max(line.item.seq + 1, self.ends.get(file.attempt, 0))
            if line.superseded:
                self.num_superseded += 1
            else:
                self._take(file, line.offset, line.item)
                if self.sink is not None:
                    self.sink(line.item, line.text)
        self.torn_tail_bytes += file.path.stat().st_size - end

    def _check_owner(self, file: EventFile, offset: int, event: LoggedEvent) -> None:
        """Every event must be of this run, group and attempt, also those that a later attempt wrote again."""
        place = f"{file.name} at byte {offset}"
        self.run = self.run or event.run
        self.group = self.group or event.group
        if (event.run, event.group) != (self.run, self.group):
            self.other.append(f"{place}: run {event.run} of group {event.group} in the log of {self.run}")
        if event.attempt != file.attempt:
            self.other.append(f"{place}: attempt {event.attempt} in the file of attempt {file.attempt}")

    def _take(self, file: EventFile, offset: int, event: LoggedEvent) -> None:
        if event.seq < self._next_seq:
            self.other.append(f"{file.name} at byte {offset}: seq {event.seq} comes twice or too late")
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


class _Facts(msgspec.Struct):
    """What a checkpoint says about the log it was written after."""

    run_id: str
    attempt: int
    next_seq: int


class _Manifest(msgspec.Struct):
    facts: _Facts


def _saved_events(run_dir: Path) -> Iterator[tuple[str, _Facts]]:
    """The checkpoints that can be read, by name. Damage to them is found when they are loaded, not here."""
    folder = run_dir / CHECKPOINTS_DIR
    names = sorted(folder.glob(f"ckpt-*/{MANIFEST_FILE}")) if not folder.is_symlink() else []
    for path in names:
        with suppress(OSError, ValueError, msgspec.ValidationError):
            if not path.parent.is_symlink():
                manifest = msgspec.convert(loads_json(read_regular(path, MAX_CHECKPOINT_MANIFEST_BYTES)), _Manifest)
                yield path.parent.name, manifest.facts


def _against_checkpoints(
    saved: Sequence[tuple[str, _Facts]], run: str | None, ends: Mapping[int, int]
) -> Iterator[str]:
    """A log was durable before the checkpoint that counts its events: what it lacks now was taken from it."""
    owners = {facts.run_id for _, facts in saved}
    if run is not None and owners and run not in owners:
        yield f"the log is of run {run}, but all checkpoints are of {', '.join(sorted(owners))}"
    for name, facts in saved:
        end = ends.get(facts.attempt, 0)
        if run in (None, facts.run_id) and facts.next_seq > end:
            last = f"ends at seq {end - 1}" if end else "is missing or empty"
            yield f"{name} counts events up to seq {facts.next_seq - 1}, but the log of attempt {facts.attempt} {last}"


def _against_checksums(run_dir: Path, *, has_end: bool) -> Iterator[str]:
    """Files that are not what was written, or cannot be shown to be. The last one has no checksum until it ends."""
    files = event_files(run_dir)
    for before, there in pairwise([-1, *(file.attempt for file in files)]):
        if there - before == 2:
            yield f"the log of attempt {before + 1} is missing"
        elif there - before > 2:
            yield f"the logs of attempts {before + 1} to {there - 1} are missing"
    for path in sorted((run_dir / EVENTS_DIR).glob("*.jsonl.sha256")):
        if not path.with_suffix("").exists():
            yield f"{EVENTS_DIR}/{path.stem} is missing, although its checksum is there"
    for file in files:
        try:
            expected = read_regular(file.checksum_path, MAX_CHECKSUM_BYTES).decode(errors="replace")
        except FileNotFoundError:
            if file is not files[-1] or (has_end and file.path.stat().st_size):
                yield (
                    f"{file.name} has no checksum, so that it cannot be shown to be as it was written. "
                    f"To accept it as it is: sha256sum {file.path.name} > {file.checksum_path.name}"
                )
            continue
        except OSError as error:
            yield str(error)
            continue
        with open(open_regular(file.path), "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if expected != file.checksum(found):
            wanted, _, name = expected.strip().partition(" ")
            if wanted == found:
                yield f"{file.name}: its checksum is that of another file, {name.strip() or 'without a name'}"
            else:
                yield f"{file.name}: sha256 mismatch (bit damage?): expected {wanted}, got {found}"
