"""The two metrics a reward can read, behind the same two questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from esper.leyline import CoalitionTable, EpochReport, record
from esper.simic.rewards import contribution, loss
from esper.simic.rewards.types import FAMILY_NAMES, RewardConfig


@record
class Family:
    """How points are read from reports."""

    coalition_points: Callable[[CoalitionTable, RewardConfig], Mapping[int, float]]
    committed_points: Callable[[EpochReport, RewardConfig], float | None]


FAMILIES: dict[str, Family] = {
    "contribution": Family(
        coalition_points=contribution.coalition_points, committed_points=contribution.committed_points
    ),
    "loss": Family(coalition_points=loss.coalition_points, committed_points=loss.committed_points),
}
assert tuple(FAMILIES) == FAMILY_NAMES


def coalition_points(table: CoalitionTable, config: RewardConfig) -> Mapping[int, float]:
    """Points of every measured coalition, in the family of the calibration."""
    return FAMILIES[config.calibration.family].coalition_points(table, config)


def committed_points(report: EpochReport, config: RewardConfig) -> float | None:
    """Points of the network that would be delivered, in the family of the calibration."""
    return FAMILIES[config.calibration.family].committed_points(report, config)
