"""The ledger: ratchet, share, three marks, no debts, and no memory outside it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import CoalitionTable, LifecycleOp, full_coalition
from esper.simic.rewards import advance_ledger, open_ledger
from esper.simic.rewards.terms import credit_potential
from esper.simic.rewards.types import coalition_points
from tests.fakes import Step, act_on, germinate, play, script_chooser, world
from tests.simic.rewards.pricing import ledgers, make_config, price
from tests.simic.rewards.strategies import Episode, episodes

ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


@settings(max_examples=100)
@given(episodes(may_crash=False))
def test_the_bar_of_a_seed_never_falls(episode: Episode) -> None:
    memory = ledgers(episode.steps, episode.config)
    for before, after in itertools.pairwise(memory):
        for slot_id, entry in after.slots.items():
            old = before.slots.get(slot_id)
            if old is not None and old.seed_id == entry.seed_id:
                assert old.best_without is not None
                assert entry.best_without is not None
                assert entry.best_without >= old.best_without


@settings(max_examples=100)
@given(episodes(may_crash=False, max_slots=3))
def test_credits_never_exceed_what_the_seeds_brought_together(episode: Episode) -> None:
    bare_best = -math.inf
    for step, memory in zip(episode.steps, ledgers(episode.steps, episode.config)[1:], strict=True):
        points = coalition_points(step.after.coalitions, episode.config)
        seedless = not any(slot.stage.has_seed for slot in step.after.slots)
        bare_best = points[0] if seedless else max(points[0], bare_best)
        reference = episode.config.reference_points(step.after.epochs_done)
        assert reference is not None
        gain = points[full_coalition(len(step.after.coalitions.slot_ids))] - max(bare_best, reference)
        positive = math.fsum(max(0.0, entry.credit) for entry in memory.slots.values())
        assert positive <= max(0.0, gain) + 1e-9


@settings(max_examples=100)
@given(episodes(may_crash=False))
def test_only_slots_with_a_seed_have_an_entry_and_only_blended_seeds_have_credit(episode: Episode) -> None:
    for step, memory in zip(episode.steps, ledgers(episode.steps, episode.config)[1:], strict=True):
        for slot in step.after.slots:
            assert (slot.slot_id in memory.slots) == slot.stage.has_seed
            if slot.alpha == 0.0:
                assert memory.credit(slot.slot_id) == 0.0
            else:
                assert memory.slots[slot.slot_id].marked_epoch == step.after.epoch


@settings(max_examples=50)
@given(episodes())
def test_a_ledger_is_never_changed_and_can_be_rebuilt_from_the_reports(episode: Episode) -> None:
    memory = open_ledger(episode.steps[0].before, episode.config)
    for t, step in enumerate(episode.steps):
        kept = copy.deepcopy(memory)
        successor = advance_ledger(memory, step.outcome, step.after, episode.config)
        assert memory == kept
        memory = successor
        assert memory == ledgers(episode.steps[: t + 1], episode.config)[-1]


def keep_good(horizon: int = 20) -> list[Step]:
    plan = [(3, germinate("r0c0", "good")), (4, act_on(ADVANCE, "r0c0")), (10, act_on(FOSSILIZE, "r0c0"))]
    return play(world(horizon=horizon), script_chooser(plan))


def test_gains_must_be_shown_three_epochs_running() -> None:
    steps = keep_good()
    credits = [memory.credit("r0c0") for memory in ledgers(steps, make_config(world(horizon=20)))[1:]]
    blended = next(t for t, step in enumerate(steps) if step.after.slots[0].alpha > 0.0)
    assert credits[: blended + 2] == [0.0] * (blended + 2)
    assert credits[blended + 2] > 0.0


def test_losses_count_at_once() -> None:
    plan = [(3, germinate("r0c0", "bad")), (4, act_on(ADVANCE, "r0c0"))]
    spec = world(horizon=20)
    credits = [memory.credit("r0c0") for memory in ledgers(play(spec, script_chooser(plan)), make_config(spec))[1:]]
    assert credits[3] == 0.0
    assert credits[4] < 0.0


def test_a_parasite_earns_nothing_where_the_waiting_host_is_known() -> None:
    plan = [(0, germinate("r0c0", "parasite")), (1, act_on(ADVANCE, "r0c0")), (8, act_on(FOSSILIZE, "r0c0"))]
    spec = world(horizon=30)
    steps = play(spec, script_chooser(plan))
    assert steps[-1].after.slots[0].contribution_pp == pytest.approx(14.5, abs=0.1), "its removal would hurt"
    with_curve = ledgers(steps, make_config(spec))[1:]
    without_curve = ledgers(steps, make_config(spec, reference=False))[1:]
    assert all(memory.credit("r0c0") <= 0.0 for memory in with_curve)
    assert max(memory.credit("r0c0") for memory in without_curve) > 1.0, "alone, the ratchet cannot know"


def test_credit_is_only_what_beats_the_best_ever_reached_without_the_seed() -> None:
    steps = keep_good()
    config = make_config(world(horizon=20), reference=False)
    peak = steps[7].after.val_accuracy_pct - 1.0
    table = steps[7].after.coalitions
    lucky = replace(table, accuracy_pct={**table.accuracy_pct, 0: peak})
    steps[7] = replace(steps[7], after=replace(steps[7].after, coalitions=lucky))
    memory = ledgers(steps, config)[1:]
    for step, entry in zip(steps[7:], (m.slots["r0c0"] for m in memory[7:]), strict=True):
        assert entry.best_without is not None
        assert entry.best_without >= peak
        assert entry.credit <= max(0.0, step.after.val_accuracy_pct - peak)
    contribution = steps[8].after.slots[0].contribution_pp
    assert contribution is not None
    assert memory[8].credit("r0c0") < contribution - 5.0, "removing it now would cost far more than it is credited with"


def without(table: CoalitionTable, *masks: int) -> CoalitionTable:
    def cut(values: Mapping[int, float]) -> dict[int, float]:
        return {mask: value for mask, value in values.items() if mask not in masks}

    return CoalitionTable(slot_ids=table.slot_ids, accuracy_pct=cut(table.accuracy_pct), loss=cut(table.loss))


@pytest.mark.parametrize("missing", [0, 1], ids=["bare host", "full network"])
def test_what_was_not_measured_leaves_the_entry_alone(missing: int) -> None:
    steps = keep_good()
    config = make_config(world(horizon=20))
    memory = ledgers(steps[:9], config)[-1]
    assert memory.credit("r0c0") > 0.0
    after = steps[9].after
    blind = replace(after, coalitions=without(after.coalitions, missing))
    assert advance_ledger(memory, steps[9].outcome, blind, config).slots == memory.slots
    assert advance_ledger(memory, steps[9].outcome, after, config).slots != memory.slots


def test_an_env_that_sits_out_changes_nothing() -> None:
    steps = keep_good()
    config = make_config(world(horizon=20))
    memory = ledgers(steps, config)[-1]
    assert advance_ledger(memory, replace(steps[-1].outcome, applied=False), steps[-1].after, config) is memory


def test_a_prune_returns_exactly_the_credit_of_the_seed() -> None:
    plan = [(0, germinate("r0c0", "good")), (1, germinate("r0c1", "good"))]
    plan += [(2, act_on(ADVANCE, "r0c0")), (3, act_on(ADVANCE, "r0c1")), (12, act_on(PRUNE, "r0c0"))]
    spec = world(horizon=20)
    config = make_config(spec, gamma=1.0, reference=False)
    steps = play(spec, script_chooser(plan))
    memory = ledgers(steps, config)
    assert "r0c0" not in memory[13].slots
    returned = 0.5 * memory[12].credit("r0c0") / config.calibration.span
    assert returned > 0.0
    others = 0.5 * (memory[13].credit("r0c1") - memory[12].credit("r0c1")) / config.calibration.span
    paid = price("escrow", steps, spec, config)[12].amounts["credit"]
    assert paid == pytest.approx(others - returned, abs=1e-12)


def test_a_new_seed_starts_without_a_past() -> None:
    plan = [(0, germinate("r0c0", "good")), (1, act_on(ADVANCE, "r0c0")), (8, act_on(PRUNE, "r0c0"))]
    plan += [(12, germinate("r0c0", "good"))]
    spec = world(horizon=20)
    memory = ledgers(play(spec, script_chooser(plan)), make_config(spec, reference=False))
    assert memory[8].slots["r0c0"].recent
    fresh = memory[13].slots["r0c0"]
    assert fresh.recent == ()
    assert fresh.credit == 0.0
    assert fresh.seed_id != memory[8].slots["r0c0"].seed_id


@given(st.floats(0.0, 30.0), st.floats(0.0, 30.0))
def test_credit_never_rises_when_the_network_does_better_without_the_seed(low: float, high: float) -> None:
    """Two seeds; only what is measured without the first differs."""
    low, high = min(low, high), max(low, high)
    plan = [(0, germinate("r0c0", "good")), (1, germinate("r0c1", "good"))]
    plan += [(2, act_on(ADVANCE, "r0c0")), (3, act_on(ADVANCE, "r0c1"))]
    spec = world(horizon=12)
    config = make_config(spec, reference=False)
    steps = play(spec, script_chooser(plan))
    credits = []
    for alone in (low, high):
        marked = [with_value(step, 0b10, step.after.val_accuracy_pct - 20.0 + alone) for step in steps]
        credits.append(ledgers(marked, config)[-1].credit("r0c0"))
    assert credits[1] <= credits[0] + 1e-12


def with_value(step: Step, mask: int, points: float) -> Step:
    table = step.after.coalitions
    if len(table.slot_ids) < 2:
        return step
    accuracy = {**table.accuracy_pct, mask: points}
    return replace(step, after=replace(step.after, coalitions=replace(table, accuracy_pct=accuracy)))


@settings(max_examples=50)
@given(episodes(may_crash=False))
def test_the_credit_potential_counts_fossils_in_full_and_others_by_half(episode: Episode) -> None:
    share = {3: 0.5, 4: 0.5, 5: 1.0}
    for step, memory in zip(episode.steps, ledgers(episode.steps, episode.config)[1:], strict=True):
        expected = sum(share.get(slot.stage, 0.0) * memory.credit(slot.slot_id) for slot in step.after.slots)
        found = credit_potential(step.after, memory, episode.config)
        assert found == pytest.approx(expected / episode.config.calibration.span, abs=1e-12)


def two_blended(horizon: int = 16) -> list[Step]:
    plan = [(0, germinate("r0c0", "good")), (1, germinate("r0c1", "good"))]
    plan += [(2, act_on(ADVANCE, "r0c0")), (3, act_on(ADVANCE, "r0c1"))]
    return play(world(horizon=horizon), script_chooser(plan))


def test_the_ratchet_guards_each_seed_of_several() -> None:
    """Once the network did nearly as well without the first seed; that seed is never credited with more again."""
    steps = two_blended()
    config = make_config(world(horizon=16), reference=False)
    peak = steps[9].after.val_accuracy_pct - 0.5
    steps[9] = with_value(steps[9], 0b10, peak)
    for t, memory in enumerate(ledgers(steps, config)[1:]):
        if t >= 9:
            assert memory.credit("r0c0") <= steps[t].after.val_accuracy_pct - peak + 1e-12
            assert memory.credit("r0c1") > 3.0


def test_the_ratchet_never_makes_a_debt() -> None:
    """The network never again reaches what it had without the first seed, which still helps: no credit, no debt."""
    steps = two_blended()
    config = make_config(world(horizon=16), reference=False)
    steps[9] = with_value(steps[9], 0b10, 99.0)
    credits = [memory.credit("r0c0") for memory in ledgers(steps, config)[1:]]
    assert credits[9] < -10.0, "at that epoch the seed did harm"
    assert credits[12:] == [0.0] * 4


def test_a_seed_of_another_name_does_not_inherit() -> None:
    steps = keep_good()
    config = make_config(world(horizon=20))
    memory = ledgers(steps[:9], config)[-1]
    stranger = replace(steps[9].after.slots[0], seed_id="0.0.r0c0.7")
    after = replace(steps[9].after, slots=(stranger, *steps[9].after.slots[1:]))
    entry = advance_ledger(memory, steps[9].outcome, after, config).slots["r0c0"]
    assert memory.credit("r0c0") > 0.0
    assert entry.credit == 0.0
    assert len(entry.recent) == 1


def test_the_bare_host_is_measured_afresh_whenever_all_slots_are_empty() -> None:
    config = make_config(world(), reference=False)
    step = play(world(), script_chooser([]))[0]
    memory = open_ledger(step.before, config)
    for points in (90.0, 60.0):
        table = replace(step.after.coalitions, accuracy_pct={0: points})
        memory = advance_ledger(memory, step.outcome, replace(step.after, coalitions=table), config)
    assert memory.best_bare == 60.0


def test_the_bare_host_keeps_its_best_while_a_seed_lives() -> None:
    steps = keep_good()
    config = make_config(world(horizon=20), reference=False)
    table = steps[8].after.coalitions
    steps[8] = replace(steps[8], after=replace(steps[8].after, coalitions=with_points(table, 0, 95.0)))
    memory = ledgers(steps, config)
    assert memory[9].best_bare == memory[-1].best_bare == 95.0


def with_points(table: CoalitionTable, mask: int, points: float) -> CoalitionTable:
    return replace(table, accuracy_pct={**table.accuracy_pct, mask: points})
