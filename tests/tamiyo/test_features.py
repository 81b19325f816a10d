"""The observation: named columns, honest flags, no scale of host or task, finite whatever happens."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import GovernorState, LifecycleOp, SeedStage
from esper.tamiyo.features import (
    CARD_COLUMNS,
    GLOBAL_COLUMNS,
    SLOT_COLUMNS,
    Column,
    EnvView,
    FeatureContext,
    card_rows,
    global_row,
    slot_rows,
    symlog,
)
from esper.tamiyo.masks import masks
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import Step, act_on, germinate, play, random_chooser, script_chooser, world


def context(spec: SimulationSpec) -> FeatureContext:
    return FeatureContext(layout=spec.layout, lifecycle=spec.lifecycle, num_classes=spec.num_classes)


def view(spec: SimulationSpec, step: Step) -> EnvView:
    found = masks(step.after, spec.layout, spec.lifecycle)
    return EnvView(report=step.after, masks=found, previous=step.before, outcome=step.outcome, context=context(spec))


def reset_view(spec: SimulationSpec, step: Step) -> EnvView:
    return EnvView(report=step.before, masks=step.masks, previous=None, outcome=None, context=context(spec))


def named(columns: tuple[Column, ...], row: tuple[float, ...]) -> dict[str, float]:
    return dict(zip([column.name for column in columns], row, strict=True))


def global_named(env_view: EnvView) -> dict[str, float]:
    return named(GLOBAL_COLUMNS, global_row(env_view))


def slot_named(env_view: EnvView, slot: int) -> dict[str, float]:
    return named(SLOT_COLUMNS, slot_rows(env_view)[slot])


KEEP = [
    (0, germinate("r0c0", "good")),
    (1, act_on(LifecycleOp.ADVANCE, "r0c0")),
    (4, act_on(LifecycleOp.FOSSILIZE, "r0c0")),
]


@pytest.mark.parametrize("columns", [GLOBAL_COLUMNS, SLOT_COLUMNS, CARD_COLUMNS])
def test_column_names_are_unique(columns: tuple[Column, ...]) -> None:
    names = [column.name for column in columns]
    assert len(set(names)) == len(names)


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_rows_fill_their_columns_with_finite_numbers_and_flags_are_zero_or_one(seed: int) -> None:
    spec = world(noise_pp=1.0)
    steps = play(spec, random_chooser(random.Random(seed)))
    for env_view in [reset_view(spec, steps[0]), *(view(spec, step) for step in steps)]:
        for columns, rows in ((GLOBAL_COLUMNS, [global_row(env_view)]), (SLOT_COLUMNS, slot_rows(env_view))):
            for row in rows:
                assert len(row) == len(columns)
                assert all(math.isfinite(value) for value in row)
                flags = [value for column, value in zip(columns, row, strict=True) if not column.normalised]
                assert set(flags) <= {0.0, 1.0}
        for slot, row in zip(env_view.report.slots, slot_rows(env_view), strict=True):
            stage = named(SLOT_COLUMNS, row)
            assert [name for name in stage if name.startswith("stage_") and stage[name]] == [
                f"stage_{slot.stage.name.lower()}"
            ]


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_what_was_not_measured_reads_zero_with_flag_zero(seed: int) -> None:
    spec = world()
    for step in play(spec, random_chooser(random.Random(seed))):
        env_view = view(spec, step)
        for i, slot in enumerate(step.after.slots):
            row = slot_named(env_view, i)
            assert row["contribution_measured"] == (slot.contribution_pp is not None)
            assert row["predicted_gain_measured"] == (slot.stage is SeedStage.TRAINING)
            for name in row:
                if name.endswith("_measured") and not row[name]:
                    assert row[name.removesuffix("_measured")] == 0.0


def test_a_loss_that_is_not_a_number_is_not_measured() -> None:
    spec = world()
    step = play(spec, script_chooser([]))[0]
    row = global_named(view(spec, replace(step, after=replace(step.after, train_loss=math.nan, val_loss=math.inf))))
    assert row["train_loss_measured"] == row["val_loss_measured"] == 0.0
    assert row["train_loss"] == row["val_loss"] == 0.0


def test_global_values_are_what_their_names_say() -> None:
    spec = world()
    steps = play(spec, script_chooser(KEEP))
    row = global_named(view(spec, steps[4]))
    after, before = steps[4].after, steps[4].before
    assert row["time_share"] == 0.5
    assert row["time_left_share"] == 0.5
    assert row["val_score"] == pytest.approx((after.val_accuracy_pct - 10.0) / 90.0)
    assert row["val_score_delta_0"] == pytest.approx((after.val_accuracy_pct - before.val_accuracy_pct) / 90.0)
    assert row["val_loss"] == pytest.approx(symlog(after.val_loss / math.log(10)))
    assert row["generalisation_gap"] == pytest.approx(1.0 / 90.0)
    assert row["size_log2"] == pytest.approx(math.log2(1.5))
    assert row["empty_slots_share"] == pytest.approx(2 / 3)
    assert row["last_op_fossilize"] == row["last_op_applied"] == 1.0
    assert row["last_op_wait"] == 0.0
    assert row["budget_left_share_measured"] == 0.0


def test_the_budget_is_seen_where_there_is_one() -> None:
    spec = world()
    spec = replace(spec, lifecycle=replace(spec.lifecycle, param_budget=2000))
    row = global_named(view(spec, play(spec, script_chooser(KEEP))[4]))
    assert row["budget_left_share"] == 0.25
    assert row["budget_left_share_measured"] == 1.0


def test_slot_values_are_what_their_names_say() -> None:
    spec = world()
    steps = play(spec, script_chooser(KEEP))
    training, blending, holding, kept = (slot_named(view(spec, steps[t]), 0) for t in (0, 1, 3, 4))
    assert training["stage_training"] == training["may_advance"] == 1.0
    assert training["seed_params"] == pytest.approx(math.log1p(0.5))
    assert training["seed_mixing_local"] == 1.0
    assert blending["alpha"] == pytest.approx(1 / 3)
    assert blending["ramp_left_share"] == pytest.approx(2 / 3)
    assert blending["contribution_change_measured"] == 0.0
    assert holding["may_fossilize"] == 1.0
    assert holding["contribution"] == pytest.approx(steps[3].after.slots[0].contribution_pp / 10.0)
    assert holding["contribution_change_measured"] == 1.0
    assert kept["stage_fossilized"] == 1.0
    assert kept["may_fossilize"] == kept["may_advance"] == 0.0


def test_a_new_seed_does_not_inherit_the_change_of_the_last_one() -> None:
    spec = world(horizon=20)
    steps = play(spec, script_chooser(KEEP))
    same, other = steps[4], steps[4]
    slots = list(other.before.slots)
    slots[0] = replace(slots[0], seed_id="0.0.r0c0.9")
    other = replace(other, before=replace(other.before, slots=tuple(slots)))
    assert slot_named(view(spec, same), 0)["contribution_change_measured"] == 1.0
    assert slot_named(view(spec, other), 0)["contribution_change_measured"] == 0.0


def test_suspicion_is_seen() -> None:
    spec = world()
    step = play(spec, script_chooser([]))[0]
    suspect = replace(step, after=replace(step.after, governor_state=GovernorState.SUSPECT))
    assert global_named(view(spec, step))["governor_suspect"] == 0.0
    assert global_named(view(spec, suspect))["governor_suspect"] == 1.0


def test_the_observation_has_no_scale_of_the_host() -> None:
    """Ten times the parameters and twice the epochs of life: the same shares, the same row."""
    small = world()
    blueprints = tuple(replace(blueprint, params=5000) for blueprint in small.blueprints)
    large = replace(small, host_params=10_000, blueprints=blueprints)
    for one, ten in zip(play(small, script_chooser(KEEP)), play(large, script_chooser(KEEP)), strict=True):
        assert global_row(view(small, one)) == pytest.approx(global_row(view(large, ten)))
        assert slot_rows(view(small, one)) == tuple(pytest.approx(row) for row in slot_rows(view(large, ten)))


def test_cards_are_rows_per_slot_and_blueprint() -> None:
    spec = world()
    rows = card_rows(spec.layout)
    assert len(rows) == 3
    assert {len(row) for row in rows} == {4}
    card = named(CARD_COLUMNS, rows[1][0])
    assert card["params"] == pytest.approx(math.log1p(0.5))
    assert card["mixing_local"] == card["nonlinear"] == card["fits"] == 1.0
    assert card["mixing_none"] == card["mixing_global"] == 0.0


@given(st.floats(-1e6, 1e6))
def test_symlog_keeps_the_sign_and_the_order(x: float) -> None:
    assert symlog(-x) == -symlog(x)
    assert abs(symlog(x)) <= abs(x)
    assert symlog(x + 1.0) > symlog(x)
