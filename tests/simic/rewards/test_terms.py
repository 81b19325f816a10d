"""Single terms: what they pay, in which direction, within which bounds, and what they refuse."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import BLENDS, EpochReport, LifecycleOp, SeedStage
from esper.simic.rewards import MODES, RewardInputs, compute_components, terms
from esper.simic.rewards.modes import PLUS_NOW_SHARE
from tests.fakes import Step, act_on, germinate, play, script_chooser, world
from tests.simic.rewards.pricing import inputs, make_config, price
from tests.simic.rewards.strategies import Episode, episodes

ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


def kept(blueprint: str = "good", commit: int = 10, horizon: int = 20, blend: str = "linear_fast") -> list[Step]:
    plan = [(3, germinate("r0c0", blueprint, blend)), (4, act_on(ADVANCE, "r0c0")), (commit, act_on(FOSSILIZE, "r0c0"))]
    return play(world(horizon=horizon), script_chooser(plan))


def transitions(steps: list[Step], **changes: object) -> list[RewardInputs]:
    spec = world(horizon=len(steps))
    return inputs(steps, spec, make_config(spec, **changes))  # type: ignore[arg-type]


# terminal and size


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_a_better_network_is_worth_more_down_to_a_floor(one: float, two: float) -> None:
    last = transitions(kept())[-1]
    low, high = sorted((one, two))
    paid = [
        terms.terminal(replace(last, after=replace(last.after, committed_accuracy_pct=points)))
        for points in (low, high)
    ]
    assert paid[0] <= paid[1]
    assert paid[0] >= -1.0


def test_the_terminal_is_the_score_of_the_fossils() -> None:
    last = transitions(kept())[-1]
    points = last.after.coalitions.accuracy_pct[1]
    assert terms.terminal(last) == pytest.approx((points - last.config.calibration.floor) / 15.0)


def test_a_held_seed_is_worth_nothing_at_the_end() -> None:
    spec = world(horizon=20)
    steps = play(spec, script_chooser([(3, germinate("r0c0", "good")), (4, act_on(ADVANCE, "r0c0"))]))
    last = inputs(steps, spec, make_config(spec))[-1]
    assert steps[-1].after.val_accuracy_pct > last.config.calibration.floor + 9.0
    assert terms.terminal(last) < 0.0, "the host was trained around a part that is thrown away"
    assert terms.size(last) == 0.0


def test_an_unmeasured_outcome_is_refused() -> None:
    last = transitions(kept())[-1]
    with pytest.raises(ValueError, match="not measured"):
        terms.terminal(replace(last, after=replace(last.after, committed_accuracy_pct=None)))


def with_params(transition: RewardInputs, params: int) -> RewardInputs:
    def resize(report: EpochReport) -> EpochReport:
        return replace(report, slots=tuple(replace(s, params=params if s.seed_id else 0) for s in report.slots))

    return replace(transition, before=resize(transition.before), after=resize(transition.after))


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_more_parameters_never_cost_less(one: int, two: int) -> None:
    run = transitions(kept())
    small, large = sorted((one, two))
    for term, transition in ((terms.size, run[-1]), (terms.rent, run[8]), (terms.shock, run[5])):
        assert 0.0 > term(with_params(transition, small)) >= term(with_params(transition, large))


def test_doubling_the_host_costs_the_size_weight() -> None:
    assert terms.size(with_params(transitions(kept())[-1], 1000)) == pytest.approx(-0.05)


def test_a_tiny_host_is_priced_like_one_of_two_hundred_parameters() -> None:
    last = with_params(transitions(kept())[-1], 200)
    tiny = replace(last, after=replace(last.after, host_params=20))
    assert terms.size(tiny) == pytest.approx(-0.05)


# pbrs


@pytest.mark.parametrize("blend", BLENDS)
def test_the_potential_never_falls_along_the_intended_life(blend: str) -> None:
    steps = kept(commit=15, blend=blend, horizon=20)
    potentials = [terms.stage_potential(step.after, world().lifecycle) for step in steps]
    assert all(later >= earlier for earlier, later in itertools.pairwise(potentials))
    assert potentials[3] > 0.0
    assert potentials[-1] == pytest.approx(0.16)
    assert potentials[14] < potentials[15], "keeping adds to the longest wait"


@settings(max_examples=50)
@given(episodes(may_crash=False))
def test_the_potential_is_the_sum_over_all_slots(episode: Episode) -> None:
    for step in episode.steps:
        alone = [
            terms.stage_potential(replace(step.after, slots=(slot,)), episode.spec.lifecycle)
            for slot in step.after.slots
        ]
        assert terms.stage_potential(step.after, episode.spec.lifecycle) == pytest.approx(math.fsum(alone), abs=1e-15)
        assert all(0.0 <= value <= 0.16 for value in alone)


# rent, shock, action


def test_a_whole_episode_of_one_doubling_costs_the_rent_weight() -> None:
    transition = with_params(transitions(kept())[-1], 1000)
    assert 20 * terms.rent(transition) == pytest.approx(-0.01)


def test_a_training_seed_pays_a_tenth_of_its_size() -> None:
    transition = with_params(transitions(kept())[3], 1000)
    assert transition.after.slots[0].alpha == 0.0
    assert 20 * terms.rent(transition) == pytest.approx(-0.01 * math.log2(1.1))


def shock_of_ramp(blend: str) -> float:
    return math.fsum(terms.shock(transition) for transition in transitions(kept(commit=15, blend=blend)))


def test_a_slow_ramp_is_a_small_shock() -> None:
    assert shock_of_ramp("linear_fast") == pytest.approx(-0.02 * 0.5 / 3)
    assert shock_of_ramp("linear") == pytest.approx(-0.02 * 0.5 / 5)
    assert shock_of_ramp("sigmoid_slow") > shock_of_ramp("sigmoid")


def test_removal_costs_as_much_as_an_equal_rise() -> None:
    spec = world()
    plan = [(0, germinate("r0c0", "good")), (1, act_on(ADVANCE, "r0c0")), (2, act_on(PRUNE, "r0c0"))]
    run = inputs(play(spec, script_chooser(plan)), spec, make_config(spec))
    assert terms.shock(run[2]) == terms.shock(run[1]) < 0.0


@pytest.mark.parametrize(
    ("op", "cost"),
    [(LifecycleOp.WAIT, 0.0), (LifecycleOp.GERMINATE, 0.01), (ADVANCE, 0.002), (PRUNE, 0.005), (FOSSILIZE, 0.0)],
)
def test_ops_cost_what_they_cost(op: LifecycleOp, cost: float) -> None:
    transition = transitions(kept())[0]
    taken = replace(transition, outcome=replace(transition.outcome, op=op))
    assert terms.action(taken) == -cost
    idle = replace(taken, outcome=replace(taken.outcome, applied=False))
    assert terms.action(idle) == 0.0, "an env whose episode is over takes no op"


# commit and drip


def test_a_commit_pays_in_proportion_to_credit() -> None:
    run = transitions(kept())
    credit = run[10].ledger_after.credit("r0c0")
    assert credit > 1.0
    assert terms.commit(run[10], 1.0) == pytest.approx(0.2 * credit / 15.0)
    assert terms.commit(run[10], 0.3) == pytest.approx(0.3 * 0.2 * credit / 15.0)
    assert all(terms.commit(transition, 1.0) == 0.0 for t, transition in enumerate(run) if t != 10)


def test_keeping_a_bad_seed_pays_nothing_and_a_splendid_one_no_more_than_the_weight() -> None:
    assert terms.commit(transitions(kept("bad"))[10], 1.0) == 0.0
    run = transitions(kept(), span=5.0)
    rich = replace(run[10].ledger_after.slots["r0c0"], credit=50.0)
    transition = replace(run[10], ledger_after=replace(run[10].ledger_after, slots={"r0c0": rich}))
    assert terms.commit(transition, 1.0) == pytest.approx(0.2)


@pytest.mark.parametrize("blueprint", ["good", "bad", "inert", "parasite"])
@pytest.mark.parametrize("commit", [8, 12, 16, 18, 19])
def test_the_drip_of_a_seed_stays_within_what_was_left_to_it(blueprint: str, commit: int) -> None:
    run = transitions(kept(blueprint, commit), span=5.0)
    drips = [terms.drip(transition, PLUS_NOW_SHARE) for transition in run]
    total = math.fsum(drips)
    assert -0.5 * 0.7 * 0.2 - 1e-12 <= total <= 0.7 * 0.2 + 1e-12
    assert drips[: commit + 1] == [0.0] * (commit + 1), "nothing drips in the commit step or before it"
    for transition, amount in zip(run[commit + 1 :], drips[commit + 1 :], strict=True):
        credit = transition.ledger_after.credit("r0c0")
        assert amount * credit > 0.0 if credit else amount == 0.0


@given(st.integers(8, 19), st.lists(st.floats(-1e4, 1e4), min_size=20, max_size=20), st.floats(0.0, 1.0))
def test_no_course_of_credits_makes_a_seed_drip_more_than_was_left(
    commit: int, credits: list[float], now_share: float
) -> None:
    run = transitions(kept(commit=commit))
    drips = [
        terms.drip(credited(transition, credit) if t >= commit else transition, now_share)
        for t, (transition, credit) in enumerate(zip(run, credits, strict=True))
    ]
    left = (1.0 - now_share) * 0.2
    assert -0.5 * left - 1e-12 <= math.fsum(drips) <= left + 1e-12
    assert drips[: commit + 1] == [0.0] * (commit + 1), "nothing drips in the commit step or before it"
    for amount, credit in zip(drips[commit + 1 :], credits[commit + 1 :], strict=True):
        assert amount * credit >= 0.0, "the sign follows the credit"


def test_a_splendid_fossil_drips_the_whole_rest_and_a_dreadful_one_half_of_it_back() -> None:
    run = transitions(kept())[11:]
    for credit, expected in ((1e6, 0.14), (-1e6, -0.07)):
        paid = math.fsum(terms.drip(credited(transition, credit), PLUS_NOW_SHARE) for transition in run)
        assert paid == pytest.approx(expected)


def test_a_last_minute_commit_forgoes_most_of_its_drip() -> None:
    (last,) = transitions(kept(commit=18))[19:]
    assert terms.drip(credited(last, 1e6), PLUS_NOW_SHARE) == pytest.approx(0.14 / 5)


def credited(transition: RewardInputs, credit: float) -> RewardInputs:
    entry = replace(transition.ledger_after.slots["r0c0"], credit=credit)
    return replace(transition, ledger_after=replace(transition.ledger_after, slots={"r0c0": entry}))


def test_a_missing_measurement_is_refused_where_it_would_be_paid_for() -> None:
    run = transitions(kept())
    for t, term in ((10, terms.commit), (11, terms.drip)):
        entry = replace(run[t].ledger_after.slots["r0c0"], marked_epoch=t - 1)
        stale = replace(run[t], ledger_after=replace(run[t].ledger_after, slots={"r0c0": entry}))
        with pytest.raises(ValueError, match="measure fossils"):
            term(stale, 0.3)


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_pay_for_commits_refuse_to_work_without_a_reference_curve(mode: str) -> None:
    transition = transitions(kept(), reference=False)[10]
    if MODES[mode].needs_reference:
        with pytest.raises(ValueError, match="calibrate"):
            compute_components(mode, transition)
    else:
        assert math.isfinite(compute_components(mode, transition).total)


def test_a_rollback_takes_the_commit_back() -> None:
    spec = world(horizon=20, rollback_epoch=10)
    plan = [(3, germinate("r0c0", "good")), (4, act_on(ADVANCE, "r0c0")), (10, act_on(FOSSILIZE, "r0c0"))]
    steps = play(spec, script_chooser(plan))
    assert steps[-1].after.slots[0].stage is not SeedStage.FOSSILIZED
    last = price("basic_plus", steps, spec, make_config(spec))[-1]
    assert last.amounts["commit"] == last.amounts["drip"] == 0.0
