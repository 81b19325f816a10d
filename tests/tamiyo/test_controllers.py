"""Every fixed controller: legal, repeatable, independent of its neighbours, able to continue from a saved memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import ActionSpec, LifecycleOp, wait
from esper.tamiyo import CONTROLLERS, Controller, Setting, make_controller
from esper.tamiyo.masks import observe
from esper.tamiyo.random_controllers import RATED_OPS
from esper.tamiyo.schedule import ScheduleEntry
from esper.tamiyo.simulation import HostCurve, SimulatedWorker, SimulationSpec
from tests.fakes import run_policy, seeds, world

REQUIRED: dict[str, dict[str, Any]] = {
    "rate_matched": {"rates": {"GERMINATE": 2.0, "ADVANCE": 1.5, "PRUNE": 0.5, "FOSSILIZE": 1.0}},
    "schedule": {
        "entries": (
            ScheduleEntry(epoch=1, op=LifecycleOp.GERMINATE, slot="r0c1", blueprint="good", blend="linear_fast"),
            ScheduleEntry(epoch=3, op=LifecycleOp.ADVANCE, slot="r0c1"),
            ScheduleEntry(epoch=7, op=LifecycleOp.FOSSILIZE, slot="r0c1"),
        )
    },
}


def lively(**changes: object) -> SimulationSpec:
    """A world in which every rule has something to do: it plateaus, and forecasts tell good from bad."""
    spec = world(horizon=30, noise_pp=0.2, host=HostCurve(epochs=3.0))
    forecast = {"good": 0.02, "bad": -0.001, "inert": 0.0, "parasite": 0.001}
    blueprints = tuple(replace(blueprint, predicted_gain=forecast[blueprint.name]) for blueprint in spec.blueprints)
    return replace(spec, blueprints=blueprints, **changes)  # type: ignore[arg-type]


def setting(spec: SimulationSpec, run_seed: int = 0) -> Setting:
    return Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=run_seed)


def build(name: str, spec: SimulationSpec, run_seed: int = 0) -> Controller:
    return make_controller(name, setting(spec, run_seed), **REQUIRED.get(name, {}))


def ops(spec: SimulationSpec, controller: Controller, num_envs: int = 3) -> list[list[LifecycleOp]]:
    return [[step.outcome.op for step in episode] for episode in run_policy(spec, controller, seeds(num_envs))]


@pytest.mark.parametrize("name", CONTROLLERS)
@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(0, 1000), st.none() | st.integers(0, 29))
def test_a_controller_stays_inside_the_masks_and_waits_when_it_is_over(
    name: str, num_slots: int, run_seed: int, crash: int | None
) -> None:
    """The worker raises on anything illegal, and `run_policy` goes on stepping envs whose episode has ended."""
    num_slots = max(num_slots, 2 if name == "schedule" else 1)
    spec = world(num_slots, horizon=30, noise_pp=0.5, rollback_epoch=crash)
    episodes = run_policy(spec, build(name, spec, run_seed), seeds(2, run_seed=run_seed))
    assert all(len(episode) == (30 if crash is None else crash + 1) for episode in episodes)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_equal_seeds_decide_alike_and_neighbours_do_not_matter(name: str) -> None:
    spec = lively()
    starts = seeds(4)
    together = run_policy(spec, build(name, spec), starts)
    assert run_policy(spec, build(name, spec), starts) == together
    assert run_policy(spec, build(name, spec), starts[2:3]) == together[2:3]


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller_but_one_acts(name: str) -> None:
    taken = {op for episode in ops(lively(), build(name, lively())) for op in episode}
    if name == "wait_only":
        assert taken == {LifecycleOp.WAIT}
    else:
        assert {LifecycleOp.GERMINATE, LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE} <= taken


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize("epoch", [0, 5, 13])
def test_a_restored_controller_goes_on_as_before(name: str, epoch: int) -> None:
    spec = lively()
    worker, controller = SimulatedWorker(spec), build(name, spec)
    state = observe(worker.reset(seeds(2)))
    controller.begin(state)
    twin = None
    for t in range(spec.horizon):
        if t == epoch:
            twin = build(name, spec)
            twin.load_state_dict(json.loads(json.dumps(controller.state_dict())))
        specs = controller.act(state)
        if twin is not None:
            assert twin.act(state) == specs
        after = observe(worker.step(specs))
        for each in (controller, twin):
            if each is not None:
                each.store(state, after)
        state = after


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_second_round_starts_afresh(name: str) -> None:
    spec = lively()
    controller = build(name, spec)
    run_policy(spec, controller, seeds(4))
    assert run_policy(spec, controller, seeds(2)) == run_policy(spec, build(name, spec), seeds(2))
    fresh = build(name, spec)
    run_policy(spec, fresh, seeds(2))
    assert controller.state_dict() == fresh.state_dict(), "nothing is left of the first round"


@pytest.mark.parametrize("name", CONTROLLERS)
def test_an_episode_that_is_over_teaches_nothing(name: str) -> None:
    spec = lively(rollback_epoch=20)
    worker, controller = SimulatedWorker(spec), build(name, spec)
    state = observe(worker.reset(seeds(1)))
    controller.begin(state)
    memories = []
    for _ in range(spec.horizon):
        after = observe(worker.step(controller.act(state)))
        controller.store(state, after)
        memories.append(controller.state_dict())
        state = after
    assert memories[20:] == [memories[20]] * 10


def test_unknown_controllers_and_parameters_are_answered_with_the_known_ones() -> None:
    spec = world()
    with pytest.raises(ValueError, match=r"'lazy'.*wait_only.*heuristic"):
        make_controller("lazy", setting(spec))
    with pytest.raises(ValueError, match=r"periodic has no parameters K.*every_epochs"):
        make_controller("periodic", setting(spec), K=3)
    with pytest.raises(ValueError, match=r"rate_matched needs rates"):
        make_controller("rate_matched", setting(spec))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("periodic", {"every_epochs": 0}, "every_epochs"),
        ("periodic", {"blueprint": "ghost"}, "unknown blueprint 'ghost'"),
        ("periodic", {"blend": "smooth"}, "unknown blend 'smooth'"),
        ("plateau", {"min_gain": -1.0}, "min_gain"),
        ("plateau", {"patience": 0}, "patience"),
        ("fragrow", {"max_interval": 0.5}, "max_interval"),
        ("heuristic", {"plateau_epochs": -1}, "plateau_epochs"),
        ("largest", {"place": "last"}, "place"),
        ("largest", {"max_live": 0}, "max_live"),
        ("heuristic", {"audition_epochs": 0}, "audition_epochs"),
        ("rate_matched", {"rates": {}}, "exactly the ops"),
        ("rate_matched", {"rates": dict.fromkeys(RATED_OPS, -1.0)}, "at least 0"),
        ("rate_matched", {"rates": {**dict.fromkeys(RATED_OPS, 1.0), "ADVANCE": 0.0}}, "FOSSILIZE <= ADVANCE"),
        ("rate_matched", {"rates": dict.fromkeys(RATED_OPS, 1.0)}, r"FOSSILIZE \+ PRUNE <= GERMINATE"),
    ],
)
def test_impossible_parameters_are_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_controller(name, setting(world()), **params)


def test_a_blueprint_that_fits_nowhere_is_refused() -> None:
    spec = world()
    misfits = tuple(replace(blueprint, fits=blueprint.name != "good") for blueprint in spec.blueprints)
    with pytest.raises(ValueError, match="'good' fits no slot"):
        make_controller("periodic", setting(replace(spec, blueprints=misfits)), blueprint="good")


def test_wait_only_waits() -> None:
    spec = world()
    worker = SimulatedWorker(spec)
    state = observe(worker.reset(seeds(3)))
    specs: tuple[ActionSpec, ...] = build("wait_only", spec).act(state)
    assert specs == tuple(wait(env_id) for env_id in range(3))
