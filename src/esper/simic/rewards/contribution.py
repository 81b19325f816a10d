"""The contribution family: points are validation accuracy in percent."""

from __future__ import annotations

from collections.abc import Mapping

from esper.leyline import CoalitionTable, EpochReport
from esper.simic.rewards.types import RewardConfig


def coalition_points(table: CoalitionTable, config: RewardConfig) -> Mapping[int, float]:
    """Points of every measured coalition."""
    return table.accuracy_pct


def committed_points(report: EpochReport, config: RewardConfig) -> float | None:
    """Points of the network that would be delivered."""
    return report.committed_accuracy_pct
