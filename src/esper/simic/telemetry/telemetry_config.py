"""How much a run tells, and how its hub works. The only configuration of telemetry; the hub gets plain arguments.

A level never reaches training: what gates, observations, governor or rewards read is measured at every level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from esper.leyline import EVENTS, TelemetryEventType, TelemetryLevel

__all__ = ["Exporter", "TelemetryConfig", "TelemetryLevel", "enabled"]

Exporter = Literal["tensorboard", "wandb", "trackio"]
_ENABLED: dict[TelemetryLevel, frozenset[TelemetryEventType]] = {
    level: frozenset(kind for kind, spec in EVENTS.items() if spec.level <= level) for level in TelemetryLevel
}


@cache
def enabled(level: TelemetryLevel) -> frozenset[TelemetryEventType]:
    """The types of events that a level tells."""
    return _ENABLED[level]


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What is told, where it goes, and what happens when that fails."""

    level: TelemetryLevel = TelemetryLevel.NORMAL
    """OFF keeps no log at all; failures still reach stderr."""
    queue_capacity: int = 8192
    """Events that may wait for the writer before those that may be lost are."""
    flush_interval_s: float = 0.5
    """Longest time an event waits in memory."""
    rotate_bytes: int = 64 << 20
    """Size at which the log continues in a new file."""
    heartbeat_s: float = 1.0
    """Time between two status files."""
    escalate_on_anomaly: bool = True
    """Tell at level DEBUG for a while after an alarm."""
    escalation_epochs: int = 5
    """How long that is."""
    exporters: tuple[Exporter, ...] = ()
    """Listeners beside the log."""
    strict: bool = False
    """Raise on events that break the catalogue instead of counting them."""
    require_complete: bool = False
    """Stop at the next round boundary if an event was lost, as comparison studies want."""

    def __post_init__(self) -> None:
        _check("queue_capacity", self.queue_capacity, 1, 1_000_000)
        _check("flush_interval_s", self.flush_interval_s, 0.001, 60.0)
        _check("rotate_bytes", self.rotate_bytes, 1024, 1 << 40)
        _check("heartbeat_s", self.heartbeat_s, 0.1, 60.0)
        _check("escalation_epochs", self.escalation_epochs, 1, 100_000)
        if not isinstance(self.level, TelemetryLevel):
            raise ValueError(
                f"level must be one of {', '.join(level.name for level in TelemetryLevel)}, got {self.level!r}"
            )
        for name in self.exporters:
            if name not in get_args(Exporter):
                raise ValueError(f"unknown exporter {name!r}. Known: {', '.join(get_args(Exporter))}")
        if len(set(self.exporters)) != len(self.exporters):
            raise ValueError(f"exporters must differ, got {', '.join(self.exporters)}")


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")
