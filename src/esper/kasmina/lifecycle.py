"""One op, then one epoch of life: what happens to every slot before and after the host trains.

Order inside a step: apply_op, begin_epoch, train, validate, end_epoch. Counters move in end_epoch only, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from esper.kasmina.network import GrowingNetwork
from esper.kasmina.slot import UNMEASURED, SeedSlot
from esper.leyline import (
    ActionSpec,
    Attribution,
    Cause,
    GradientEvidence,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    SlotMeasurement,
    SlotTransition,
    as_keywords,
    gate_blend,
    gate_hold,
    gate_train,
    record,
)

GRAD_RATIO_DECAY = 0.9


@record
class EpochMeasurement:
    """What one epoch of training and validation measured."""

    train_loss: float
    val_loss: float
    attributions: Mapping[str, Attribution]
    """By slot id; slots that were not measured are absent."""
    gradients: Mapping[str, GradientEvidence]
    """By parameter group: "host" and slot ids."""


def resolve_target_slot(slot_idx: int, *, enabled_slots: Sequence[str], slot_config: SlotConfig) -> tuple[str, int]:
    """Maps an action index to (slot id, its position among the enabled slots).

    Raises:
        ValueError: The index is outside the slot list, or that slot is not enabled.
    """
    slot_ids = slot_config.slot_ids
    if not 0 <= slot_idx < len(slot_ids):
        raise ValueError(f"slot index {slot_idx} is outside 0..{len(slot_ids) - 1} ({', '.join(slot_ids)})")
    slot_id = slot_ids[slot_idx]
    if slot_id not in enabled_slots:
        raise ValueError(f"slot {slot_id} (index {slot_idx}) is not enabled. Enabled: {', '.join(enabled_slots)}")
    return slot_id, list(enabled_slots).index(slot_id)


def advance_active_seed(model: GrowingNetwork, slot_id: str) -> SlotTransition | None:
    """Starts blending the seed in this slot. Returns None, and changes nothing, if its gate is closed."""
    return model.advance(slot_id) if gate_blend(model.report(slot_id), model.lifecycle).passed else None


def apply_op(model: GrowingNetwork, spec: ActionSpec, rng_seed: int) -> SlotTransition | None:
    """Carries out one op. `rng_seed` is used by GERMINATE only.

    Raises:
        IllegalOperation: A gate refuses the op. The masks should have ruled it out.
    """
    if spec.op is LifecycleOp.WAIT:
        return None
    assert spec.slot is not None
    if spec.op is LifecycleOp.GERMINATE:
        assert spec.blueprint is not None
        assert spec.blend is not None
        return model.germinate(spec.slot, spec.blueprint, spec.blend, rng_seed)
    if spec.op is LifecycleOp.ADVANCE:
        # A closed gate is asked once more by the model, whose error names the checks that failed.
        return advance_active_seed(model, spec.slot) or model.advance(spec.slot)
    return model.prune(spec.slot) if spec.op is LifecycleOp.PRUNE else model.fossilize(spec.slot)


def begin_epoch(model: GrowingNetwork) -> list[SlotTransition]:
    """New seeds start to train, ramps move one epoch on. Alpha moves here, so no blended epoch runs at alpha 0."""
    moves = []
    for slot in model.all_slots():
        if slot.stage is SeedStage.GERMINATED:
            if gate_train(model.report(slot.spec.slot_id), model.lifecycle).passed:
                moves.append(slot.transition(SeedStage.TRAINING, Cause.AUTO))
            else:
                moves.append(model.prune(slot.spec.slot_id, Cause.AUTO))
        elif slot.stage is SeedStage.BLENDING:
            slot.ramp()
    return moves


def end_epoch(model: GrowingNetwork, measured: EpochMeasurement) -> list[SlotTransition]:
    """Stores what was measured, advances the counters once, and makes the automatic moves."""
    model.train_loss, model.val_loss = measured.train_loss, measured.val_loss
    moves = []
    for slot in model.all_slots():
        slot.epochs_in_stage += 1
        if slot.stage.has_seed:
            slot.age_epochs += 1
            slot.measured = _measurement(slot, measured, model.topology_version)
        target = _automatic_move(model, slot)
        if target is not None:
            moves.append(slot.transition(target, Cause.AUTO))
    return moves


def _automatic_move(model: GrowingNetwork, slot: SeedSlot) -> SeedStage | None:
    if slot.stage is SeedStage.BLENDING:
        opened = gate_hold(model.report(slot.spec.slot_id), model.lifecycle).passed
        return SeedStage.HOLDING if opened else None
    if slot.stage is SeedStage.PRUNED:
        return SeedStage.EMBARGOED
    if slot.stage is SeedStage.EMBARGOED and slot.epochs_in_stage >= model.lifecycle.embargo:
        return SeedStage.DORMANT
    return None


def _measurement(slot: SeedSlot, epoch: EpochMeasurement, topology_version: int) -> SlotMeasurement:
    """This epoch's measurement of a slot; what was not measured now is None, not the old value."""
    assert slot.meter is not None
    slot_id = slot.spec.slot_id
    gain, ratio = slot.meter.finish_epoch()
    fresh = replace(UNMEASURED, predicted_gain=gain, residual_ratio=ratio)
    if slot_id in epoch.gradients and not slot.meter.only_listened:
        own, host = epoch.gradients[slot_id], epoch.gradients["host"]
        fresh = replace(
            fresh,
            gradients_finite=own.finite,
            live_fraction=own.live_fraction,
            grad_ratio=_grad_ratio(slot.measured.grad_ratio, own.norm_per_weight, host.norm_per_weight),
            grad_health=own.health,
        )
    if slot_id in epoch.attributions:
        worth = as_keywords(epoch.attributions[slot_id])
        fresh = replace(fresh, **worth, contribution_alpha=slot.alpha, contribution_topology=topology_version)
    return fresh


def _grad_ratio(before: float | None, own: float | None, host: float | None) -> float | None:
    if own is None or host is None:
        return None
    now = own / (host + 1e-8)
    return now if before is None else GRAD_RATIO_DECAY * before + (1 - GRAD_RATIO_DECAY) * now
