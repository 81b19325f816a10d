"""Turns accepted events into lines on disk and keeps going when the disk refuses. Used by the hub's one thread only.

While the log cannot be written, events that must not be lost wait in memory and all others are counted as lost. When
it can be written again the waiting ones follow, then the explanation of the gap.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from esper.leyline import EVENTS, EventsDropped, LoggedEvent, Severity, TelemetryEventType
from esper.nissa.codec import encode
from esper.nissa.log_file import LogFile

CHUNK_BYTES = 1 << 20
COMPLAIN_EVERY_S = 60.0
URGENT = frozenset({Severity.ERROR, Severity.CRITICAL})
"""Severities that are written at once and made durable."""
_DURABLE = frozenset({TelemetryEventType.ROUND_COMPLETED, TelemetryEventType.RUN_ENDED})

DropReason = Literal["queue_full", "invalid", "write_failed"]


@dataclass(slots=True)
class _Gap:
    reason: DropReason
    first_seq: int
    last_seq: int
    counts: Counter[str] = field(default_factory=Counter)


class Drops:
    """Lost events: how many in all, and which no event of the log has explained yet.

    A gap has no hole. A wider range could hold numbers that are missing for another reason, found later.
    """

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._gaps: list[_Gap] = []

    def add(self, kind: str, seq: int, reason: DropReason) -> None:
        """Counts the loss of an event of this type, which would have had this number."""
        self.total[kind] += 1
        gap = self._gaps[-1] if self._gaps else None
        if gap is None or gap.reason != reason or gap.last_seq != seq - 1:
            gap = _Gap(reason, seq, seq)
            self._gaps.append(gap)
        gap.last_seq = seq
        gap.counts[kind] += 1

    def take(self) -> list[EventsDropped]:
        """Returns and clears the EVENTS_DROPPED payloads that are not written yet."""
        taken, self._gaps = self._gaps, []
        return [
            EventsDropped(counts=dict(gap.counts), first_seq=gap.first_seq, last_seq=gap.last_seq, reason=gap.reason)
            for gap in taken
        ]


def complain(message: str) -> None:
    """Prints one line to stderr, if there is one: a process may have no standard error at all."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"esper: {message}\n")
        sys.stderr.flush()


class _Line(NamedTuple):
    seq: int
    kind: TelemetryEventType
    text: bytes


class LogWriter:
    """Writes batches of events in order."""

    def __init__(self, log: LogFile, *, retry_s: float) -> None:
        self.lost = Drops()
        """Losses that the log has not explained yet."""
        self.error: str | None = None
        """Why the log cannot be written; None while it can."""
        self.sync_error: str | None = None
        """Why what is written could not be made durable, the last time it was tried."""
        self._held: list[_Line] = []
        self._log = log
        self._retry_s = retry_s
        self._tried_at = self._complained_at = float("-inf")

    @property
    def num_held(self) -> int:
        """Events that wait for the log."""
        return len(self._held)

    def write(self, batch: Sequence[LoggedEvent]) -> None:
        """Takes the next events. Never raises for want of space or rights."""
        lines = [line for event in batch if (line := self._encode(event)) is not None]
        if self._held or self.error is not None:
            self._hold(lines)
        else:
            self._advance(lines)
        if any(event.type in _DURABLE or event.severity in URGENT for event in batch):
            self.sync()

    def retry(self, *, now: bool = False) -> None:
        """Tries to write what waits, if it is time to; `now` makes it time."""
        if self.error is None or not (now or time.monotonic() - self._tried_at >= self._retry_s):
            return
        waiting, self._held, self.error = self._held, [], None
        self._advance(waiting)

    def sync(self) -> bool:
        """Makes the log durable; False if that is not possible now."""
        if self._held or self.error is not None:
            return False
        try:
            self._log.sync()
            self.sync_error = None
        except OSError as error:
            self.sync_error = _text(error)
            self._complain_seldom(f"the event log cannot be made durable ({self.sync_error})")
        return self.sync_error is None

    def close(self) -> None:
        """A last try to make everything durable, then the file is released."""
        self.retry(now=True)
        if self.sync():
            try:
                self._log.seal()
            except OSError as error:
                self.sync_error = _text(error)
                complain(f"the event log is written, but its checksum cannot be ({self.sync_error})")
        self._log.close()

    def _encode(self, event: LoggedEvent) -> _Line | None:
        try:
            return _Line(event.seq, event.type, encode(event))
        except (TypeError, ValueError, OverflowError) as error:
            complain(f"{event.type.value} (seq {event.seq}) cannot be written as JSON and is lost: {error}")
            self.lost.add(event.type.value, event.seq, "invalid")
            return None

    def _advance(self, lines: list[_Line]) -> None:
        """Writes lines chunk by chunk; from the first chunk that fails on they are held."""
        self._tried_at = time.monotonic()
        for chunk in _chunks(lines):
            if self.error is None:
                try:
                    self._log.append(b"".join(line.text for line in chunk))
                    continue
                except OSError as error:
                    self._fail(error)
            self._hold(chunk)

    def _hold(self, lines: list[_Line]) -> None:
        for line in lines:
            if EVENTS[line.kind].must:
                self._held.append(line)
            else:
                self.lost.add(line.kind.value, line.seq, "write_failed")

    def _fail(self, error: OSError) -> None:
        self.error = _text(error)
        self._complain_seldom(
            f"the event log cannot be written ({self.error}). Training goes on, and writing is tried again every "
            f"{self._retry_s:g} s. Free space or restore access to keep the log complete"
        )

    def _complain_seldom(self, message: str) -> None:
        if time.monotonic() - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = time.monotonic()
            complain(message)


def _text(error: OSError) -> str:
    return f"{type(error).__name__}: {error}"


def _chunks(lines: list[_Line]) -> Iterator[list[_Line]]:
    chunk: list[_Line] = []
    size = 0
    for line in lines:
        if chunk and size + len(line.text) > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += len(line.text)
    if chunk:
        yield chunk
