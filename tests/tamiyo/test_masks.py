"""Legality: the masks say exactly what the gates say, and a legal op can always be completed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import (
    BLENDS,
    DEFAULT_LIFECYCLE,
    OPERATORS,
    OPS,
    ActionSpec,
    EpochReport,
    GovernorState,
    IllegalOperation,
    LifecycleConfig,
    LifecycleOp,
    SeedStage,
    SlotReport,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_prune,
)
from esper.tamiyo.masks import masks, observe
from esper.tamiyo.simulation import SimulatedWorker
from tests.fakes import act_on, germinate, legal_specs, random_chooser, seeds, world

SPEC = world(
    horizon=14,
    lifecycle=replace(DEFAULT_LIFECYCLE, max_live=2, min_training=2, param_budget=2200, min_contribution=1.0),
)
"""Every gate of this world closes at some time."""
LAYOUT = SPEC.layout
RESET = SimulatedWorker(SPEC).reset(seeds(1)).reports[0]

MAYBE = st.one_of(st.none(), st.just(float("nan")), st.floats(-2.0, 2.0))


@st.composite
def slot_reports(draw: st.DrawFn, slot: SlotReport) -> SlotReport:
    """Any evidence at all, also combinations no real seed can show."""
    return replace(
        slot,
        stage=draw(st.sampled_from(SeedStage)),
        epochs_in_stage=draw(st.integers(0, 4)),
        age_epochs=draw(st.integers(0, 4)),
        alpha=draw(st.sampled_from([0.0, 0.5, 1.0])),
        train_loss=draw(MAYBE),
        val_loss=draw(MAYBE),
        predicted_gain=draw(MAYBE),
        residual_ratio=draw(MAYBE),
        gradients_finite=draw(st.sampled_from([None, False, True])),
        live_fraction=draw(MAYBE),
        contribution_pp=draw(MAYBE),
        contribution_alpha=draw(st.sampled_from([None, 0.5, 1.0])),
        contribution_topology=draw(st.sampled_from([None, 0, 1])),
        topology_version=draw(st.sampled_from([0, 1])),
    )


@st.composite
def reports(draw: st.DrawFn) -> EpochReport:
    slots = tuple(draw(slot_reports(slot)) for slot in RESET.slots)
    return replace(RESET, slots=slots, total_params=draw(st.integers(1000, 4000)))


CONFIGS = st.builds(
    lambda live, budget: replace(DEFAULT_LIFECYCLE, max_live=live, param_budget=budget),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1000, 4000)),
)


@given(reports(), CONFIGS, st.lists(st.booleans(), min_size=4, max_size=4))
def test_masks_say_what_the_gates_say_for_any_evidence(
    report: EpochReport, config: LifecycleConfig, fits: list[bool]
) -> None:
    cards = tuple(replace(card, fits=fit) for card, fit in zip(LAYOUT.cards[0], fits, strict=True))
    layout = replace(LAYOUT, cards=(cards,) * 3)
    found = masks(report, layout, config)
    for i, slot in enumerate(report.slots):
        for j, card in enumerate(cards):
            live, params = report.num_live, report.total_params
            verdicts = {name: gate_germinate(slot.stage, card, name, live, params, config) for name in OPERATORS}
            assert found.blueprint_by_slot[i][j] == verdicts["add"].passed
            for legal, blend in zip(found.blend, BLENDS.values(), strict=True):
                # Whatever is chosen before the blend, a legal blend passes the gate.
                assert not (legal and verdicts["add"].passed) or verdicts[blend.operator].passed
        assert found.slot_by_op[LifecycleOp.GERMINATE][i] == any(found.blueprint_by_slot[i])
        assert found.slot_by_op[LifecycleOp.ADVANCE][i] == gate_blend(slot, config).passed
        assert found.slot_by_op[LifecycleOp.PRUNE][i] == gate_prune(slot, config).passed
        assert found.slot_by_op[LifecycleOp.FOSSILIZE][i] == gate_fossilize(slot, config).passed


@given(reports(), CONFIGS)
def test_a_legal_op_never_has_an_empty_later_mask(report: EpochReport, config: LifecycleConfig) -> None:
    found = masks(report, LAYOUT, config)
    assert found.op[LifecycleOp.WAIT]
    for op in OPS[1:]:
        assert found.op[op] == any(found.slot_by_op[op])
    for i, legal in enumerate(found.slot_by_op[LifecycleOp.GERMINATE]):
        assert legal == any(found.blueprint_by_slot[i])
    assert any(found.blend) == found.op[LifecycleOp.GERMINATE]
    assert len(found.blend) == len(BLENDS)


def with_stages(*stages: SeedStage) -> EpochReport:
    return replace(
        RESET, slots=tuple(replace(slot, stage=stage) for slot, stage in zip(RESET.slots, stages, strict=True))
    )


def test_no_more_seeds_than_may_live_at_once() -> None:
    one_live = with_stages(SeedStage.TRAINING, SeedStage.DORMANT, SeedStage.FOSSILIZED)
    for max_live, legal in ((1, False), (2, True)):
        config = replace(DEFAULT_LIFECYCLE, max_live=max_live)
        assert masks(one_live, LAYOUT, config).op[LifecycleOp.GERMINATE] == legal


def test_no_seed_beyond_the_budget() -> None:
    for budget, legal in ((RESET.total_params + 499, False), (RESET.total_params + 500, True)):
        config = replace(DEFAULT_LIFECYCLE, param_budget=budget)
        assert masks(RESET, LAYOUT, config).op[LifecycleOp.GERMINATE] == legal


@pytest.mark.parametrize(
    "ended", [{"terminal": True}, {"governor_state": GovernorState.PANIC}], ids=["terminal", "panic"]
)
@given(reports())
def test_an_env_that_is_over_can_only_wait(ended: dict[str, object], report: EpochReport) -> None:
    found = masks(replace(report, **ended), LAYOUT, DEFAULT_LIFECYCLE)  # type: ignore[arg-type]
    assert legal_specs(found, LAYOUT) == legal_specs(found, LAYOUT)[:1]
    assert found.op == tuple(op is LifecycleOp.WAIT for op in OPS)
    assert not any(any(row) for row in (*found.slot_by_op, *found.blueprint_by_slot, found.blend))


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_a_worker_takes_exactly_what_the_masks_allow(seed: int) -> None:
    rng = random.Random(seed)
    choose = random_chooser(rng)
    worker = SimulatedWorker(SPEC)
    state = observe(worker.reset(seeds(1)))
    while not state.reports[0].terminal:
        probe = rng.choice(EVERY_SPEC)
        allowed = probe in legal_specs(state.post_action_masks[0], LAYOUT)
        assert accepts(worker, probe) == allowed
        state = observe(worker.step([choose(state, LAYOUT)]))


EVERY_SPEC = [act_on(op, slot) for op in OPS[2:] for slot in LAYOUT.slot_ids] + [
    germinate(slot, blueprint) for slot in LAYOUT.slot_ids for blueprint in LAYOUT.blueprints
]


def accepts(worker: SimulatedWorker, spec: ActionSpec) -> bool:
    twin = SimulatedWorker(SPEC)
    twin.restore(worker.snapshot())
    try:
        twin.step([spec])
    except IllegalOperation:
        return False
    return True
