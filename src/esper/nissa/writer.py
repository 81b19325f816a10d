"""Turns accepted events into lines on disk and bears with a disk that refuses. Used by the hub's one thread only.

While the log cannot be written, events that must not be lost wait in memory and all others are counted as lost. When
it can be written again the waiting ones follow, then the explanation of the gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from esper.leyline import EVENTS, LoggedEvent, Severity, TelemetryEventType
from esper.nissa.codec import encode
from esper.nissa.drops import Drops
from esper.nissa.jsonl import LogFile

CHUNK_BYTES = 1 << 20
COMPLAIN_EVERY_S = 60.0
URGENT = frozenset({Severity.ERROR, Severity.CRITICAL})
"""Severities that are written at once and made durable."""
_DURABLE = frozenset({TelemetryEventType.ROUND_COMPLETED, TelemetryEventType.RUN_ENDED})


class _Line(NamedTuple):
    seq: int
    kind: TelemetryEventType
    text: bytes


class LogWriter:
    """Writes batches of events in order. `complain` tells a person."""

    def __init__(self, log: LogFile, *, retry_s: float, complain: Callable[[str], None]) -> None:
        self.lost = Drops()
        """Losses that the log has not explained yet."""
        self.error: str | None = None
        """Why the log cannot be written; None while it can."""
        self.sync_error: str | None = None
        """Why what is written could not be made durable, the last time it was tried."""
        self.num_written = 0
        self._held: list[_Line] = []
        self._log = log
        self._retry_s = retry_s
        self._complain = complain
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
            self.sync_error = _say(error)
            self._tell(f"the event log cannot be made durable ({self.sync_error})")
        return self.sync_error is None

    def close(self) -> None:
        """A last try to make everything durable, then the file is released."""
        self.retry(now=True)
        if self.sync():
            try:
                self._log.seal()
            except OSError as error:
                self.sync_error = _say(error)
                self._complain(f"the event log is written, but its manifest cannot be ({self.sync_error})")
        self._log.close()

    def _encode(self, event: LoggedEvent) -> _Line | None:
        try:
            return _Line(event.seq, event.type, encode(event))
        except (TypeError, ValueError, OverflowError) as error:
            self._complain(f"{event.type.value} (seq {event.seq}) cannot be written as JSON and is lost: {error}")
            self.lost.add(event.type.value, event.seq, "invalid")
            return None

    def _advance(self, lines: list[_Line]) -> None:
        """Writes lines chunk by chunk; from the first chunk that fails on they are held."""
        self._tried_at = time.monotonic()
        for chunk in _chunks(lines):
            if self.error is None:
                try:
                    self._log.append(b"".join(line.text for line in chunk), [line.seq for line in chunk])
                    self.num_written += len(chunk)
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
        self.error = _say(error)
        self._tell(
            f"the event log cannot be written ({self.error}). Training goes on, and writing is tried again every "
            f"{self._retry_s:g} s. Free space or restore access to keep the log complete"
        )

    def _tell(self, message: str) -> None:
        if time.monotonic() - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = time.monotonic()
            self._complain(message)


def _say(error: OSError) -> str:
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
