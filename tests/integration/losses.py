"""Logs that lose an event, for tests."""

from dataclasses import replace

import pytest

from esper.leyline import TelemetryEventType
from esper.nissa import TelemetryHub


def lose_one(monkeypatch: pytest.MonkeyPatch, round_idx: int, group: str | None = None) -> None:
    """Makes the log lose one event of this round, once; of one group only if there are several."""
    original, lost = TelemetryHub.emit, []

    def emit(self, event):
        wanted = event.type is TelemetryEventType.EPOCH_COMPLETED and event.round == round_idx
        if wanted and not lost and group in (None, self.group):
            lost.append(event)
            event = replace(event, epoch=None)  # which breaks the catalogue
        original(self, event)

    monkeypatch.setattr(TelemetryHub, "emit", emit)
