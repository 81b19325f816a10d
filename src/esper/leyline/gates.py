"""The gates: pure functions from evidence to a verdict, called by the model and by the action masks alike.

Gates guard safety; choosing good seeds is the controller's work. A value that was not measured (None) or is not a
number fails its check, so nothing moves on missing evidence.
"""

from __future__ import annotations

import math

from esper.leyline.record import record
from esper.leyline.slots import BlueprintCard, SlotReport
from esper.leyline.stages import Gate, SeedStage


@record
class LifecycleConfig:
    """Limits of growth for one task. The defaults were measured to work on the bundled digits tasks."""

    min_training: int
    """Epochs a seed trains behind the host before it may be blended in."""
    embargo: int
    """Epochs a slot rests after a prune."""
    max_live: int
    """Seeds that may be alive (neither kept nor gone) at once. Three keep the coalition table exact."""
    param_budget: int | None
    """Most parameters the host and all its seeds may have together; None for no limit."""
    rho: float
    """Size of a training seed's output relative to the features it reads."""
    eta_decay: float
    """Smoothing of the step size of the seed objective."""
    harm_tolerance: float
    """Predicted loss increase that still lets a seed blend, as a share of the training loss."""
    max_residual_ratio: float
    """Largest seed output relative to its features at which blending may start."""
    min_live_fraction: float
    """Share of a seed's tensors that must receive gradient."""
    min_contribution: float
    """Points a held seed must bring to be kept."""
    clip_norm: float
    """Gradient norm limit of each parameter group."""

    def __post_init__(self) -> None:
        _at_least("min_training", self.min_training, 1)
        _at_least("embargo", self.embargo, 1)
        _at_least("max_live", self.max_live, 1)
        if self.param_budget is not None:
            _at_least("param_budget", self.param_budget, 1)
        _inside("rho", self.rho, 0.0, 10.0)
        if not 0.0 <= self.eta_decay < 1.0:
            raise ValueError(f"eta_decay must be in [0, 1), got {self.eta_decay}")
        _at_least("harm_tolerance", self.harm_tolerance, 0.0)
        _inside("max_residual_ratio", self.max_residual_ratio, 0.0, math.inf)
        if not 0.0 <= self.min_live_fraction <= 1.0:
            raise ValueError(f"min_live_fraction must be in [0, 1], got {self.min_live_fraction}")
        if not math.isfinite(self.min_contribution):
            raise ValueError(f"min_contribution must be a finite number of points, got {self.min_contribution}")
        _inside("clip_norm", self.clip_norm, 0.0, math.inf)


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


