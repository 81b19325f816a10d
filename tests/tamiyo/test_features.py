"""The observation: named columns, honest flags, no scale of host or task, finite whatever happens."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import EpochReport, FeatureContext, GovernorState, LifecycleOp, SeedStage
from esper.tamiyo.features import (
    CARD_COLUMNS,
    GLOBAL_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Column,
    EnvView,
    card_rows,
    global_row,
    offer_rows,
    slot_rows,
    symlog,
)
from esper.tamiyo.masks import masks
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import Step, act_on, germinate, play, random_chooser, script_chooser, world


def context(spec: SimulationSpec) -> FeatureContext:
    return replace(spec.context, train_rows=640, steps_per_epoch=10)


def view(spec: SimulationSpec, step: Step) -> EnvView:
    found = masks(step.after, spec.layout, spec.lifecycle)
    return EnvView(
        report=step.after,
        signals=step.after.signals,
        slots=step.after.slots,
        masks=found,
        previous=step.before,
        outcome=step.outcome,
        context=context(spec),
    )


def reset_view(spec: SimulationSpec, step: Step) -> EnvView:
    return EnvView(
        report=step.before,
        signals=step.before.signals,
        slots=step.before.slots,
        masks=step.masks,
        previous=None,
        outcome=None,
        context=context(spec),
    )


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


def reported(spec: SimulationSpec) -> EnvView:
    """A state, and the one before it, of which every number is another and so is every change."""
    step = play(spec, script_chooser(KEEP))[2]
    seed = replace(
        step.after.slots[0],
        epochs_in_stage=2,
        age_epochs=3,
        contribution_pp=4.0,
        solo_pp=-5.0,
        interaction_pp=6.0,
        predicted_gain=-0.7,
        residual_ratio=0.8,
        grad_ratio=9.0,
        live_fraction=0.95,
    )
    before = replace(
        step.before,
        train_loss=2.5,
        val_loss=2.25,
        slots=(replace(step.before.slots[0], contribution_pp=1.5), *step.before.slots[1:]),
    )
    after = replace(
        step.after,
        train_loss=2.0,
        val_loss=1.5,
        train_accuracy_pct=73.0,
        val_accuracy_pct=64.0,
        committed_accuracy_pct=46.0,
        signals=replace(
            step.after.signals, recent_accuracies_pct=(37.0, 46.0, 64.0, 55.0), plateau_epochs=4, stable=True
        ),
        slots=(seed, *step.after.slots[1:]),
    )
    return replace(view(spec, replace(step, before=before, after=after)), outcome=replace(step.outcome, applied=False))


def test_every_number_of_a_report_stands_in_its_own_column() -> None:
    spec = world()
    spec = replace(spec, lifecycle=replace(spec.lifecycle, param_budget=2000))
    nats = math.log(10)
    expected = {
        "time_share": 0.3,
        "time_left_share": 0.7,
        "val_score": 0.6,
        "val_score_delta_0": -0.1,
        "val_score_delta_1": 0.2,
        "val_score_delta_2": 0.1,
        "train_loss": symlog(2.0 / nats),
        "train_loss_delta": symlog(2.0 / nats) - symlog(2.5 / nats),
        "val_loss": symlog(1.5 / nats),
        "val_loss_delta": symlog(1.5 / nats) - symlog(2.25 / nats),
        "generalisation_gap": 0.1,
        "plateau_share": 0.4,
        "stable": 1.0,
        "committed_minus_current": -0.2,
        "size_log2": math.log2(1.5),
        "budget_left_share": 0.25,
        "budget_log2": 1.0,
        "host_params_log2": math.log2(1000),
        "classes_log2": math.log2(10),
        "train_rows_log2": math.log2(640),
        "steps_per_epoch_log2": math.log2(10),
        "horizon_log2": math.log2(10),
        "live_share": 1.0 / spec.lifecycle.max_live,
        "empty_slots_share": 2.0 / 3.0,
        "last_op_wait": 1.0,
    }
    missing = {"val_score_delta_3"}
    assert spec.lifecycle.max_live > 1
    assert global_named(reported(spec)) == pytest.approx(with_flags(GLOBAL_COLUMNS, expected, missing))


def test_every_number_of_a_slot_stands_in_its_own_column() -> None:
    spec = world()
    expected = {
        "stage_blending": 1.0,
        "alpha": 2.0 / 3.0,
        "epochs_in_stage_share": 0.2,
        "age_share": 0.3,
        "ramp_left_share": 1.0 / 3.0,
        "contribution": 0.4,
        "contribution_change": 0.25,
        "solo": -0.5,
        "interaction": 0.6,
        "predicted_gain": symlog(-0.7 / math.log(10)),
        "residual_ratio": 0.8,
        "grad_ratio": math.log1p(9.0),
        "live_fraction": 0.95,
        "seed_params": math.log1p(0.5),
        "seed_macs": math.log1p(0.25),
        "seed_mixing_global": 1.0,
        "depth_share": 0.125,
        "channels_log2": 5.0,
        "positions_log2": 6.0,
        "host_mixing_before_local": 1.0,
        "host_mixing_after_global": 1.0,
    }
    env_view = reported(spec)
    layout = env_view.context.layout
    card = replace(layout.card("r0c0", "good"), macs_ratio=0.25, mixing="global", nonlinear=False)
    place = replace(layout.slots[0], depth_share=0.125, channels=32, positions=64, mixing_before="local")
    place = replace(place, mixing_after="global")
    layout = replace(
        layout,
        slots=(place, *layout.slots[1:]),
        cards=(tuple(card if c.blueprint == "good" else c for c in layout.cards[0]), *layout.cards[1:]),
    )
    env_view = replace(env_view, context=replace(env_view.context, layout=layout))
    assert slot_named(env_view, 0) == pytest.approx(
        with_flags(SLOT_COLUMNS, expected, {"largest_seed", "span_source_depth"})
    )
    shown = named(CARD_COLUMNS, card_rows(layout)[0][layout.blueprints.index("good")])
    assert shown == pytest.approx(
        with_flags(
            CARD_COLUMNS,
            {"params": math.log1p(0.5), "macs": math.log1p(0.25), "mixing_global": 1.0, "fits": 1.0},
            set(),
        )
    )


def with_flags(columns: tuple[Column, ...], expected: dict[str, float], missing: set[str]) -> dict[str, float]:
    """All columns: those expected, 1 for the flags of what was measured, 0 for the rest."""
    names = [column.name for column in columns]
    assert expected.keys() <= set(names)
    measured = {name: float(name.removesuffix("_measured") not in missing) for name in names if "_measured" in name}
    return {name: expected.get(name, measured.get(name, 0.0)) for name in names}


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


def test_the_observation_has_no_scale_of_the_host_but_in_the_column_that_says_it() -> None:
    """Ten times the parameters: the same shares, the same row."""
    small = world()
    blueprints = tuple(replace(blueprint, params=5000) for blueprint in small.blueprints)
    large = replace(small, host_params=10_000, blueprints=blueprints)
    for one, ten in zip(play(small, script_chooser(KEEP)), play(large, script_chooser(KEEP)), strict=True):
        rows = [global_named(view(spec, step)) for spec, step in ((small, one), (large, ten))]
        assert rows[1].pop("host_params_log2") - rows[0].pop("host_params_log2") == pytest.approx(math.log2(10))
        assert rows[0] == pytest.approx(rows[1])
        assert slot_rows(view(small, one)) == tuple(pytest.approx(row) for row in slot_rows(view(large, ten)))


def test_the_observation_has_no_scale_of_time_or_task() -> None:
    """Everything twice as slow, and 100 classes of which 1 % is chance: the same shares, the same rows."""
    spec = world()
    env_view = reported(spec)
    report, previous = env_view.report, env_view.previous
    assert previous is not None

    def score(accuracy_pct: float) -> float:
        return 1.0 + 99.0 * (accuracy_pct - 10.0) / 90.0

    def slower(old: EpochReport) -> EpochReport:
        signals = replace(
            old.signals,
            horizon=20,
            plateau_epochs=2 * old.signals.plateau_epochs,
            recent_accuracies_pct=tuple(map(score, old.signals.recent_accuracies_pct)),
        )
        slots = tuple(
            replace(s, age_epochs=2 * s.age_epochs, predicted_gain=s.predicted_gain and 2 * s.predicted_gain)
            for s in old.slots
        )
        assert old.train_loss is not None
        assert old.train_accuracy_pct is not None
        assert old.committed_accuracy_pct is not None
        return replace(
            old,
            epoch=2 * old.epochs_done - 1,
            train_loss=2 * old.train_loss,
            val_loss=2 * old.val_loss,
            train_accuracy_pct=score(old.train_accuracy_pct),
            val_accuracy_pct=score(old.val_accuracy_pct),
            committed_accuracy_pct=score(old.committed_accuracy_pct),
            signals=signals,
            slots=slots,
        )

    other = replace(
        env_view,
        report=slower(report),
        signals=slower(report).signals,
        slots=slower(report).slots,
        previous=slower(previous),
        context=replace(env_view.context, num_classes=100),
    )
    of_the_task = {"classes_log2": math.log2(100), "horizon_log2": math.log2(20)}
    assert global_named(other) == pytest.approx(global_named(env_view) | of_the_task)
    of_the_ramp = {"epochs_in_stage_share": 0.1}
    assert slot_named(other, 0) == pytest.approx(slot_named(env_view, 0) | of_the_ramp)


def test_cards_are_rows_per_slot_and_blueprint() -> None:
    spec = world()
    rows = card_rows(spec.layout)
    assert len(rows) == 3
    assert {len(row) for row in rows} == {4}
    card = named(CARD_COLUMNS, rows[1][0])
    assert card["params"] == pytest.approx(math.log1p(0.5))
    assert card["mixing_local"] == card["nonlinear"] == card["fits"] == 1.0
    assert card["mixing_none"] == card["mixing_global"] == 0.0


def offers(env_view: EnvView) -> list[dict[str, float]]:
    """What the blueprints of the last slot would take of the room left."""
    return [named(OFFER_COLUMNS, row) for row in offer_rows(env_view)[-1]]


def test_offers_say_what_share_of_the_room_left_a_seed_would_take() -> None:
    spec = world()
    before = offers(view(spec, play(spec, script_chooser(KEEP))[0]))
    assert all(set(offer.values()) == {0.0} for offer in before), "without a budget there is no room to share"
    spec = replace(spec, lifecycle=replace(spec.lifecycle, param_budget=3000))
    steps = play(spec, script_chooser(KEEP))
    costs = [card.added_params("add") for card in spec.layout.cards[-1]]
    for env_view, room in ((reset_view(spec, steps[0]), 2000), (view(spec, steps[4]), 1500)):
        for offer, cost in zip(offers(env_view), costs, strict=True):
            assert offer["room_share"] == pytest.approx(min(1.0, cost / room))
            assert offer["room_share_log"] == pytest.approx(-math.log2(min(1.0, cost / room)) / 6)
            assert offer["room_share_measured"] == 1.0


def test_a_slot_says_what_may_be_planted_there() -> None:
    spec = world()
    steps = play(spec, script_chooser(KEEP))
    empty, taken = slot_named(view(spec, steps[4]), 1), slot_named(view(spec, steps[4]), 0)
    legal = [card for card in spec.layout.cards[1] if card.fits]
    assert empty["largest_seed"] == pytest.approx(math.log1p(max(card.params_ratio for card in legal)))
    assert empty["may_plant_local"] == float(any(card.mixing == "local" for card in legal)) == 1.0
    assert taken["largest_seed_measured"] == taken["may_plant_local"] == 0.0


@given(st.floats(-1e6, 1e6))
def test_symlog_keeps_the_sign_and_the_order(x: float) -> None:
    assert symlog(-x) == -symlog(x)
    assert abs(symlog(x)) <= abs(x)
    assert symlog(x + 1.0) > symlog(x)
