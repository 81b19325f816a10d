"""What happened while a model grew, in the user's own units: epoch by epoch, and seed by seed."""

from __future__ import annotations

from collections.abc import Iterable

from esper.evidence.host_runs import PlantedSeed
from esper.leyline import SeedStage, SlotTransition, record


@record
class GrowthMove:
    """One move of a seed."""

    epoch: int
    """From 0; a move between two epochs belongs to the later one."""
    site: str
    move: SlotTransition

    def __str__(self) -> str:
        """In words."""
        move = self.move
        what = {
            SeedStage.GERMINATED: f"planted {move.blueprint} ({move.params:,} parameters, {move.blend})",
            SeedStage.TRAINING: "trains behind the model",
            SeedStage.BLENDING: "starts to blend in",
            SeedStage.HOLDING: "is fully blended",
            SeedStage.FOSSILIZED: f"kept {move.blueprint}",
            SeedStage.PRUNED: f"removed {move.blueprint}",
            SeedStage.EMBARGOED: "rests",
            SeedStage.DORMANT: "is free again",
        }[move.target]
        settled = move.target in (SeedStage.FOSSILIZED, SeedStage.PRUNED) and move.contribution_pp is not None
        return f"{self.site}  {what}" + (f", worth {move.contribution_pp:+.1f} points" if settled else "")


@record
class GrowthEpoch:
    """One epoch. Metrics and losses are the user's; None: not measured."""

    epoch: int
    train_loss: float | None
    metric: float
    """Of the model with all its seeds, on validation data."""
    loss: float
    committed_metric: float | None
    """Of the model with only the seeds that are kept: what would be delivered now."""
    committed_loss: float | None
    params: int
    committed_params: int
    stages: tuple[SeedStage, ...]
    """Of every slot, in execution order."""
    rolled_back: str | None
    """Why the model was set back to its last healthy state after this epoch."""
    learning_rate: float
    """Of the first parameter group."""
    train_s: float
    validate_s: float


@record
class SeedLife(PlantedSeed):
    """One seed of the user's model from planting to its end."""

    seed_id: str
    site: str
    worth: float | None = None
    """What the metric loses when this seed alone is switched off at the end, positive if it helps; None if it was not
    kept. Being missed is not the same as having helped: receipts measure that."""


def seed_lives(moves: Iterable[GrowthMove]) -> tuple[SeedLife, ...]:
    """Every seed that was planted, in order."""
    epochs: dict[str, dict[SeedStage, int]] = {}
    planted: dict[str, GrowthMove] = {}
    for entry in moves:
        if entry.move.target is SeedStage.GERMINATED:
            planted[entry.move.seed_id] = entry
        epochs.setdefault(entry.move.seed_id, {}).setdefault(entry.move.target, entry.epoch)
    return tuple(_life(seed_id, entry, epochs[seed_id]) for seed_id, entry in planted.items())


def _life(seed_id: str, planted: GrowthMove, epochs: dict[SeedStage, int]) -> SeedLife:
    assert planted.move.blueprint is not None
    assert planted.move.blend is not None
    return SeedLife(
        seed_id=seed_id,
        slot=planted.move.slot_id,
        site=planted.site,
        blueprint=planted.move.blueprint,
        blend=planted.move.blend,
        params=planted.move.params,
        planted=planted.epoch,
        blended=epochs.get(SeedStage.BLENDING),
        kept=epochs.get(SeedStage.FOSSILIZED),
        pruned=epochs.get(SeedStage.PRUNED),
    )
