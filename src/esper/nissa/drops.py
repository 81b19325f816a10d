"""Books of lost events, kept so that every gap in the log can be explained to the number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from esper.leyline import EventsDropped

Reason = Literal["queue_full", "invalid", "write_failed"]


@dataclass(slots=True)
class _Run:
    reason: Reason
    first_seq: int
    last_seq: int
    counts: Counter[str] = field(default_factory=Counter)


class Drops:
    """Lost events: how many in all, and which no event of the log has explained yet.

    A run of losses has no hole. A wider range could hold numbers that are missing for another reason, found later.
    """

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._runs: list[_Run] = []

    def add(self, kind: str, seq: int, reason: Reason) -> None:
        """Books the loss of an event of this type, which would have had this number."""
        self.total[kind] += 1
        run = self._runs[-1] if self._runs else None
        if run is None or run.reason != reason or run.last_seq != seq - 1:
            run = _Run(reason, seq, seq)
            self._runs.append(run)
        run.last_seq = seq
        run.counts[kind] += 1

    def take(self) -> list[EventsDropped]:
        """The explanations that are still owed; from now on they are not."""
        taken, self._runs = self._runs, []
        return [
            EventsDropped(counts=dict(run.counts), first_seq=run.first_seq, last_seq=run.last_seq, reason=run.reason)
            for run in taken
        ]
