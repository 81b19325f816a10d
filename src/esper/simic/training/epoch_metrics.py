"""What one epoch of one env measures: which coalitions, in which columns of its totals, and the numbers they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from esper.kasmina import MorphogeneticModel
from esper.leyline import CoalitionTable, EpochScores, SeedStage, coalitions_to_measure, full_coalition, record

TRAIN_LOSS, TRAIN_CORRECT, PARAM_NORM, VALIDATION = range(4)
"""Columns of the totals. From VALIDATION on come (summed loss, correct) of each coalition, all seeds on first."""


@record
class CoalitionPlan:
    """The coalitions of one validation. Bit i of a mask enables `slot_ids[i]`; the mask with all bits comes first."""

    slot_ids: tuple[str, ...]
    masks: tuple[int, ...]
    coalitions: tuple[frozenset[str], ...]


@record
class EpochMetrics(EpochScores):
    """What one epoch measured."""

    table: CoalitionTable


def plan_coalitions(model: MorphogeneticModel) -> CoalitionPlan:
    """Which coalitions a validation of this model must cover: players are the blended seeds, fossils included."""
    players = [slot for slot in model.all_slots() if slot.stage.is_blended]
    slot_ids = tuple(slot.spec.slot_id for slot in players)
    fossils = sum(1 << i for i, slot in enumerate(players) if slot.stage is SeedStage.FOSSILIZED)
    full = full_coalition(len(players))
    masks = (full, *(mask for mask in coalitions_to_measure(len(players), fossils) if mask != full))
    coalitions = tuple(frozenset(s for i, s in enumerate(slot_ids) if mask >> i & 1) for mask in masks)
    return CoalitionPlan(slot_ids=slot_ids, masks=masks, coalitions=coalitions)


def most_coalitions(num_slots: int) -> int:
    """The most coalitions that one validation can have to cover."""
    one_fossil = 1
    return max(len(coalitions_to_measure(n, one_fossil if n else 0)) for n in range(num_slots + 1))


def measure(plan: CoalitionPlan, values: Sequence[float], *, train_rows: int, val_rows: int) -> EpochMetrics:
    """Turns the totals of an epoch into means. No rows trained: nothing was measured there."""
    count = len(plan.masks)
    losses = [total / val_rows for total in values[VALIDATION::2][:count]]
    accuracies = [100.0 * total / val_rows for total in values[VALIDATION + 1 :: 2][:count]]
    rows = sorted(zip(plan.masks, accuracies, losses, strict=True))
    return EpochMetrics(
        train_loss=values[TRAIN_LOSS] / train_rows if train_rows else None,
        train_accuracy_pct=100.0 * values[TRAIN_CORRECT] / train_rows if train_rows else None,
        val_loss=losses[0],
        val_accuracy_pct=accuracies[0],
        table=_table(plan.slot_ids, rows),
    )


def _table(slot_ids: Sequence[str], rows: Sequence[Sequence[Any]]) -> CoalitionTable:
    return CoalitionTable(
        slot_ids=tuple(slot_ids),
        accuracy_pct={mask: accuracy for mask, accuracy, _ in rows},
        loss={mask: loss for mask, _, loss in rows},
    )


def write_metrics(metrics: EpochMetrics) -> dict[str, Any]:
    """The metrics as JSON values."""
    table = metrics.table
    return {
        "train_loss": metrics.train_loss,
        "train_accuracy_pct": metrics.train_accuracy_pct,
        "val_loss": metrics.val_loss,
        "val_accuracy_pct": metrics.val_accuracy_pct,
        "slot_ids": list(table.slot_ids),
        "rows": [[mask, table.accuracy_pct[mask], table.loss[mask]] for mask in table.accuracy_pct],
    }


def read_metrics(found: Mapping[str, Any]) -> EpochMetrics:
    """Reads what `write_metrics` wrote."""
    return EpochMetrics(
        train_loss=found["train_loss"],
        train_accuracy_pct=found["train_accuracy_pct"],
        val_loss=found["val_loss"],
        val_accuracy_pct=found["val_accuracy_pct"],
        table=_table(found["slot_ids"], found["rows"]),
    )
