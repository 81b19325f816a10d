"""A simulated world: its host's learning curve, its blueprints' true worth, its noise and its traps, as formulas.

Accuracies are percentages, gains and dependences are points. Stages and gates are not decided here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from esper.leyline import (
    DEFAULT_LIFECYCLE,
    BlueprintCard,
    CoalitionTable,
    EpisodeSeed,
    FeatureContext,
    HostLayout,
    LifecycleConfig,
    SeedStage,
    SlotConfig,
    SlotSpec,
    coalitions_to_measure,
    record,
)


@record
class HostCurve:
    """Accuracy of the host alone: an exponential approach from `start_pct` to `final_pct`."""

    start_pct: float = 20.0
    final_pct: float = 80.0
    epochs: float = 9.0
    """Time constant of the approach."""

    def accuracy_pct(self, epochs_done: int) -> float:
        """The host's accuracy after so many epochs without any seed."""
        return self.final_pct - (self.final_pct - self.start_pct) * math.exp(-epochs_done / self.epochs)


@record
class SimulatedBlueprint:
    """The truth about one kind of seed."""

    name: str
    gain_pp: tuple[float, ...]
    """Points a mature seed at alpha 1 brings, one per slot of the world."""
    params: int = 500
    dependence_pp: float = 0.0
    """Points the host comes to lack without the seed. With no gain this makes a parasite."""
    maturing_epochs: float = 0.0
    """Time constant in blended epochs of reaching the full gain; 0 for at once."""
    window: tuple[int, int] | None = None
    """First and last epoch of germination at which the gain exists; None for always."""
    harm_share: float = 0.0
    """Chance that a seed turns out bad, drawn when it is planted."""
    harm_pp: float = 0.0
    """Points a bad seed costs."""
    predicted_gain: float = 0.0
    """Forecast in nats shown while the seed trains. It says nothing about a coin's outcome."""
    mixing: str = "local"
    nonlinear: bool = True
    fits: bool = True


@record
class Synergy:
    """Points two blueprints bring only together, at the smaller of their alphas."""

    first: str
    second: str
    gain_pp: float


@record
class Cue:
    """Each episode one of these blueprints is the right one; the others gain nothing.

    Only the validation loss at reset tells which: it lies `loss_step` nats higher per position in the list.
    """

    blueprints: tuple[str, ...]
    loss_step: float = 0.5


@record
class SimulationSpec:
    """One simulated task."""

    blueprints: tuple[SimulatedBlueprint, ...]
    name: str = "simulated"
    horizon: int = 24
    slot_ids: tuple[str, ...] = ("r0c0", "r0c1", "r0c2")
    host: HostCurve = HostCurve()
    host_params: int = 1000
    num_classes: int = 10
    lifecycle: LifecycleConfig = DEFAULT_LIFECYCLE
    synergies: tuple[Synergy, ...] = ()
    cue: Cue | None = None
    noise_pp: float = 0.0
    """Standard deviation of the validation noise, drawn for every coalition and epoch."""
    leaning_epochs: float = 5.0
    """Time constant of the host's learning to lean on a blended seed, and of its recovery after a prune."""
    gap_pp: float = 2.0
    """How far training accuracy runs ahead of validation accuracy by the end."""
    opens_epoch: int = 0
    """Epochs for which all slots are closed at the start."""
    rollback_epoch: int | None = None
    """Epoch that ends in a governor panic; None for a healthy episode."""

    def __post_init__(self) -> None:
        SlotConfig(slot_ids=self.slot_ids)
        if self.horizon < 1:
            raise ValueError(f"horizon must be at least 1 epoch, got {self.horizon}")
        names = [blueprint.name for blueprint in self.blueprints]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"a world needs blueprints with distinct names, got {names}")
        for blueprint in self.blueprints:
            if len(blueprint.gain_pp) != len(self.slot_ids):
                raise ValueError(
                    f"{blueprint.name}: gain_pp needs one value per slot ({len(self.slot_ids)}), "
                    f"got {len(blueprint.gain_pp)}"
                )
        named = {name for pair in self.synergies for name in (pair.first, pair.second)}
        named |= set(self.cue.blueprints) if self.cue is not None else set()
        if unknown := named - set(names):
            raise ValueError(f"unknown blueprints {sorted(unknown)}. Known: {', '.join(names)}")

    @property
    def layout(self) -> HostLayout:
        """The world as controllers see it."""
        count = len(self.slot_ids)
        slots = tuple(
            SlotSpec(
                slot_id=slot_id,
                segment_idx=i,
                channels=8,
                positions=16,
                depth_share=(i + 1) / (count + 1),
                mixing_before="none",
                mixing_after="none",
            )
            for i, slot_id in enumerate(self.slot_ids)
        )
        cards = tuple(self._card(blueprint) for blueprint in self.blueprints)
        return HostLayout(
            topology="simulated",
            host_params=self.host_params,
            host_macs=self.host_params,
            slots=slots,
            blueprints=tuple(blueprint.name for blueprint in self.blueprints),
            cards=(cards,) * count,
        )

    @property
    def context(self) -> FeatureContext:
        """All that a controller may know of it beforehand."""
        return FeatureContext(
            task=self.name,
            layout=self.layout,
            lifecycle=self.lifecycle,
            num_classes=self.num_classes,
            train_rows=None,
            steps_per_epoch=None,
        )

    def blueprint(self, name: str) -> SimulatedBlueprint:
        """The blueprint of that name."""
        return next(blueprint for blueprint in self.blueprints if blueprint.name == name)

    def _card(self, blueprint: SimulatedBlueprint) -> BlueprintCard:
        ratio = blueprint.params / self.host_params
        return BlueprintCard(
            blueprint=blueprint.name,
            params=blueprint.params,
            params_ratio=ratio,
            macs=blueprint.params,
            macs_ratio=ratio,
            mixing=blueprint.mixing,
            nonlinear=blueprint.nonlinear,
            gate_params=0,
            fits=blueprint.fits,
        )


