"""The formulas of a simulated world: what a coalition scores, how a host comes to lean on a seed, what a seed is worth.

Pure functions of the spec, the slots and a key for what is drawn. Stages and gates are not decided here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from esper.leyline import CoalitionTable, EpisodeSeed, SeedStage, coalitions_to_measure, derive_seed, record
from esper.tamiyo.simulation.spec import SimulationSpec


@record
class SimulatedSlot:
    """One slot and the truth about the seed in it."""

    slot_id: str
    stage: SeedStage
    epochs_in_stage: int
    num_germinated: int
    scar_pp: float
    """Points the host still lacks since seeds were pruned here."""
    seed_id: str | None
    blueprint: str | None
    blend: str | None
    params: int
    gain_pp: float
    age_epochs: int
    ramp_done: int
    alpha: float
    blended_epochs: int
    lean_pp: float
    """Points the host would lack if this seed were switched off."""


def empty_slot(slot_id: str, num_germinated: int = 0, scar_pp: float = 0.0) -> SimulatedSlot:
    """A slot without a seed; it remembers how many it had and what the host lacks since."""
    return SimulatedSlot(
        slot_id=slot_id,
        stage=SeedStage.DORMANT,
        epochs_in_stage=0,
        num_germinated=num_germinated,
        scar_pp=scar_pp,
        seed_id=None,
        blueprint=None,
        blend=None,
        params=0,
        gain_pp=0.0,
        age_epochs=0,
        ramp_done=0,
        alpha=0.0,
        blended_epochs=0,
        lean_pp=0.0,
    )


def draw_key(seed: EpisodeSeed, epoch: int | None, purpose: str) -> int:
    """The key of one draw in this env and episode."""
    return derive_seed(seed.run_seed, seed.env_id, seed.episode, epoch, purpose)


def draw_right_blueprint(spec: SimulationSpec, seed: EpisodeSeed) -> str | None:
    """The blueprint this episode's cue points at; None in a world without cues."""
    if spec.cue is None:
        return None
    return random.Random(draw_key(seed, None, "cue")).choice(spec.cue.blueprints)


def draw_gain(spec: SimulationSpec, seed: EpisodeSeed, epoch: int, slot_id: str, name: str) -> float:
    """Points a seed planted now, here, of this blueprint will be worth when mature."""
    blueprint = spec.blueprint(name)
    if spec.cue is not None and name in spec.cue.blueprints and name != draw_right_blueprint(spec, seed):
        return 0.0
    if blueprint.window is not None and not blueprint.window[0] <= epoch <= blueprint.window[1]:
        return 0.0
    coin = random.Random(draw_key(seed, epoch, f"seed:{slot_id}"))
    if coin.random() < blueprint.harm_share:
        return -blueprint.harm_pp
    return blueprint.gain_pp[spec.slot_ids.index(slot_id)]


def train_slot(spec: SimulationSpec, slot: SimulatedSlot) -> SimulatedSlot:
    """One epoch: the host learns to lean on a blended seed, and recovers from pruned ones."""
    keep = 1.0 - 1.0 / spec.leaning_epochs
    if not slot.stage.is_blended:
        return replace(slot, scar_pp=slot.scar_pp * keep) if slot.scar_pp else slot
    assert slot.blueprint is not None
    wish = slot.alpha * spec.blueprint(slot.blueprint).dependence_pp
    return replace(
        slot,
        scar_pp=slot.scar_pp * keep,
        lean_pp=slot.lean_pp * keep + wish * (1.0 - keep),
        blended_epochs=slot.blended_epochs + 1,
    )


def measure(
    spec: SimulationSpec, seed: EpisodeSeed, epoch: int | None, slots: Sequence[SimulatedSlot]
) -> CoalitionTable:
    """One validation: every coalition of the seeds with alpha > 0 that a real worker would measure."""
    players = [slot for slot in slots if slot.alpha > 0.0]
    committed = sum(1 << i for i, slot in enumerate(players) if slot.stage is SeedStage.FOSSILIZED)
    epochs_done = 0 if epoch is None else epoch + 1
    base = spec.host.accuracy_pct(epochs_done) - math.fsum(slot.scar_pp for slot in slots)
    noise = random.Random(draw_key(seed, epoch, "noise")) if spec.noise_pp > 0.0 else None
    accuracy: dict[int, float] = {}
    for mask in coalitions_to_measure(len(players), committed):
        points = base + _seed_points(spec, players, mask)
        if noise is not None:
            points += noise.gauss(0.0, spec.noise_pp)
        accuracy[mask] = min(100.0, max(0.0, points))
    shift = _cue_loss(spec, seed) if epoch is None else 0.0
    return CoalitionTable(
        slot_ids=tuple(slot.slot_id for slot in players),
        accuracy_pct=accuracy,
        loss={mask: loss_of(spec, points) + shift for mask, points in accuracy.items()},
    )


def loss_of(spec: SimulationSpec, accuracy_pct: float) -> float:
    """A straight line from the loss of knowing nothing at 0 % to no loss at 100 %."""
    return math.log(spec.num_classes) * (1.0 - accuracy_pct / 100.0)


def _seed_points(spec: SimulationSpec, players: Sequence[SimulatedSlot], mask: int) -> float:
    """What the enabled seeds bring, minus what the host lacks without the others."""
    points = []
    alphas: dict[str, float] = {}
    for i, slot in enumerate(players):
        if mask >> i & 1:
            assert slot.blueprint is not None
            points.append(slot.alpha * slot.gain_pp * _maturity(spec, slot))
            alphas[slot.blueprint] = max(slot.alpha, alphas.get(slot.blueprint, 0.0))
        else:
            points.append(-slot.lean_pp)
    points += [
        pair.gain_pp * min(alphas[pair.first], alphas[pair.second])
        for pair in spec.synergies
        if pair.first in alphas and pair.second in alphas
    ]
    return math.fsum(points)


def _maturity(spec: SimulationSpec, slot: SimulatedSlot) -> float:
    assert slot.blueprint is not None
    epochs = spec.blueprint(slot.blueprint).maturing_epochs
    return 1.0 if epochs == 0.0 else 1.0 - math.exp(-slot.blended_epochs / epochs)


def _cue_loss(spec: SimulationSpec, seed: EpisodeSeed) -> float:
    right = draw_right_blueprint(spec, seed)
    return 0.0 if spec.cue is None or right is None else spec.cue.loss_step * spec.cue.blueprints.index(right)
