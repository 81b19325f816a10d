"""What a reward is computed from and what comes out: configuration, points, inputs, components.

Points are larger-is-better in both families; a score is points above the calibrated floor in units of the span.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

from esper.leyline import ActionOutcome, CoalitionTable, EpochReport, LifecycleConfig, LifecycleOp, record

FAMILY_NAMES: tuple[str, ...] = ("contribution", "loss")
MIN_SPAN = 5.0
"""Points. A saturated host must not turn validation noise into reward."""
MIN_CALIBRATION_RUNS = 5
MAX_WEIGHT = 1e30
"""Rewards are learned from in single precision."""


@record
class Calibration:
    """The scale of one (task, host, optimizer, horizon, split), in points of its family."""

    family: str
    """Which validation metric becomes points: "contribution" reads accuracy, "loss" reads the loss."""
    floor: float
    """Final points of a host that only waits: score 0."""
    ceiling: float
    """Final points with every slot filled from the start: score 1."""
    reference: tuple[float, ...] | None
    """Points of a waiting host after 0, 1, ... T epochs; None where nobody measured them."""

    def __post_init__(self) -> None:
        if self.family not in FAMILY_NAMES:
            raise ValueError(f"family must be one of {', '.join(FAMILY_NAMES)}, got {self.family!r}")
        if not all(map(math.isfinite, (self.floor, self.ceiling, *(self.reference or ())))):
            raise ValueError("the points of a scale must be finite")

    @property
    def span(self) -> float:
        """Points that are worth a score of 1."""
        return max(self.ceiling - self.floor, MIN_SPAN)


def uncalibrated(family: str, num_classes: int) -> Calibration:
    """The scale from a uniform guess to no error, for tasks that have not been calibrated."""
    floor = 100.0 / num_classes if family == "contribution" else 0.0
    return Calibration(family=family, floor=floor, ceiling=100.0, reference=None)


def calibrate(family: str, waiting_curves: Sequence[Sequence[float]], filled_finals: Sequence[float]) -> Calibration:
    """Measures the scale from finished runs.

    Args:
        family: Family the points belong to.
        waiting_curves: Per run seed, points of a waiting host after 0, 1, ... T epochs.
        filled_finals: Per run seed, final points with every slot filled from the start.

    Raises:
        ValueError: Too few runs, or curves of different lengths.
    """
    if min(len(waiting_curves), len(filled_finals)) < MIN_CALIBRATION_RUNS:
        raise ValueError(
            f"calibration needs at least {MIN_CALIBRATION_RUNS} runs of each kind, "
            f"got {len(waiting_curves)} waiting and {len(filled_finals)} filled"
        )
    if len({len(curve) for curve in waiting_curves}) != 1:
        raise ValueError(f"waiting curves differ in length: {sorted({len(curve) for curve in waiting_curves})}")
    reference = tuple(math.fsum(column) / len(column) for column in zip(*waiting_curves, strict=True))
    ceiling = math.fsum(filled_finals) / len(filled_finals)
    return Calibration(family=family, floor=reference[-1], ceiling=ceiling, reference=reference)


@record
class RewardWeights:
    """Prices in score units, so that an episode is worth about -0.5 to 1 on any calibrated task."""

    terminal: float = 1.0
    """Per score of the committed network at the end."""
    size: float = 0.05
    """Per doubling of the host by fossils."""
    credit: float = 1.0
    """Per score of measured credit, paid in advance and settled at the end."""
    rent: float = 0.01
    """Per episode and doubling of the host by seeds."""
    shock: float = 0.02
    """Per squared jump of a seed's alpha."""
    commit: float = 0.2
    """Per score of credit, for keeping a seed."""
    rollback: float = 2.0
    """Cost of an episode that ends in a rollback."""
    germinate: float = 0.01
    prune: float = 0.005
    advance: float = 0.002

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value <= MAX_WEIGHT:
                raise ValueError(f"reward weight {field.name} must be at least 0 and at most 1e30, got {value}")

    def cost(self, op: LifecycleOp) -> float:
        """Price of taking an op. Waiting and keeping a seed are free."""
        costs = {
            LifecycleOp.GERMINATE: self.germinate,
            LifecycleOp.PRUNE: self.prune,
            LifecycleOp.ADVANCE: self.advance,
        }
        return costs.get(op, 0.0)


@record
class RewardConfig:
    """All that the terms need besides the transition."""

    horizon: int
    gamma: float
    """The discount of the dense differences: the one PPO uses, or they stop cancelling."""
    calibration: Calibration
    lifecycle: LifecycleConfig
    loss_ref: float
    """Loss of a uniform guess, ln(classes or vocabulary)."""
    weights: RewardWeights = RewardWeights()

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"horizon must be at least 1 epoch, got {self.horizon}")
        if not 0.0 < self.gamma <= 1.0:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")
        if not self.loss_ref > 0.0:
            raise ValueError(f"loss_ref must be above 0, got {self.loss_ref}")
        reference = self.calibration.reference
        if reference is not None and len(reference) != self.horizon + 1:
            raise ValueError(
                f"the reference curve needs horizon + 1 = {self.horizon + 1} values, got {len(reference)}; "
                "calibrate again for this horizon"
            )

    def reference_points(self, epochs_done: int) -> float | None:
        """Points of a waiting host at that age, if calibrated."""
        reference = self.calibration.reference
        return None if reference is None else reference[epochs_done]


# ---- points: accuracy in percent (family "contribution"), or how far the loss has fallen ("loss")


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


MIN_TERMINAL_DISCOUNT = 0.7
"""Least gamma ** horizon. Below it, growing late beats growing early only because costs can be postponed."""


def default_gamma(horizon: int) -> float:
    """A discount that keeps gamma ** horizon at or above MIN_TERMINAL_DISCOUNT."""
    return 0.995 if horizon <= 70 else 1.0 - 0.35 / horizon


@record
class SlotLedger:
    """What is remembered about one seed."""

    seed_id: str
    best_without: float | None
    """Best points the network reached without this seed since it was planted."""
    recent: tuple[float, ...]
    """The last three marks, oldest first."""
    credit: float
    """Points this seed is credited with now."""
    marked_epoch: int | None
    """Epoch of the last mark; None before the first."""
    commit_epoch: int | None


@record
class Ledger:
    """One env's memory for rewards. Replaced every step, never changed."""

    slots: Mapping[str, SlotLedger]
    """By slot id, for slots that hold a seed."""
    best_bare: float | None
    """Best points with every seed switched off, since all slots were last empty."""

    def credit(self, slot_id: str) -> float:
        """Credit of the seed in a slot; 0 in an empty one."""
        return self.slots[slot_id].credit if slot_id in self.slots else 0.0


@record
class RewardInputs:
    """One transition (s, a, s') with the memory on both sides of it."""

    before: EpochReport
    outcome: ActionOutcome
    after: EpochReport
    ledger: Ledger
    ledger_after: Ledger
    config: RewardConfig

    @property
    def rolled_back(self) -> bool:
        """True if this transition ended the episode by a rollback."""
        return self.after.terminal and self.after.rollback_reason is not None

    @property
    def finished(self) -> bool:
        """True if this transition completed the episode."""
        return self.after.terminal and self.after.rollback_reason is None


@record
class RewardComponentsTelemetry:
    """Signed amounts by term, in the order of the mode, zeros included. The reward is their sum."""

    amounts: Mapping[str, float]

    @property
    def total(self) -> float:
        """The reward."""
        return math.fsum(self.amounts.values())
