"""The hub of a run without a log, and the one hub of a process that its composition root may ask for."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from esper.leyline import TelemetryEvent
from esper.nissa.hub import URGENT, TelemetryHub, complain
from esper.nissa.reports import HubHealth, HubReport


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
    """Keeps nothing. Failures still reach the person at the terminal."""

    next_seq = 0

    def emit(self, event: TelemetryEvent) -> None:
        """Forgets the event, unless somebody should look."""
        if event.severity in URGENT:
            where = "" if event.env is None else f" in env {event.env}, episode {event.episode}, epoch {event.epoch}"
            complain(f"{event.severity.value}: {event.type.value}{where}: {event.data}")

    def progress(self, phase: str, *, round: int | None = None, epoch: int | None = None) -> None:
        """Nobody is told."""

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        """There is nothing to wait for."""
        return True

    def close(self, timeout: float = 0.0) -> HubReport:
        """There is nothing to end."""
        return HubReport(
            next_seq=0,
            num_written=0,
            num_unwritten=0,
            num_dropped={},
            num_late=0,
            log_error=None,
            complete=True,
            backends={},
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
            backends={},
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
