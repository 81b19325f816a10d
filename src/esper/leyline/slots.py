"""Where a host can grow, what fits there and what was measured there: plain numbers about slots and blueprints."""

from __future__ import annotations

import re
from collections.abc import Iterable

from esper.leyline.errors import check_known
from esper.leyline.record import record
from esper.leyline.stages import SeedStage

SLOT_ID = re.compile(r"r(0|[1-9][0-9]*)c(0|[1-9][0-9]*)")
MIXING: tuple[str, ...] = ("none", "local", "global")
PASSES_PER_STEP = 3
"""A backward pass costs about twice a forward pass."""


def check_slot_id(slot_id: str) -> str:
    """Returns the id unchanged.

    Raises:
        ValueError: The id does not look like "r0c1".
    """
    if not SLOT_ID.fullmatch(slot_id):
        raise ValueError(
            f"malformed slot id {slot_id!r}: expected r<row>c<column> without leading zeros, such as 'r0c1'"
        )
    return slot_id


@record
class SlotConfig:
    """The slots a controller may act on. The position here is the action index; it is also execution order."""

    slot_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        for slot_id in self.slot_ids:
            check_slot_id(slot_id)
        if len(set(self.slot_ids)) != len(self.slot_ids):
            raise ValueError(f"duplicate slot ids: {', '.join(self.slot_ids)}")


@record
class FeatureShape:
    """The shape of features at one place of a network, measured once on a sample."""

    segment_idx: int
    """The segment they leave; -1 for the network's input."""
    depth_share: float
    channels: int
    positions: int
    """Values per channel and row: height x width, sequence length, or 1."""


@record
class SpanSource(FeatureShape):
    """What a span reads."""

    stride: int | None
    """Pixels along each axis for one of the slot's; 0 if sizes do not divide. None: images in, rows of features out."""


@record
class SlotSpec(FeatureShape):
    """A slot and the features that leave it."""

    slot_id: str
    mixing_before: str | None
    """Strongest of MIXING among the layers up to here, so what a seed there can already see. None: not known."""
    mixing_after: str | None
    """The same of the layers that follow."""
    source: SpanSource | None = None
    """Where a span reads; None for a slot that reads the features it adds to."""

    @property
    def source_depth_share(self) -> float | None:
        """Where a span begins, as a share of the depth; None: seeds read the features they extend."""
        return None if self.source is None else self.source.depth_share


@record
class BlueprintCard:
    """What a blueprint would cost and do in one slot. All that a policy sees of it, so new ones need no new weights."""

    blueprint: str
    params: int
    params_ratio: float
    macs: int
    macs_ratio: float
    mixing: str
    nonlinear: bool
    gate_params: int
    """Extra parameters if a gated blend is chosen."""
    fits: bool

    def added_params(self, operator: str) -> int:
        """What such a seed adds to the network under a blend with this operator."""
        return self.params + (self.gate_params if operator == "gate" else 0)


@record
class HostLayout:
    """A host as controllers see it: slots in execution order, blueprint names in head order, one card per pair."""

    topology: str
    host_params: int
    host_macs: int
    slots: tuple[SlotSpec, ...]
    blueprints: tuple[str, ...]
    cards: tuple[tuple[BlueprintCard, ...], ...]
    """`cards[slot position][blueprint position]`."""

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """Slot ids in execution order, which is the order of actions."""
        return tuple(slot.slot_id for slot in self.slots)

    def slot_position(self, slot_id: str) -> int:
        """Position of a slot in execution order; ValueError with the known ids if there is none."""
        check_known("slot", slot_id, self.slot_ids)
        return self.slot_ids.index(slot_id)

    def training_macs(self, rows: int, seeds: Iterable[tuple[str, str]]) -> int:
        """Multiply-accumulates of training on so many rows with these seeds (slot, blueprint) in their places."""
        per_row = self.host_macs + sum(self.card(slot_id, blueprint).macs for slot_id, blueprint in seeds)
        return PASSES_PER_STEP * rows * per_row

    def fitting(self, slot_id: str) -> list[BlueprintCard]:
        """The cards of what fits into a slot."""
        return [card for card in self.cards[self.slot_position(slot_id)] if card.fits]

    def card(self, slot_id: str, blueprint: str) -> BlueprintCard:
        """The card of one blueprint in one slot; ValueError with the known names if there is none."""
        check_known("blueprint", blueprint, self.blueprints)
        return self.cards[self.slot_position(slot_id)][self.blueprints.index(blueprint)]


@record
class Attribution:
    """What one blended seed is worth by the coalition table, in points."""

    contribution_pp: float | None
    """Lost when this seed alone is switched off."""
    solo_pp: float | None
    """Gained over no seeds when this one alone is on."""
    interaction_pp: float | None
    """Sum of the pairwise interactions with the other seeds."""


@record
class SlotMeasurement(Attribution):
    """What was measured of one slot in one epoch."""

    contribution_alpha: float | None
    contribution_topology: int | None
    """`topology_version` of the model whose validation gave the attribution."""
    predicted_gain: float | None
    """Loss decrease in nats that blending the training seed is forecast to bring."""
    residual_ratio: float | None
    gradients_finite: bool | None
    live_fraction: float | None
    grad_ratio: float | None
    grad_health: float | None


@record
class SlotReport(SlotMeasurement):
    """One slot: who lives there and all that the gates may know."""

    slot_id: str
    seed_id: str | None
    blueprint: str | None
    blend: str | None
    params: int
    stage: SeedStage
    epochs_in_stage: int
    age_epochs: int
    """Epochs completed since germination; 0 in an empty slot."""
    alpha: float
    ramp_complete: bool
    probe_passed: bool | None
    in_optimizer: bool | None
    train_loss: float | None
    val_loss: float | None
    topology_version: int
