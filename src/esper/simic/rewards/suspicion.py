"""Signs that a reward may be paying for damage. For events only: nothing here changes a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping

from esper.leyline import EpochReport, contribution, full_coalition, record
from esper.simic.rewards.families import coalition_points
from esper.simic.rewards.ledger import common_gain
from esper.simic.rewards.types import Ledger, RewardConfig

RANSOM_CONTRIBUTION_PP = 1.0
RANSOM_IMPROVEMENT_PP = -0.2
MAX_ATTRIBUTION_RATIO = 5.0
MIN_COMMON_GAIN_PP = 0.1


@record
class HackingSuspicion:
    """One sign, about one seed."""

    pattern: str
    """ransomware: removal would hurt although the host is worse than if it had only waited.
    attribution_ratio: the seeds claim many times what they brought together."""
    slot_id: str
    contribution_pp: float
    improvement_pp: float
    ratio: float | None


def suspicions(after: EpochReport, ledger_after: Ledger, config: RewardConfig) -> tuple[HackingSuspicion, ...]:
    """What looks wrong in one epoch's coalition table, in points of the family."""
    points = coalition_points(after.coalitions, config)
    players = after.coalitions.slot_ids
    full = points.get(full_coalition(len(players)))
    gains = {slot_id: contribution(points, len(players), i) for i, slot_id in enumerate(players)}
    measured = {slot_id: gain for slot_id, gain in gains.items() if gain is not None}
    reference = config.reference_points(after.epochs_done)
    return (
        *_ransomware(measured, None if full is None or reference is None else full - reference),
        *_over_attribution(measured, common_gain(full, ledger_after.best_bare, reference)),
    )


def _ransomware(gains: Mapping[str, float], over_waiting: float | None) -> tuple[HackingSuspicion, ...]:
    if over_waiting is None or over_waiting >= RANSOM_IMPROVEMENT_PP:
        return ()
    return tuple(
        HackingSuspicion(
            pattern="ransomware", slot_id=slot_id, contribution_pp=gain, improvement_pp=over_waiting, ratio=None
        )
        for slot_id, gain in gains.items()
        if gain >= RANSOM_CONTRIBUTION_PP
    )


def _over_attribution(gains: Mapping[str, float], together: float | None) -> tuple[HackingSuspicion, ...]:
    claimed = math.fsum(gain for gain in gains.values() if gain > 0.0)
    if together is None or claimed == 0.0:
        return ()
    ratio = claimed / max(together, MIN_COMMON_GAIN_PP)
    if ratio < MAX_ATTRIBUTION_RATIO:
        return ()
    slot_id = max(gains, key=lambda name: gains[name])
    return (
        HackingSuspicion(
            pattern="attribution_ratio",
            slot_id=slot_id,
            contribution_pp=gains[slot_id],
            improvement_pp=together,
            ratio=ratio,
        ),
    )
