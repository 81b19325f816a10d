"""Ends a run at its next boundary when its event log is no longer good enough. The trainer sees a stop like any other.

The hub decides what is good enough: too much that waits for a disk, a writer that failed, or, where a complete log was
asked for, any loss and any error. An error that is over by the boundary, with nothing lost, is no reason to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from esper.nissa import Hub, complain
from esper.simic.training.keeper import FLUSH_TIMEOUT_S
from esper.simic.training.vectorized_trainer import StopRequest


class LogWatch:
    """A stop request that passes on another one and adds the log's own.

    Args:
        stop: What else may end the run.
        hub: Asked at every boundary.
    """

    def __init__(self, stop: StopRequest, hub: Hub) -> None:
        self._stop, self._hub = stop, hub
        self.reason: str | None = None
        """Why the log ended the run; None if it did not."""

    @property
    def after_round(self) -> bool:
        """True once somebody asked for a stop, or the log has to."""
        if not self._stop.after_round and self.reason is None:
            if self._hub.health().must_stop:
                self._hub.flush(FLUSH_TIMEOUT_S, fsync=True)  # what failed a while ago may work by now
            health = self._hub.health()
            if health.must_stop:
                self.reason = what_is_lost(health.num_held, health.num_dropped, health.log_error)
                complain(f"stopping after this round: {self.reason}")
        return self._stop.after_round or self.reason is not None

    @property
    def round_s(self) -> float | None:
        """How long a round takes."""
        return self._stop.round_s

    @round_s.setter
    def round_s(self, seconds: float | None) -> None:
        self._stop.round_s = seconds

    def watch(self, cancel: Callable[[], None]) -> None:
        """Takes what makes a running step stop at once; the log itself never asks for that."""
        self._stop.watch(cancel)


def what_is_lost(num_unwritten: int, num_dropped: Mapping[str, int], error: str | None) -> str:
    """In one line: what a log lacks, and why as far as the hub knows.

    Args:
        num_unwritten: Events that are still in memory.
        num_dropped: Lost events by type.
        error: Of the log, if there is one.
    """
    lost = ", ".join(f"{count} {kind}" for kind, count in sorted(num_dropped.items()))
    parts = [
        "the event log is not complete",
        f"{num_unwritten} events are not written" if num_unwritten else "",
        f"lost: {lost}" if lost else "",
        "" if error is None else error.strip().splitlines()[-1],
    ]
    return "; ".join(filter(None, parts))
