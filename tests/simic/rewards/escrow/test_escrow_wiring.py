"""Escrow: measured credit flows from the coalition table through the ledger into the reward, and back at the end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from esper.leyline import LifecycleOp
from esper.simic.rewards import MODES, RewardConfig
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import Step, act_on, germinate, play, script_chooser, world
from tests.simic.rewards.pricing import discounted, ledgers, make_config, price

SPEC: SimulationSpec = world(horizon=20)
CONFIG: RewardConfig = make_config(SPEC)
COMMIT = 12


def kept(blueprint: str) -> list[Step]:
    return play(
        SPEC,
        script_chooser(
            [
                (3, germinate("r0c0", blueprint)),
                (4, act_on(LifecycleOp.ADVANCE, "r0c0")),
                (COMMIT, act_on(LifecycleOp.FOSSILIZE, "r0c0")),
            ]
        ),
    )


def credit_paid(steps: list[Step]) -> list[float]:
    return [components.amounts["credit"] for components in price("escrow", steps, SPEC, CONFIG)]


def balance(steps: list[Step], epochs_done: int) -> float:
    """What escrow holds for the one seed after so many epochs, from the ledger alone."""
    report = steps[epochs_done - 1].after
    share = 1.0 if report.slots[0].stage.name == "FOSSILIZED" else 0.5
    return share * ledgers(steps, CONFIG)[epochs_done].credit("r0c0") / CONFIG.calibration.span


def test_escrow_is_outcome_rent_and_price_with_credit_as_an_advance() -> None:
    assert [term.name for term in MODES["escrow"].terms] == ["terminal", "size", "credit", "rent", "action", "rollback"]


def test_each_payment_is_the_discounted_change_of_the_balance() -> None:
    steps = kept("good")
    paid = credit_paid(steps)
    for t in range(4, len(steps) - 1):
        assert paid[t] == pytest.approx(CONFIG.gamma * balance(steps, t + 1) - balance(steps, t), abs=1e-12)
    assert max(paid) > 0.1


def test_a_good_commit_is_rewarded_in_its_own_step_and_a_bad_one_is_punished() -> None:
    assert credit_paid(kept("good"))[COMMIT] > 0.1
    assert credit_paid(kept("bad"))[COMMIT] < -0.05
    assert credit_paid(kept("inert"))[COMMIT] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("blueprint", ["good", "bad", "inert", "parasite"])
def test_the_account_is_settled_in_full_at_the_end(blueprint: str) -> None:
    steps = kept(blueprint)
    paid = credit_paid(steps)
    assert paid[-1] == pytest.approx(-balance(steps, len(steps) - 1), abs=1e-12)
    assert abs(discounted(paid, CONFIG.gamma)) < 1e-12


def test_a_rollback_settles_the_account_too() -> None:
    spec = replace(SPEC, rollback_epoch=15)
    steps = play(spec, script_chooser([(3, germinate("r0c0", "good")), (4, act_on(LifecycleOp.ADVANCE, "r0c0"))]))
    paid = credit_paid(steps)
    assert balance(steps, len(steps) - 1) > 0.1
    assert paid[-1] == pytest.approx(-balance(steps, len(steps) - 1), abs=1e-12)


def test_the_table_is_what_is_paid_for() -> None:
    """Without the measurements behind it, the advance stops; the outcome does not."""
    steps = kept("good")
    blind = [
        replace(step, after=replace(step.after, coalitions=replace(step.after.coalitions, accuracy_pct={}, loss={})))
        for step in steps
    ]
    assert credit_paid(blind) == [0.0] * len(steps)
    seen, unseen = (price("escrow", run, SPEC, CONFIG)[-1] for run in (steps, blind))
    assert unseen.amounts["terminal"] == seen.amounts["terminal"] > 0.0


def test_weight_and_span_scale_the_advance() -> None:
    steps = kept("good")
    doubled = replace(CONFIG, weights=replace(CONFIG.weights, credit=2.0))
    for one, two in zip(price("escrow", steps, SPEC, CONFIG), price("escrow", steps, SPEC, doubled), strict=True):
        assert two.amounts["credit"] == pytest.approx(2.0 * one.amounts["credit"], abs=1e-12)
    assert math.fsum(map(abs, credit_paid(steps))) > 0.5
