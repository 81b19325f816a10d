"""The life of a seed: its stages and the only table of moves between them."""

from __future__ import annotations

from enum import Enum, IntEnum

from esper.leyline.actions import LifecycleOp
from esper.leyline.record import record


class SeedStage(IntEnum):
    """Where a slot's seed is in its life. The numbers are permanent: files and observations carry them."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7

    @property
    def has_seed(self) -> bool:
        """True while a module sits in the slot."""
        return self in _WITH_SEED

    @property
    def is_live(self) -> bool:
        """True while the seed is neither committed nor gone: it may still be pruned."""
        return self in _LIVE

    @property
    def is_blended(self) -> bool:
        """True while the seed changes the output of its slot."""
        return self in _BLENDED


_LIVE = frozenset({SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING})
_BLENDED = frozenset({SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED})
_WITH_SEED = _LIVE | {SeedStage.GERMINATED, SeedStage.FOSSILIZED}


class Gate(str, Enum):
    """Names of the checks that guard a move."""

    GERMINATE = "G0"
    TRAIN = "G1"
    BLEND = "G2"
    HOLD = "G3"
    FOSSILIZE = "G4"
    PRUNE = "GP"


class Cause(str, Enum):
    """Who moved a seed."""

    POLICY = "policy"
    AUTO = "auto"


@record
class Transition:
    """One legal move. `op` is None where the move happens by itself."""

    source: SeedStage
    target: SeedStage
    op: LifecycleOp | None


def _move(source: SeedStage, target: SeedStage, op: LifecycleOp | None) -> Transition:
    return Transition(source=source, target=target, op=op)


TRANSITIONS: dict[tuple[SeedStage, SeedStage], Transition] = {
    (move.source, move.target): move
    for move in (
        _move(SeedStage.DORMANT, SeedStage.GERMINATED, LifecycleOp.GERMINATE),
        _move(SeedStage.GERMINATED, SeedStage.TRAINING, None),
        _move(SeedStage.GERMINATED, SeedStage.PRUNED, None),
        _move(SeedStage.TRAINING, SeedStage.BLENDING, LifecycleOp.ADVANCE),
        _move(SeedStage.TRAINING, SeedStage.PRUNED, LifecycleOp.PRUNE),
        _move(SeedStage.BLENDING, SeedStage.HOLDING, None),
        _move(SeedStage.BLENDING, SeedStage.PRUNED, LifecycleOp.PRUNE),
        _move(SeedStage.HOLDING, SeedStage.FOSSILIZED, LifecycleOp.FOSSILIZE),
        _move(SeedStage.HOLDING, SeedStage.PRUNED, LifecycleOp.PRUNE),
        _move(SeedStage.PRUNED, SeedStage.EMBARGOED, None),
        _move(SeedStage.EMBARGOED, SeedStage.DORMANT, None),
    )
}


@record
class SlotTransition:
    """One move that happened. `epochs_in_stage` counts the epochs spent in the stage that was left."""

    slot_id: str
    seed_id: str
    source: SeedStage
    target: SeedStage
    cause: Cause
    alpha: float
    epochs_in_stage: int
    age_epochs: int
    blueprint: str | None
    blend: str | None
    params: int
    contribution_pp: float | None
