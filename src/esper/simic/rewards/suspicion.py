"""Signs that a reward may be paying for damage. For events only: nothing here changes a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping

from esper.leyline import (
    THRESHOLDS,
    EpochReport,
    RewardHackingSuspected,
    Severity,
    Threshold,
    contribution,
    full_coalition,
)
from esper.leyline.thresholds import MIN_COMMON_GAIN_PP, RANSOM_IMPROVEMENT_PP
from esper.simic.rewards.ledger import common_gain
from esper.simic.rewards.types import Ledger, RewardConfig, coalition_points

ROWS: Mapping[str, Threshold] = {
    "ransomware": THRESHOLDS["ransom_contribution_pp"],
    "attribution_ratio": THRESHOLDS["attribution_ratio"],
}
"""The row of limits that judges each pattern."""


def severity_of(sign: RewardHackingSuspected) -> Severity | None:
    """How bad one sign of one epoch is. `ROWS` says in how many epochs running it must be seen to mean something."""
    return ROWS[sign.pattern].severity_of(sign.contribution_pp if sign.ratio is None else sign.ratio)


def suspicions(after: EpochReport, ledger_after: Ledger, config: RewardConfig) -> tuple[RewardHackingSuspected, ...]:
    """What looks wrong in one epoch's coalition table, in points of the family."""
    points = coalition_points(after.coalitions, config)
    players = after.coalitions.slot_ids
    full = points.get(full_coalition(len(players)))
    gains = {slot_id: contribution(points, len(players), i) for i, slot_id in enumerate(players)}
    measured = {slot_id: gain for slot_id, gain in gains.items() if gain is not None}
    reference = config.reference_points(after.epochs_done)
    return (
        *ransomware(measured, None if full is None or reference is None else full - reference),
        *over_attribution(measured, common_gain(full, ledger_after.best_bare, reference)),
    )


def ransomware(gains: Mapping[str, float], over_waiting: float | None) -> tuple[RewardHackingSuspected, ...]:
    """Seeds that claim to contribute to a host that is worse off than if it had only waited."""
    if over_waiting is None or over_waiting >= RANSOM_IMPROVEMENT_PP:
        return ()
    signs = (
        RewardHackingSuspected(pattern="ransomware", slot_id=slot_id, contribution_pp=gain, improvement_pp=over_waiting)
        for slot_id, gain in gains.items()
    )
    return tuple(sign for sign in signs if severity_of(sign) is not None)


def over_attribution(gains: Mapping[str, float], together: float | None) -> tuple[RewardHackingSuspected, ...]:
    """Seeds that claim more, one by one, than all of them brought."""
    claimed = math.fsum(gain for gain in gains.values() if gain > 0.0)
    if together is None or claimed == 0.0:
        return ()
    slot_id = max(gains, key=lambda name: gains[name])
    sign = RewardHackingSuspected(
        pattern="attribution_ratio",
        slot_id=slot_id,
        contribution_pp=gains[slot_id],
        improvement_pp=together,
        ratio=claimed / max(together, MIN_COMMON_GAIN_PP),
    )
    return () if severity_of(sign) is None else (sign,)
