"""Gates open at their thresholds, close one step beyond, and stay closed on anything that was not measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    DEFAULT_LIFECYCLE,
    BlueprintCard,
    Gate,
    GateResult,
    LifecycleConfig,
    SeedStage,
    SlotReport,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_hold,
    gate_prune,
    gate_train,
)

CONFIG: LifecycleConfig = replace(
    DEFAULT_LIFECYCLE,
    min_training=2,
    harm_tolerance=0.25,
    max_residual_ratio=0.75,
    min_live_fraction=0.5,
    min_contribution=0.125,
)

GOOD = SlotReport(
    slot_id="r0c0",
    seed_id="r0c0.1",
    blueprint="mlp.mlp",
    blend="linear",
    params=9,
    solo_pp=1.0,
    interaction_pp=0.0,
    grad_ratio=1.0,
    grad_health=1.0,
    stage=SeedStage.GERMINATED,
    epochs_in_stage=2,
    age_epochs=1,
    alpha=1.0,
    ramp_complete=True,
    probe_passed=True,
    in_optimizer=True,
    train_loss=2.0,
    val_loss=2.5,
    predicted_gain=-0.5,
    residual_ratio=0.75,
    gradients_finite=True,
    live_fraction=0.5,
    contribution_pp=0.125,
    contribution_alpha=1.0,
    contribution_topology=3,
    topology_version=3,
)
"""Every value sits exactly on its limit; only the stage has to be set."""

GateFunction = Callable[[SlotReport, LifecycleConfig], GateResult]
GATES: dict[Gate, tuple[GateFunction, set[SeedStage], set[str]]] = {
    Gate.TRAIN: (gate_train, {SeedStage.GERMINATED}, {"probe_passed", "in_optimizer"}),
    Gate.BLEND: (
        gate_blend,
        {SeedStage.TRAINING},
        {"epochs_in_stage", "predicted_gain", "train_loss", "residual_ratio", "gradients_finite", "live_fraction"},
    ),
    Gate.HOLD: (gate_hold, {SeedStage.BLENDING}, {"alpha", "ramp_complete", "train_loss", "val_loss"}),
    Gate.FOSSILIZE: (
        gate_fossilize,
        {SeedStage.HOLDING},
        {"contribution_pp", "contribution_alpha", "contribution_topology", "train_loss", "val_loss"},
    ),
    Gate.PRUNE: (gate_prune, {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING}, {"age_epochs"}),
}
READS = [(gate, field) for gate, (_, _, fields) in GATES.items() for field in sorted(fields)]
FLAGS = {"probe_passed", "in_optimizer", "ramp_complete", "gradients_finite"}


def at(gate: Gate, **changes: object) -> GateResult:
    function, stages, _ = GATES[gate]
    return function(replace(GOOD, stage=min(stages), **changes), CONFIG)  # type: ignore[arg-type]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("stage", SeedStage)
def test_a_gate_opens_in_its_stages_only(gate: Gate, stage: SeedStage) -> None:
    function, stages, _ = GATES[gate]
    result = function(replace(GOOD, stage=stage), CONFIG)
    assert result.gate is gate
    assert result.passed == (stage in stages)


@pytest.mark.parametrize(("gate", "field"), READS)
def test_what_was_not_measured_closes_the_gate(gate: Gate, field: str) -> None:
    assert at(gate).passed
    result = at(gate, **{field: None})
    assert not result.passed
    if field not in ("alpha", "ramp_complete"):  # these two are facts of the slot, never unmeasured
        assert "unmeasured:" in result.reasons


@pytest.mark.parametrize(("gate", "field"), [(g, f) for g, f in READS if f not in FLAGS])
def test_not_a_number_closes_the_gate(gate: Gate, field: str) -> None:
    assert not at(gate, **{field: math.nan}).passed


@pytest.mark.parametrize(("gate", "field"), [(g, f) for g, f in READS if f in FLAGS])
def test_a_false_fact_closes_the_gate(gate: Gate, field: str) -> None:
    result = at(gate, **{field: False})
    assert not result.passed
    assert field in result.reasons


@pytest.mark.parametrize(
    ("gate", "field", "beyond"),
    [
        (Gate.BLEND, "epochs_in_stage", 1),
        (Gate.BLEND, "predicted_gain", math.nextafter(-0.5, -math.inf)),
        (Gate.BLEND, "train_loss", math.nextafter(2.0, 0.0)),
        (Gate.BLEND, "residual_ratio", math.nextafter(0.75, 1.0)),
        (Gate.BLEND, "live_fraction", math.nextafter(0.5, 0.0)),
        (Gate.HOLD, "alpha", math.nextafter(1.0, 0.0)),
        (Gate.HOLD, "alpha", math.nextafter(1.0, 2.0)),
        (Gate.HOLD, "train_loss", math.inf),
        (Gate.HOLD, "val_loss", math.inf),
        (Gate.FOSSILIZE, "contribution_pp", math.nextafter(0.125, 0.0)),
        (Gate.FOSSILIZE, "contribution_alpha", math.nextafter(1.0, 0.0)),
        (Gate.FOSSILIZE, "contribution_topology", 2),
        (Gate.FOSSILIZE, "train_loss", math.inf),
        (Gate.FOSSILIZE, "val_loss", -math.inf),
        (Gate.PRUNE, "age_epochs", 0),
    ],
)
def test_one_step_beyond_the_limit_closes_the_gate(gate: Gate, field: str, beyond: float) -> None:
    assert at(gate).passed
    assert not at(gate, **{field: beyond}).passed


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_reads_nothing_but_its_own_fields(gate: Gate) -> None:
    _, _, reads = GATES[gate]
    also = {"topology_version"} if gate is Gate.FOSSILIZE else set()
    others = set(SlotReport.__dataclass_fields__) - reads - also - {"stage"}
    assert at(gate, **dict.fromkeys(others)).passed


def test_an_infinite_loss_does_not_excuse_any_harm() -> None:
    assert not at(Gate.BLEND, train_loss=math.inf, predicted_gain=-1e30).passed


# ---- G0

CARD = BlueprintCard(
    blueprint="cnn.conv",
    params=70,
    params_ratio=0.5,
    macs=10,
    macs_ratio=0.1,
    mixing="local",
    nonlinear=True,
    gate_params=30,
    fits=True,
)


def germination(**changes: object) -> bool:
    facts: dict[str, object] = {
        "stage": SeedStage.DORMANT,
        "card": CARD,
        "operator": "gate",
        "num_live": 2,
        "total_params": 900,
        "config": replace(CONFIG, max_live=3, param_budget=1000),
    }
    return gate_germinate(**(facts | changes)).passed  # type: ignore[arg-type]


def test_germination_is_legal_up_to_the_budget_and_the_number_of_live_seeds() -> None:
    assert germination()
    assert not germination(total_params=901)
    assert germination(total_params=930, operator="add")
    assert not germination(total_params=931, operator="add")
    assert not germination(num_live=3)
    assert not germination(card=replace(CARD, fits=False))
    assert germination(total_params=10**9, config=replace(CONFIG, max_live=3, param_budget=None))


@given(st.sampled_from(SeedStage))
def test_germination_needs_an_empty_slot(stage: SeedStage) -> None:
    assert germination(stage=stage) == (stage is SeedStage.DORMANT)


def test_the_reasons_name_value_and_limit() -> None:
    result = at(Gate.BLEND, residual_ratio=7.0, live_fraction=None)
    assert result.reasons == "residual_ratio (got 7.0, limit 0.75), unmeasured:live_fraction (got None, limit 0.5)"


# ---- limits


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("min_training", 0),
        ("embargo", 0),
        ("max_live", 0),
        ("param_budget", 0),
        ("rho", 0.0),
        ("rho", math.nan),
        ("eta_decay", 1.0),
        ("eta_decay", -0.1),
        ("harm_tolerance", -0.1),
        ("max_residual_ratio", 0.0),
        ("min_live_fraction", 1.1),
        ("min_contribution", math.nan),
        ("clip_norm", 0.0),
    ],
)
def test_limits_out_of_range_are_refused_by_name(field: str, bad: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(DEFAULT_LIFECYCLE, **{field: bad})
