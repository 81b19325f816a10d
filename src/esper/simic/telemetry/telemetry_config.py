"""How much a run logs. The only configuration of telemetry.

A level never reaches training: what gates, observations, governor or rewards read is measured at every level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from esper.leyline import EVENTS, TelemetryEventType, TelemetryLevel, check_known

__all__ = ["Exporter", "TelemetryConfig", "TelemetryLevel", "enabled"]

Exporter = Literal["tensorboard", "wandb", "trackio"]


@cache
def enabled(level: TelemetryLevel) -> frozenset[TelemetryEventType]:
    """The types of events that a level logs."""
    return frozenset(kind for kind, spec in EVENTS.items() if spec.level <= level)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What is logged, where it goes, and what happens when that fails."""

    level: TelemetryLevel = TelemetryLevel.NORMAL
    """OFF keeps no log at all; failures still reach stderr."""
    escalation_epochs: int = 5
    """Epochs logged at level DEBUG after an alarm; 0 for none."""
    exporters: tuple[Exporter, ...] = ()
    """Listeners beside the log."""
    require_complete: bool = False
    """Stop at the next round boundary if an event was lost, as comparison studies want."""

    def __post_init__(self) -> None:
        if not 0 <= self.escalation_epochs <= 100_000:
            raise ValueError(f"escalation_epochs must be in [0, 100000], got {self.escalation_epochs}")
        if not isinstance(self.level, TelemetryLevel):
            raise ValueError(
                f"level must be one of {', '.join(level.name for level in TelemetryLevel)}, got {self.level!r}"
            )
        for name in self.exporters:
            check_known("exporter", name, get_args(Exporter))
        if len(set(self.exporters)) != len(self.exporters):
            raise ValueError(f"exporters must differ, got {', '.join(self.exporters)}")
