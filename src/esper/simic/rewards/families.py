"""Points, larger is better: accuracy in percent (family "contribution"), or how far the loss has fallen ("loss")."""

from __future__ import annotations

from collections.abc import Mapping

from esper.leyline import CoalitionTable, EpochReport
from esper.simic.rewards.types import RewardConfig


def loss_points(loss: float, loss_ref: float) -> float:
    """0 at the loss of a uniform guess, 100 at no loss. Beyond twice the uniform guess, worse no longer counts."""
    return 100.0 * (loss_ref - min(loss, 2.0 * loss_ref)) / loss_ref


def family_points(table: CoalitionTable, family: str, loss_ref: float) -> Mapping[int, float]:
    """Points of every measured coalition in a family."""
    if family == "contribution":
        return table.accuracy_pct
    return {mask: loss_points(loss, loss_ref) for mask, loss in table.loss.items()}


def coalition_points(table: CoalitionTable, config: RewardConfig) -> Mapping[int, float]:
    """Points of every measured coalition, in the family of the calibration."""
    return family_points(table, config.calibration.family, config.loss_ref)


def committed_points(report: EpochReport, config: RewardConfig) -> float | None:
    """Points of the committed network; None if it was not measured."""
    if config.calibration.family == "contribution":
        return report.committed_accuracy_pct
    return None if report.committed_loss is None else loss_points(report.committed_loss, config.loss_ref)
