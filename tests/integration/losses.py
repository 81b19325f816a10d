"""Logs that lose an event, for tests."""

import pytest

from esper.leyline import TelemetryEventType
from esper.nissa import TelemetryHub


def lose_one(monkeypatch: pytest.MonkeyPatch, round_idx: int, group: str | None = None) -> None:
    """Makes the log lose one event of this round, once; of one group only if there are several."""
    find, lost = TelemetryHub._problem, []

    def problem(self, event):
        wanted = event.type is TelemetryEventType.EPOCH_COMPLETED and event.round == round_idx
        if wanted and not lost and group in (None, self.group):
            lost.append(event)
            return "a test wants it to be lost"
        return find(self, event)

    monkeypatch.setattr(TelemetryHub, "_problem", problem)
