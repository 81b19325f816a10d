"""What a simulated world is like: its host's learning curve, its blueprints' true worth, its noise and its traps.

Plain configuration for `SimulatedWorker`. Accuracies are percentages, gains and dependences are points.
"""

from __future__ import annotations

import math

from esper.leyline import DEFAULT_LIFECYCLE, BlueprintCard, HostLayout, LifecycleConfig, SlotConfig, SlotSpec, record


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
            SlotSpec(slot_id=slot_id, segment_idx=i, channels=8, positions=16, depth_share=(i + 1) / (count + 1))
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
