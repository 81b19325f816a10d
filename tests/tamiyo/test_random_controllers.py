"""Chance: uniform where it should be, and as busy as it was told to be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from esper.leyline import BLENDS, LifecycleOp
from esper.tamiyo import Controller, Setting, make_controller
from esper.tamiyo.random_controllers import RATED_OPS
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import legal_specs, run_policy, seeds, world


def make(name: str, spec: SimulationSpec, **params: object) -> Controller:
    return make_controller(name, Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=7), **params)


def rates_of(spec: SimulationSpec, controller: Controller, num_envs: int) -> dict[str, float]:
    counts = Counter(
        step.outcome.op.name for episode in run_policy(spec, controller, seeds(num_envs)) for step in episode
    )
    return {op: counts[op] / num_envs for op in RATED_OPS}


def test_the_first_op_is_uniform_over_ops_and_then_over_their_choices() -> None:
    spec = world(horizon=1)
    first = [episode[0].after for episode in run_policy(spec, make("random", spec), seeds(3000))]
    planted = [slot for report in first for slot in report.slots if slot.seed_id is not None]
    assert len(planted) == pytest.approx(1500, abs=120), "WAIT and GERMINATE are legal at the start"
    for choices, share in (
        (Counter(slot.slot_id for slot in planted), 1 / 3),
        (Counter(slot.blueprint for slot in planted), 1 / 4),
        (Counter(slot.blend for slot in planted), 1 / len(BLENDS)),
    ):
        assert len(choices) == round(1 / share)
        assert all(count / len(planted) == pytest.approx(share, abs=0.05) for count in choices.values())


def test_random_takes_every_kind_of_legal_op() -> None:
    spec = world(horizon=30)
    seen, legal = set(), set()
    for episode in run_policy(spec, make("random", spec), seeds(20)):
        for step in episode:
            seen.add(step.outcome.op)
            legal |= {option.op for option in legal_specs(step.masks, spec.layout)}
    assert seen == legal == set(LifecycleOp)


@pytest.mark.parametrize(
    ("rates", "slots"),
    [
        ((2.4, 2.0, 0.6, 1.3), 3),
        ((0.3, 0.2, 0.1, 0.1), 3),
        ((4.0, 2.5, 2.5, 1.5), 3),
        ((3.5, 3.0, 1.0, 2.2), 3),
        ((4.0, 2.0, 2.0, 2.0), 2),
        ((0.0, 0.0, 0.0, 0.0), 3),
    ],
    ids=["usual", "rare", "churning", "crowded", "as many kept as there are slots", "none"],
)
def test_matched_rates_are_realised(rates: tuple[float, ...], slots: int) -> None:
    spec = world(slots, horizon=30)
    wanted = dict(zip(RATED_OPS, rates, strict=True))
    found = rates_of(spec, make("rate_matched", spec, rates=wanted), 150)
    for op, rate in wanted.items():
        # Ten percent, or three standard errors where the op is rare.
        assert found[op] == pytest.approx(rate, abs=max(0.1 * rate, 3 * (min(rate, 0.25) / 150) ** 0.5))


def test_matched_seeds_are_planted_at_many_times_and_places() -> None:
    spec = world(horizon=40)
    rates = {"GERMINATE": 2.0, "ADVANCE": 1.5, "PRUNE": 0.5, "FOSSILIZE": 1.0}
    episodes = run_policy(spec, make("rate_matched", spec, rates=rates), seeds(60))
    planted = [
        (t, step.outcome.slot)
        for episode in episodes
        for t, step in enumerate(episode)
        if step.outcome.op is LifecycleOp.GERMINATE
    ]
    assert len({t for t, _ in planted}) > 12
    assert {slot for _, slot in planted} == set(spec.slot_ids)


def test_another_run_seed_draws_otherwise() -> None:
    spec = world(horizon=20)
    one = make("random", spec)
    other = make_controller("random", replace(one.setting, run_seed=8))
    assert run_policy(spec, one, seeds(3)) != run_policy(spec, other, seeds(3))
