"""The hub of a run without a log, and the one hub of a process that its composition root may ask for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from esper.leyline import TelemetryEvent
from esper.nissa.backends import Backend, BackendLane, close_lanes, reports_of
from esper.nissa.hub import EXIT_TIMEOUT_S, URGENT, TelemetryHub, complain, stamp
from esper.nissa.reports import HubHealth, HubReport

CAPACITY = 8192
"""Events that may wait for a listener."""


class Hub(Protocol):
    """What a run needs of its hub, whether it keeps a log or not."""

    def emit(self, event: TelemetryEvent) -> None:
        """Takes an event without blocking."""

    def progress(self, phase: str, *, round: int | None = None, epoch: int | None = None) -> None:
        """Says that training moved on."""

    @property
    def next_seq(self) -> int:
        """The number the next event gets."""

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        """Waits until everything accepted so far is in the log."""

    def close(self, timeout: float = ...) -> HubReport:
        """Ends in good order within `timeout` seconds."""

    def health(self) -> HubHealth:
        """How it fares."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NullHub:
    """Keeps nothing. Whoever listens is still told; if nobody does, failures reach the person at the terminal.

    Args:
        next_seq: The number that the log has come to, for sittings with a log before and after this one.
        backends: Listeners.
        hang_s: Time after which a listener that does not return is switched off.
    """

    def __init__(self, *, next_seq: int = 0, backends: Sequence[Backend] = (), hang_s: float = 30.0) -> None:
        self.next_seq = next_seq
        self._started = time.monotonic()
        self._num_told = 0
        self._lanes = [
            BackendLane(backend, capacity=CAPACITY, hang_s=hang_s, complain=complain) for backend in backends
        ]

    def emit(self, event: TelemetryEvent) -> None:
        """Forgets the event once it is told."""
        if self._lanes:
            mono = time.monotonic() - self._started
            line = stamp(event, run="", attempt=0, group="", seq=self._num_told, wall=time.time(), mono=mono)
            self._num_told += 1
            for lane in self._lanes:
                lane.feed([line])
        elif event.severity in URGENT:
            where = "" if event.env is None else f" in env {event.env}, episode {event.episode}, epoch {event.epoch}"
            complain(f"{event.severity.value}: {event.type.value}{where}: {event.data}")

    def progress(self, phase: str, *, round: int | None = None, epoch: int | None = None) -> None:
        """Tells those who want to know."""
        for lane in self._lanes:
            lane.watch()
            if round is not None and epoch is not None:
                lane.tick((round, epoch))

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        """There is nothing to wait for."""
        return True

    def close(self, timeout: float = EXIT_TIMEOUT_S) -> HubReport:
        """Ends the listeners."""
        close_lanes(self._lanes, time.monotonic() + timeout)
        return HubReport(
            next_seq=self.next_seq,
            num_written=0,
            num_unwritten=0,
            num_dropped={},
            num_late=0,
            log_error=None,
            complete=True,
            backends=reports_of(self._lanes),
        )

    def health(self) -> HubHealth:
        """Always well."""
        return HubHealth(
            num_queued=0,
            queue_high_water=0,
            num_held=0,
            num_dropped={},
            log_error=None,
            must_stop=False,
            writer_cpu_ms=0.0,
            backends=reports_of(self._lanes),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


NULL_HUB = NullHub()
_current: Hub = NULL_HUB


def get_hub() -> Hub:
    """The hub of this process, or one that keeps nothing. For composition roots; everyone else is handed a hub."""
    return _current


def set_hub(hub: TelemetryHub | None) -> None:
    """Makes a hub the one of this process; None to have none."""
    global _current
    _current = NULL_HUB if hub is None else hub