def _inside(name: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise ValueError(f"{name} must be in ({low}, {high}], got {value}")


DEFAULT_LIFECYCLE = LifecycleConfig(
    min_training=1,
    embargo=3,
    max_live=3,
    param_budget=None,
    rho=0.3,
    eta_decay=0.9,
    harm_tolerance=0.02,
    max_residual_ratio=1.0,
    min_live_fraction=0.5,
    min_contribution=0.0,
    clip_norm=1.0,
)


@record
class Check:
    """One comparison inside a gate."""

    name: str
    passed: bool
    value: float | None = None
    limit: float


@record
class GateResult:
    """The verdict of a gate and the checks behind it."""

    gate: Gate
    passed: bool
    checks: tuple[Check, ...]

    @property
    def reasons(self) -> str:
        """The failed checks, for error messages."""
        return ", ".join(f"{c.name} (got {c.value}, limit {c.limit})" for c in self.checks if not c.passed)


def _result(gate: Gate, *checks: Check) -> GateResult:
    return GateResult(gate=gate, passed=all(check.passed for check in checks), checks=checks)


def _check(name: str, value: float | None, limit: float, passed: bool) -> Check:
    return Check(name=name, passed=passed, value=value, limit=limit)


def _least(name: str, value: float | None, limit: float | None) -> Check:
    """Checks value >= limit. Fails as unmeasured when either side is missing."""
    if value is None or limit is None:
        return Check(name=f"unmeasured:{name}", passed=False, value=value, limit=math.nan if limit is None else limit)
    return _check(name, value, limit, value >= limit)


def _most(name: str, value: float | None, limit: float) -> Check:
    if value is None:
        return Check(name=f"unmeasured:{name}", passed=False, value=None, limit=limit)
    return _check(name, value, limit, value <= limit)


def _true(name: str, value: bool | None) -> Check:
    if value is None:
        return Check(name=f"unmeasured:{name}", passed=False, value=None, limit=1.0)
    return _check(name, float(value), 1.0, value)


def _finite(name: str, value: float | None) -> Check:
    return _true(name, None if value is None else math.isfinite(value))


def _stage(slot: SlotReport, *wanted: SeedStage) -> Check:
    return _check("stage", float(slot.stage), float(wanted[0]), slot.stage in wanted)


def gate_germinate(
    stage: SeedStage, card: BlueprintCard, operator: str, num_live: int, total_params: int, config: LifecycleConfig
) -> GateResult:
    """G0: may a seed of this blueprint be planted in this slot, to be blended by this operator?"""
    budget = math.inf if config.param_budget is None else config.param_budget
    return _result(
        Gate.GERMINATE,
        _check("stage", float(stage), float(SeedStage.DORMANT), stage is SeedStage.DORMANT),
        _true("fits", card.fits),
        _check("live_seeds", num_live, config.max_live - 1, num_live < config.max_live),
        _most("params_after", total_params + card.added_params(operator), budget),
    )


def gate_train(slot: SlotReport, config: LifecycleConfig) -> GateResult:
    """G1: is the new seed an exact identity on real features, and will the optimizer train it?"""
    return _result(
        Gate.TRAIN,
        _stage(slot, SeedStage.GERMINATED),
        _true("probe_passed", slot.probe_passed),
        _true("in_optimizer", slot.in_optimizer),
    )


def gate_blend(slot: SlotReport, config: LifecycleConfig) -> GateResult:
    """G2: is it safe to let the seed change the output?"""
    loss = slot.train_loss
    return _result(
        Gate.BLEND,
        _stage(slot, SeedStage.TRAINING),
        _least("epochs_in_stage", slot.epochs_in_stage, config.min_training),
        _finite("train_loss", loss),
        _least("predicted_gain", slot.predicted_gain, None if loss is None else -config.harm_tolerance * loss),
        _most("residual_ratio", slot.residual_ratio, config.max_residual_ratio),
        _true("gradients_finite", slot.gradients_finite),
        _least("live_fraction", slot.live_fraction, config.min_live_fraction),
    )


def gate_hold(slot: SlotReport, config: LifecycleConfig) -> GateResult:
    """G3: is the seed fully blended and the network sane?"""
    return _result(
        Gate.HOLD,
        _stage(slot, SeedStage.BLENDING),
        _check("alpha", slot.alpha, 1.0, slot.alpha == 1.0),
        _true("ramp_complete", slot.ramp_complete),
        _finite("train_loss", slot.train_loss),
        _finite("val_loss", slot.val_loss),
    )


def gate_fossilize(slot: SlotReport, config: LifecycleConfig) -> GateResult:
    """G4: was the held seed measured as it stands, and does it bring enough to keep?"""
    version = slot.contribution_topology
    return _result(
        Gate.FOSSILIZE,
        _stage(slot, SeedStage.HOLDING),
        _least("contribution", slot.contribution_pp, config.min_contribution),
        _least("contribution_alpha", slot.contribution_alpha, 1.0),
        _true("contribution_current", None if version is None else version == slot.topology_version),
        _finite("train_loss", slot.train_loss),
        _finite("val_loss", slot.val_loss),
    )


def gate_prune(slot: SlotReport, config: LifecycleConfig) -> GateResult:
    """GP: is there a live seed that has had at least one epoch?"""
    return _result(
        Gate.PRUNE,
        _stage(slot, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING),
        _least("age_epochs", slot.age_epochs, 1),
    )
