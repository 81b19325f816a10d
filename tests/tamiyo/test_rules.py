"""The rule arms: when they plant, what they keep, what they drop, and that nothing is left undecided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from esper.leyline import ActionExecutionResult, LifecycleOp, SeedStage, wait
from esper.tamiyo import Setting, make_controller
from esper.tamiyo.masks import masks, observe
from esper.tamiyo.rules import commit_verdict, fragrow_interval
from esper.tamiyo.simulation import HostCurve, SimulatedBlueprint, SimulatedWorker, SimulationSpec
from tests.fakes import Step, act_on, germinate, run_policy, seeds, world

GERMINATE, PRUNE, FOSSILIZE = LifecycleOp.GERMINATE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE
ARMS = ("largest", "periodic", "plateau", "fragrow", "heuristic")


def episode(name: str, spec: SimulationSpec, **params: Any) -> list[Step]:
    setting = Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=0)
    return run_policy(spec, make_controller(name, setting, **params), seeds(1))[0]


def epochs_of(steps: list[Step], op: LifecycleOp) -> list[int]:
    return [t for t, step in enumerate(steps) if step.outcome.op is op]


def only(blueprint: SimulatedBlueprint, **changes: object) -> SimulationSpec:
    """A settled host and one kind of seed."""
    host = HostCurve(start_pct=60.0, final_pct=60.0)
    return world(blueprints=(blueprint,), host=host, horizon=40, **changes)


GOOD = SimulatedBlueprint(name="good", gain_pp=(5.0, 5.0, 5.0), predicted_gain=0.01)
BAD = SimulatedBlueprint(name="bad", gain_pp=(-3.0, -3.0, -3.0), predicted_gain=0.01)
MEH = SimulatedBlueprint(name="meh", gain_pp=(0.5, 0.5, 0.5), predicted_gain=0.01)


def test_periodic_plants_every_so_many_epochs() -> None:
    assert epochs_of(episode("periodic", only(GOOD), every_epochs=7), GERMINATE) == [7, 14, 21]


def test_plateau_plants_when_the_loss_has_not_fallen_for_long_enough() -> None:
    steps = episode("plateau", only(replace(GOOD, gain_pp=(0.0, 0.0, 0.0))), patience=4)
    assert epochs_of(steps, GERMINATE)[:2] == [4, 9], "a new seed gets the patience the host had"
    falling = world(blueprints=(GOOD,), host=HostCurve(start_pct=10.0, final_pct=90.0, epochs=40.0), horizon=40)
    assert epochs_of(episode("plateau", falling, patience=4, min_gain=0.001), GERMINATE) == []
    assert epochs_of(episode("plateau", falling, patience=4, min_gain=0.5), GERMINATE)[0] == 4


@pytest.mark.parametrize(
    ("gap", "interval"), [(4.0, 10.0), (2.0, 2.384058), (6.0, 17.615942), (-1000.0, 0.0), (1000.0, 20.0)]
)
def test_fragrow_waits_longer_the_more_the_host_overfits(gap: float, interval: float) -> None:
    assert fragrow_interval(20.0, gap) == pytest.approx(interval, abs=1e-6)


def test_fragrow_plants_later_in_a_host_that_overfits() -> None:
    first = [epochs_of(episode("fragrow", only(GOOD, gap_pp=gap)), GERMINATE)[0] for gap in (0.0, 400.0)]
    assert first == [1, 20]


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_keeps_what_helps(name: str) -> None:
    steps = episode(name, only(GOOD))
    assert epochs_of(steps, FOSSILIZE)
    assert epochs_of(steps, PRUNE) == []
    assert steps[-1].after.committed_accuracy_pct == pytest.approx(75.0)


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_drops_what_harms(name: str) -> None:
    steps = episode(name, only(BAD))
    assert epochs_of(steps, FOSSILIZE) == []
    assert epochs_of(steps, PRUNE)
    first = epochs_of(steps, PRUNE)[0]
    held = [t for t in range(first) if steps[t].after.slots[0].stage is SeedStage.HOLDING]
    assert len(held) == 3, "three epochs of evidence, then it goes"


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("blueprint", [GOOD, BAD, MEH], ids=lambda blueprint: blueprint.name)
def test_nothing_blended_is_left_undecided_at_the_end(name: str, blueprint: SimulatedBlueprint) -> None:
    for horizon in (12, 17, 25, 40):
        last = episode(name, replace(only(blueprint), horizon=horizon))[-1].after
        assert not any(slot.stage in (SeedStage.BLENDING, SeedStage.HOLDING) for slot in last.slots)


def test_mixed_evidence_is_decided_by_its_mean_when_the_time_is_up() -> None:
    steps = episode("periodic", only(MEH))
    assert epochs_of(steps, FOSSILIZE) == [37, 38, 39], "half a point never makes a verdict, but it helped"
    strict = only(MEH)
    strict = replace(strict, lifecycle=replace(strict.lifecycle, min_contribution=0.7))
    assert epochs_of(episode("periodic", strict), PRUNE) == [37, 38, 39], "what may not be kept is dropped"


@pytest.mark.parametrize(("blueprint", "last_word"), [(MEH, FOSSILIZE), (BAD, PRUNE)], ids=["meh", "bad"])
@pytest.mark.parametrize("name", ARMS)
def test_the_last_word_on_a_seed_that_may_be_kept_is_what_it_brought(
    name: str, blueprint: SimulatedBlueprint, last_word: LifecycleOp
) -> None:
    """Held for less than three epochs, so that no verdict was reached before the last step."""
    spec = only(blueprint)
    controller = make_controller(name, Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=0))
    worker = SimulatedWorker(spec)
    state = observe(worker.reset(seeds(1)))
    controller.begin(state)
    plan = {33: germinate("r0c0", blueprint.name), 34: act_on(LifecycleOp.ADVANCE, "r0c0")}
    for epoch in range(39):
        after = observe(worker.step([plan.get(epoch, wait(0))]))
        controller.store(state, after)
        state = after
    assert state.reports[0].slots[0].stage is SeedStage.HOLDING
    assert state.post_action_masks[0].op[FOSSILIZE]
    assert state.post_action_masks[0].op[PRUNE]
    assert controller.act(state)[0].op is last_word


def test_nobody_plants_what_cannot_be_kept_in_time() -> None:
    for name in ARMS:
        assert epochs_of(episode(name, replace(only(GOOD), horizon=7)), GERMINATE) == []


@pytest.mark.parametrize("name", ARMS)
def test_nobody_blends_what_cannot_be_kept_in_time(name: str) -> None:
    """The gate is open in both states; with five epochs left a ramp of five cannot be followed by a commit."""
    spec = only(GOOD)
    setting = Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=0)
    worker = SimulatedWorker(spec)
    state = observe(worker.reset(seeds(1)))
    late = {34: LifecycleOp.ADVANCE, 35: LifecycleOp.WAIT}
    for epoch in range(36):
        if epoch in late:
            controller = make_controller(name, setting)
            controller.begin(state)
            assert state.post_action_masks[0].op[LifecycleOp.ADVANCE]
            assert controller.act(state)[0].op is late[epoch]
        spec_taken = germinate("r0c0", "good", "linear") if epoch == 20 else wait(0)
        state = observe(worker.step([spec_taken]))


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ([1.0, 1.0, 1.0], FOSSILIZE),
        ([0.0, 0.0, 0.0], PRUNE),
        ([5.0, 5.0], None),
        ([5.0, 0.9, 5.0], None),
        ([-1.0, 0.1, -1.0], None),
        ([-9.0, 1.0, 1.0, 1.0], FOSSILIZE),
    ],
)
def test_the_commit_rule_wants_three_epochs_running(seen: list[float], verdict: LifecycleOp | None) -> None:
    assert commit_verdict(seen) is verdict


def sized(**params: int) -> SimulationSpec:
    spec = world(horizon=40, host=HostCurve(start_pct=60.0, final_pct=60.0))
    return replace(spec, blueprints=tuple(replace(b, params=params[b.name]) for b in spec.blueprints))


def planted_params(steps: list[Step]) -> list[int]:
    planted = [steps[t] for t in epochs_of(steps, GERMINATE)]
    return [step.after.total_params - step.before.total_params for step in planted]


@pytest.mark.parametrize(("budget", "planted"), [(None, [900, 900]), (2400, [900, 300])])
def test_without_a_chosen_blueprint_the_largest_within_the_budget_is_planted(
    budget: int | None, planted: list[int]
) -> None:
    spec = sized(good=300, bad=900, inert=300, parasite=600)
    spec = replace(spec, lifecycle=replace(spec.lifecycle, param_budget=budget))
    steps = episode("periodic", spec, every_epochs=3)
    assert planted_params(steps)[:2] == planted


def test_the_heuristic_auditions_the_largest_first() -> None:
    steps = episode("heuristic", sized(good=300, bad=900, inert=200, parasite=600))
    assert planted_params(steps) == [900, 600, 300, 200]


def test_the_largest_goes_where_it_fits_one_at_a_time_and_is_kept_at_once() -> None:
    spec = sized(good=300, bad=900, inert=200, parasite=600)
    spec = replace(spec, lifecycle=replace(spec.lifecycle, param_budget=spec.host_params + 1300))
    steps = episode("largest", spec)
    assert planted_params(steps)[0] == 900
    assert epochs_of(steps, GERMINATE)[0] == 0
    assert all(step.after.num_live <= 1 for step in steps)
    good = episode("largest", only(GOOD))
    held = [t for t, step in enumerate(good) if step.after.slots[0].stage is SeedStage.HOLDING]
    assert epochs_of(good, FOSSILIZE)[0] == held[0] + 1


def test_the_largest_rule_can_name_what_comes_first() -> None:
    spec = sized(good=300, bad=900, inert=200, parasite=600)
    for params, wanted in (({"blueprint": "good"}, 300), ({}, 900)):
        assert planted_params(episode("largest", spec, place="first", **params))[0] == wanted


def test_a_chosen_blueprint_is_the_only_one() -> None:
    spec = world(horizon=40, host=HostCurve(start_pct=60.0, final_pct=60.0))
    steps = episode("periodic", spec, every_epochs=3, blueprint="inert", blend="sigmoid")
    seeds_seen = {(s.blueprint, s.blend) for step in steps for s in step.after.slots if s.blueprint is not None}
    assert seeds_seen == {("inert", "sigmoid")}


# heuristic


def auditions(**forecasts: float) -> SimulationSpec:
    spec = world(horizon=40, host=HostCurve(start_pct=60.0, final_pct=60.0))
    blueprints = tuple(
        replace(blueprint, predicted_gain=forecasts.get(blueprint.name, 0.0)) for blueprint in spec.blueprints
    )
    return replace(spec, blueprints=blueprints)


def test_the_heuristic_blends_only_what_is_forecast_to_help() -> None:
    steps = episode("heuristic", auditions(good=0.02))
    blended = {s.blueprint for step in steps for s in step.after.slots if s.alpha > 0.0}
    tried = {s.blueprint for step in steps for s in step.after.slots if s.stage is SeedStage.TRAINING}
    assert blended == {"good"}
    assert tried == {"good", "bad", "inert", "parasite"}, "every blueprint is auditioned"


def test_a_hopeless_audition_ends_after_its_epochs() -> None:
    steps = episode("heuristic", auditions(), audition_epochs=4)
    planted, pruned = epochs_of(steps, GERMINATE)[0], epochs_of(steps, PRUNE)[0]
    assert pruned - planted == 4


def test_the_heuristic_plants_what_proved_itself_again_and_nothing_that_failed() -> None:
    steps = episode("heuristic", auditions(good=0.02, bad=0.02))
    last = steps[-1].after
    kept = [s.blueprint for s in last.slots if s.stage is SeedStage.FOSSILIZED]
    assert kept == ["good", "good", "good"]
    planted = [
        next(s.blueprint for s in steps[t].after.slots if s.age_epochs == 1) for t in epochs_of(steps, GERMINATE)
    ]
    assert planted.count("bad") == 1


def test_the_heuristic_prefers_what_was_worth_most() -> None:
    fair = SimulatedBlueprint(name="fair", gain_pp=(2.0, 2.0, 2.0), predicted_gain=0.01, params=900)
    spec = replace(only(GOOD), blueprints=(fair, GOOD))
    steps = episode("heuristic", spec, plateau_epochs=3, blend="linear")
    planted = [
        next(s.blueprint for s in steps[t].after.slots if s.age_epochs == 1) for t in epochs_of(steps, GERMINATE)
    ]
    assert planted == ["fair", "good", "good"]


def test_the_heuristic_gives_every_blueprint_one_chance_and_no_failure_a_second() -> None:
    assert len(epochs_of(episode("heuristic", only(BAD)), GERMINATE)) == 1


def test_one_hopeful_forecast_starts_an_audition_anew() -> None:
    spec = only(GOOD)
    controller = make_controller("heuristic", Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=0))
    worker = SimulatedWorker(spec)
    state = observe(worker.reset(seeds(1)))
    controller.begin(state)
    state = observe(worker.step([germinate("r0c0", "good")]))
    taken = []
    for forecast in (-1.0, -1.0, 1.0, -1.0, -1.0, -1.0):
        shown = with_forecast(state, spec, forecast)
        controller.store(shown, shown)
        taken.append(controller.act(shown)[0].op)
    assert taken[2] is LifecycleOp.ADVANCE
    assert [op is PRUNE for op in taken] == [False] * 5 + [True]


def with_forecast(state: ActionExecutionResult, spec: SimulationSpec, forecast: float) -> ActionExecutionResult:
    report = state.reports[0]
    slot = replace(report.slots[0], predicted_gain=forecast, train_loss=1000.0)
    report = replace(report, slots=(slot, *report.slots[1:]))
    return replace(state, reports=(report,), post_action_masks=(masks(report, spec.layout, spec.lifecycle),))


def test_the_heuristic_acts_on_a_host_that_is_learning_unless_reported_to_wait() -> None:
    spec = world(horizon=40, host=HostCurve(start_pct=10.0, final_pct=95.0, epochs=60.0))
    assert epochs_of(episode("heuristic", spec), GERMINATE)[0] == 0
    assert epochs_of(episode("heuristic", spec, plateau_epochs=3), GERMINATE) == []
