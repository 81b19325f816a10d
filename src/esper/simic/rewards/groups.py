"""Rewards that can be compared between tasks: the hosts of a group differ in decisions alone, so they judge each other.

Nothing is calibrated. Returns of one group are divided by their spread, but by no less than a floor: where decisions
make no difference, noise must not be magnified into a lesson, and only what growth costs is left to learn from.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

from esper.leyline import record

RELATIVE_TO: tuple[str, ...] = ("group", "twin")
"""The mean of the group, or one host of it that waits, whose error is the unit."""
SPREAD_FLOOR = 0.03
"""In units of score: three points from chance to no error."""
ERROR_FLOOR = 0.1
"""Least error left to a waiting host that gains are measured in, in units of score."""


@record
class GroupScale:
    """How the rewards of one env become comparable: all are divided, and the last one pays the baseline."""

    baseline: float
    """Taken from the last reward, in the units of the reward."""
    unit: float
    """What every reward is divided by."""


def group_scales(groups: Sequence[Hashable], returns: Sequence[float | None]) -> list[GroupScale]:
    """Baseline and unit of every env by the mean and spread of its group.

    Args:
        groups: Which group each env belongs to.
        returns: Sum of its rewards; None for an env that did not finish, which takes no part.
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for group, value in zip(groups, returns, strict=True):
        members[group] += [] if value is None else [value]
    found = {}
    for group, values in members.items():
        mean = statistics.fmean(values) if values else 0.0
        spread = statistics.pstdev(values) if values else 0.0
        found[group] = GroupScale(baseline=mean, unit=max(spread, SPREAD_FLOOR))
    return [found[group] for group in groups]


def twin_scales(
    groups: Sequence[Hashable], returns: Sequence[float | None], scores: Sequence[float | None], twins: Sequence[bool]
) -> list[GroupScale]:
    """Baseline and unit of every env by the host of its group that waited: its return, and the error it was left with.

    Args:
        groups: Which group each env belongs to.
        returns: Sum of its rewards; None for an env that did not finish.
        scores: Final score of what it delivers, 0 for a guess and 1 for no error; None for one that did not finish.
        twins: True for the waiting host of each group.

    Raises:
        ValueError: A group has no twin.
    """
    waiting = {
        group: (value, score) for group, value, score, twin in zip(groups, returns, scores, twins, strict=True) if twin
    }
    if missing := set(groups) - set(waiting):
        raise ValueError(f"groups without a waiting twin: {sorted(map(str, missing))}")
    found = {}
    for group, (value, score) in waiting.items():
        error = 1.0 if score is None else 1.0 - score
        found[group] = GroupScale(baseline=0.0 if value is None else value, unit=max(error, ERROR_FLOOR))
    return [found[group] for group in groups]
