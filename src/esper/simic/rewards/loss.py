"""The loss family: points rise as the loss falls, 0 for knowing nothing, 100 at the floor of the task."""

from __future__ import annotations

from collections.abc import Mapping

from esper.leyline import CoalitionTable, EpochReport
from esper.simic.rewards.types import RewardConfig


def loss_points(loss: float, config: RewardConfig) -> float:
    """Points of a loss. Beyond twice the loss of knowing nothing, worse no longer counts."""
    bounded = min(loss, 2.0 * config.loss_ref)
    return 100.0 * (config.loss_ref - bounded) / (config.loss_ref - config.loss_floor)


def coalition_points(table: CoalitionTable, config: RewardConfig) -> Mapping[int, float]:
    """Points of every measured coalition."""
    return {mask: loss_points(loss, config) for mask, loss in table.loss.items()}


def committed_points(report: EpochReport, config: RewardConfig) -> float | None:
    """Points of the network that would be delivered."""
    return None if report.committed_loss is None else loss_points(report.committed_loss, config)