# ---- formulas: pure functions of the spec, the slots and a key for what is drawn


@record
class SimulatedSlot:
    """One slot and the truth about the seed in it."""

    slot_id: str
    stage: SeedStage
    epochs_in_stage: int = 0
    num_germinated: int = 0
    scar_pp: float = 0.0
    """Points the host still lacks since seeds were pruned here."""
    seed_id: str | None = None
    blueprint: str | None = None
    blend: str | None = None
    params: int = 0
    gain_pp: float = 0.0
    age_epochs: int = 0
    ramp_done: int = 0
    alpha: float = 0.0
    blended_epochs: int = 0
    lean_pp: float = 0.0
    """Points the host would lack if this seed were switched off."""

    def occupant(self) -> dict[str, Any]:
        """What reports and moves say alike of the seed that lives here."""
        names = ("slot_id", "blueprint", "blend", "params", "epochs_in_stage", "age_epochs", "alpha")
        return {name: getattr(self, name) for name in names}


def draw_right_blueprint(spec: SimulationSpec, seed: EpisodeSeed) -> str | None:
    """The blueprint this episode's cue points at; None in a world without cues."""
    if spec.cue is None:
        return None
    return random.Random(seed.derive(None, "cue")).choice(spec.cue.blueprints)


def draw_gain(spec: SimulationSpec, seed: EpisodeSeed, epoch: int, slot_id: str, name: str) -> float:
    """Points a seed planted now, here, of this blueprint will be worth when mature."""
    blueprint = spec.blueprint(name)
    if spec.cue is not None and name in spec.cue.blueprints and name != draw_right_blueprint(spec, seed):
        return 0.0
    if blueprint.window is not None and not blueprint.window[0] <= epoch <= blueprint.window[1]:
        return 0.0
    coin = random.Random(seed.derive(epoch, f"seed:{slot_id}"))
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


def measure_coalitions(
    spec: SimulationSpec, seed: EpisodeSeed, epoch: int | None, slots: Sequence[SimulatedSlot]
) -> CoalitionTable:
    """One validation: every coalition of the seeds with alpha > 0 that a real worker would measure."""
    players = [slot for slot in slots if slot.alpha > 0.0]
    committed = sum(1 << i for i, slot in enumerate(players) if slot.stage is SeedStage.FOSSILIZED)
    epochs_done = 0 if epoch is None else epoch + 1
    base = spec.host.accuracy_pct(epochs_done) - math.fsum(slot.scar_pp for slot in slots)
    noise = random.Random(seed.derive(epoch, "noise")) if spec.noise_pp > 0.0 else None
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
    """A straight line from the loss of a uniform guess at 0 % to no loss at 100 %."""
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
