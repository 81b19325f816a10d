"""The terms a reward can be made of: pure functions from one transition to one signed amount, in score units.

State terms sum over all slots; only the action cost and the commit payment look at the slot that was acted on. Dense
terms are discounted differences of a potential that is zero at every terminal, so they cancel over any episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from esper.leyline import BLENDS, EpochReport, LifecycleConfig, LifecycleOp, SeedStage, SlotReport
from esper.simic.rewards.types import Ledger, RewardConfig, RewardInputs, SlotLedger, committed_points

MIN_HOST_PARAMS = 200
"""Hosts smaller than this are priced as if they had this many parameters."""
WORST_SCORE = -1.0
STAGE_POTENTIAL: Mapping[SeedStage, float] = {
    SeedStage.GERMINATED: 0.02,
    SeedStage.TRAINING: 0.04,
    SeedStage.BLENDING: 0.08,
    SeedStage.HOLDING: 0.12,
    SeedStage.FOSSILIZED: 0.16,
}
WITHIN_STAGE = 0.9
"""Share of the way to the next stage that time in a stage can earn: below 1, so that moving on always adds."""
CREDIT_SHARE: Mapping[SeedStage, float] = {
    SeedStage.BLENDING: 0.5,
    SeedStage.HOLDING: 0.5,
    SeedStage.FOSSILIZED: 1.0,
}
MIN_RENTED_ALPHA = 0.1
MIN_DRIP_EPOCHS = 5
WORST_DRIP = -0.5


def terminal(inputs: RewardInputs) -> float:
    """The deliverable: the score of the committed network, once, when the episode is complete."""
    if not inputs.finished:
        return 0.0
    points = committed_points(inputs.after, inputs.config)
    if points is None:
        raise ValueError("the terminal term needs the committed network's metric, but it was not measured")
    calibration = inputs.config.calibration
    return inputs.config.weights.terminal * max((points - calibration.floor) / calibration.span, WORST_SCORE)


def size(inputs: RewardInputs) -> float:
    """What the committed network costs: per doubling of the host, once, when the episode is complete."""
    if not inputs.finished:
        return 0.0
    kept = [slot for slot in inputs.after.slots if slot.stage is SeedStage.FOSSILIZED]
    return -inputs.config.weights.size * math.log2(1.0 + math.fsum(_params_share(inputs.after, slot) for slot in kept))


def pbrs(inputs: RewardInputs) -> float:
    """Progress along the life of a seed, as a discounted difference."""
    after = 0.0 if inputs.after.terminal else stage_potential(inputs.after, inputs.config.lifecycle)
    return inputs.config.gamma * after - stage_potential(inputs.before, inputs.config.lifecycle)


def credit(inputs: RewardInputs) -> float:
    """Measured credit of all blended seeds, as a discounted difference. A fossil's counts in full, others' by half."""
    after = 0.0 if inputs.after.terminal else credit_potential(inputs.after, inputs.ledger_after, inputs.config)
    return inputs.config.gamma * after - credit_potential(inputs.before, inputs.ledger, inputs.config)


def rent(inputs: RewardInputs) -> float:
    """What carrying seeds costs, per epoch, so that a whole episode adds up to the weight."""
    used = math.fsum(
        max(slot.alpha, MIN_RENTED_ALPHA) * _params_share(inputs.after, slot)
        for slot in inputs.after.slots
        if slot.stage.has_seed
    )
    return -inputs.config.weights.rent / inputs.config.horizon * math.log2(1.0 + used)


def shock(inputs: RewardInputs) -> float:
    """What abrupt changes of blend strength cost. A seed that is gone fell to 0."""
    jumps = []
    for old, new in zip(inputs.before.slots, inputs.after.slots, strict=True):
        if old.seed_id == new.seed_id:
            jumps.append((new.alpha - old.alpha) ** 2 * min(1.0, _params_share(inputs.after, new)))
        else:
            jumps += [slot.alpha**2 * min(1.0, _params_share(inputs.before, slot)) for slot in (old, new)]
    return -inputs.config.weights.shock * math.fsum(jumps)


def action(inputs: RewardInputs) -> float:
    """The price of the op."""
    return -inputs.config.weights.cost(inputs.outcome.op) if inputs.outcome.applied else 0.0


def commit(inputs: RewardInputs, now_share: float) -> float:
    """Pays for keeping a seed, in proportion to its credit: `now_share` of the price, the rest is left to the drip."""
    _need_reference(inputs.config)
    if inputs.outcome.op is not LifecycleOp.FOSSILIZE or inputs.rolled_back or not inputs.outcome.applied:
        return 0.0
    assert inputs.outcome.slot is not None
    score = _marked(inputs, inputs.outcome.slot).credit / inputs.config.calibration.span
    return now_share * inputs.config.weights.commit * min(1.0, max(0.0, score))


def drip(inputs: RewardInputs, now_share: float) -> float:
    """Pays the rest of a commit while the fossil goes on contributing, and charges for one that harms."""
    _need_reference(inputs.config)
    if inputs.rolled_back:
        return 0.0
    fossils = [slot.slot_id for slot in inputs.before.slots if slot.stage is SeedStage.FOSSILIZED]
    return math.fsum(_drip(inputs, _marked(inputs, slot_id), now_share) for slot_id in fossils)


def rollback(inputs: RewardInputs) -> float:
    """The price of an episode that had to be rolled back, on the transition that caused it."""
    return -inputs.config.weights.rollback if inputs.rolled_back else 0.0


def stage_potential(report: EpochReport, lifecycle: LifecycleConfig) -> float:
    """How far the seeds have come in their lives, over all slots."""
    return math.fsum(_slot_potential(slot, lifecycle) for slot in report.slots)


def credit_potential(report: EpochReport, ledger: Ledger, config: RewardConfig) -> float:
    """What the seeds are credited with, over all slots, in score units."""
    credited = math.fsum(CREDIT_SHARE.get(slot.stage, 0.0) * ledger.credit(slot.slot_id) for slot in report.slots)
    return config.weights.credit * credited / config.calibration.span


def _slot_potential(slot: SlotReport, lifecycle: LifecycleConfig) -> float:
    if slot.stage not in STAGE_POTENTIAL:
        return 0.0
    level = STAGE_POTENTIAL[slot.stage]
    if slot.stage is SeedStage.FOSSILIZED:
        return level
    step = STAGE_POTENTIAL[SeedStage(slot.stage + 1)] - level
    return level + WITHIN_STAGE * step * min(1.0, slot.epochs_in_stage / _epochs_needed(slot, lifecycle))


def _epochs_needed(slot: SlotReport, lifecycle: LifecycleConfig) -> int:
    """Epochs after which the stage has nothing more to give."""
    if slot.stage is SeedStage.TRAINING:
        return lifecycle.min_training
    if slot.stage is SeedStage.BLENDING:
        assert slot.blend is not None
        return BLENDS[slot.blend].ramp_epochs
    return 1


def _params_share(report: EpochReport, slot: SlotReport) -> float:
    return slot.params / max(report.host_params, MIN_HOST_PARAMS)


def _drip(inputs: RewardInputs, entry: SlotLedger, now_share: float) -> float:
    assert entry.commit_epoch is not None, "a fossil was committed at some epoch"
    config = inputs.config
    epochs_left = config.horizon - 1 - entry.commit_epoch
    score = min(1.0, max(WORST_DRIP, entry.credit / config.calibration.span))
    return (1.0 - now_share) * config.weights.commit / max(epochs_left, MIN_DRIP_EPOCHS) * score


def _marked(inputs: RewardInputs, slot_id: str) -> SlotLedger:
    """The seed's entry, provided that it was marked in this very epoch."""
    entry = inputs.ledger_after.slots[slot_id]
    if entry.marked_epoch != inputs.after.epoch:
        raise ValueError(
            f"paying for the seed in {slot_id} needs its contribution at epoch {inputs.after.epoch}, but it was last "
            f"measured at epoch {entry.marked_epoch}; measure fossils too when a reward mode pays for commits"
        )
    return entry


def _need_reference(config: RewardConfig) -> None:
    if config.calibration.reference is None:
        raise ValueError(
            "reward modes that pay for commits need the curve of a waiting host, because an early seed could claim "
            "what the host learns by itself; calibrate the task or choose another mode"
        )
