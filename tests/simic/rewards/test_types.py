"""Points of both families: larger is better, and only differences in score matter."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import ActionOutcome, CoalitionTable, EpochReport
from esper.simic.rewards import MODES, RewardConfig, open_ledger
from esper.simic.rewards.ledger import advance_ledger
from esper.simic.rewards.types import coalition_points, committed_points, loss_points
from tests.fakes import Step, world
from tests.simic.rewards.pricing import ledgers, make_config, price, wait_steps
from tests.simic.rewards.strategies import Episode, episodes

LOSSES = st.floats(0.0, 20.0)


def loss_config() -> RewardConfig:
    return make_config(world(), family="loss")


@given(LOSSES, LOSSES)
def test_a_lower_loss_is_worth_more_points(one: float, two: float) -> None:
    low, high = sorted((one, two))
    assert loss_points(low, math.log(10)) >= loss_points(high, math.log(10)) >= -100.0


def test_loss_points_run_from_a_uniform_guess_to_no_loss() -> None:
    uniform = math.log(10)
    assert loss_points(uniform, uniform) == 0.0
    assert loss_points(0.0, uniform) == 100.0
    assert loss_points(1000.0, uniform) == loss_points(2.0 * uniform, uniform) == -100.0


@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_the_lower_of_two_final_losses_earns_the_larger_terminal(one: float, two: float) -> None:
    spec = world()
    config = loss_config()
    steps = wait_steps(spec)

    def terminal(loss: float) -> float:
        end = replace(steps[-1], after=replace(steps[-1].after, committed_loss=loss))
        return price("sparse", [*steps[:-1], end], spec, config)[-1].amounts["terminal"]

    low, high = sorted((one, two))
    assert terminal(low) >= terminal(high)
    assert terminal(0.0) > terminal(3.0)


def test_a_seed_whose_removal_raises_the_loss_earns_credit() -> None:
    config = make_config(world(), family="loss", reference=False)
    report = wait_steps(world())[0].after
    outcome = wait_steps(world())[0].outcome
    memory = open_ledger(with_table(report, {0: 1.5}, "TRAINING"), config)
    for with_seed, without_seed in ((1.0, 1.5),) * 3:
        memory = advance_ledger(memory, outcome, with_table(report, {1: with_seed, 0: without_seed}), config)
    assert memory.credit("r0c0") > 0.0
    for with_seed, without_seed in ((1.5, 1.0),):
        memory = advance_ledger(memory, outcome, with_table(report, {1: with_seed, 0: without_seed}), config)
    assert memory.credit("r0c0") < 0.0


def with_table(report: EpochReport, loss: Mapping[int, float], stage: str = "HOLDING") -> EpochReport:
    """A report with one seed in r0c0 and this loss table; the accuracy table says the opposite."""
    slot = report.slots[0]
    seeded = replace(slot, stage=type(slot.stage)[stage], seed_id="0.0.r0c0.0", alpha=1.0 if 1 in loss else 0.0)
    table = CoalitionTable(
        slot_ids=("r0c0",) if 1 in loss else (),
        accuracy_pct={mask: 20.0 * value for mask, value in loss.items()},
        loss=dict(loss),
    )
    return replace(report, slots=(seeded, *report.slots[1:]), coalitions=table)


def all_components(steps: list[Step], episode: Episode, config: RewardConfig) -> list[list[float]]:
    return [
        [amount for step in price(mode, steps, episode.spec, config) for amount in step.amounts.values()]
        for mode in MODES
    ]


@settings(max_examples=50)
@given(episodes(families=("contribution",)))
def test_families_whose_points_are_tied_agree_in_every_component(episode: Episode) -> None:
    """The loss of a simulated world is a straight line in its accuracy; floor, span and reference are mapped alike."""
    span = episode.config.calibration.span
    tied = make_config(episode.spec, family="loss", gamma=episode.config.gamma, span=span)
    same = make_config(episode.spec, gamma=episode.config.gamma, span=span)
    for one, two in zip(
        all_components(episode.steps, episode, same), all_components(episode.steps, episode, tied), strict=True
    ):
        assert one == pytest.approx(two, abs=1e-12)


def rescaled(step: Step, factor: float) -> Step:
    def scale(report: EpochReport) -> EpochReport:
        table = report.coalitions
        assert report.committed_accuracy_pct is not None
        return replace(
            report,
            committed_accuracy_pct=factor * report.committed_accuracy_pct,
            coalitions=replace(table, accuracy_pct={m: factor * v for m, v in table.accuracy_pct.items()}),
        )

    return replace(step, before=scale(step.before), after=scale(step.after))


@settings(max_examples=50)
@given(episodes(families=("contribution",)))
def test_the_unit_of_points_does_not_matter(episode: Episode) -> None:
    old = replace(episode.config.calibration, ceiling=episode.config.calibration.floor + 15.0)
    assert old.reference is not None
    new = replace(
        old, floor=10 * old.floor, ceiling=10 * old.ceiling, reference=tuple(10 * points for points in old.reference)
    )
    ones = all_components(episode.steps, episode, replace(episode.config, calibration=old))
    tens = all_components(
        [rescaled(step, 10.0) for step in episode.steps], episode, replace(episode.config, calibration=new)
    )
    for one, ten in zip(ones, tens, strict=True):
        assert one == pytest.approx(ten, abs=1e-11)


def relabelled(step: Step, order: list[int]) -> Step:
    """The same transition with its slots renamed and listed in another order: new position i is old `order[i]`."""
    names = {slot.slot_id: f"r9c{slot.slot_id.removeprefix('r0c')}" for slot in step.before.slots}

    def report(old: EpochReport) -> EpochReport:
        slots = tuple(replace(old.slots[i], slot_id=names[old.slots[i].slot_id]) for i in order)
        table = old.coalitions
        players = [slot.slot_id for slot in slots if slot.slot_id.replace("r9", "r0") in table.slot_ids]
        bits = [players.index(names[slot_id]) for slot_id in table.slot_ids]

        def move(mask: int) -> int:
            return sum(1 << bits[i] for i in range(len(bits)) if mask >> i & 1)

        new = CoalitionTable(
            slot_ids=tuple(players),
            accuracy_pct={move(mask): value for mask, value in table.accuracy_pct.items()},
            loss={move(mask): value for mask, value in table.loss.items()},
        )
        return replace(old, slots=slots, coalitions=new)

    slot = step.outcome.slot
    outcome: ActionOutcome = replace(step.outcome, slot=None if slot is None else names[slot])
    return replace(step, before=report(step.before), outcome=outcome, after=report(step.after))


@settings(max_examples=50)
@given(episodes(), st.randoms(use_true_random=False))
def test_names_and_order_of_slots_do_not_matter(episode: Episode, rng: random.Random) -> None:
    order = list(range(len(episode.spec.slot_ids)))
    rng.shuffle(order)
    renamed = [relabelled(step, order) for step in episode.steps]
    for one, two in zip(
        all_components(episode.steps, episode, episode.config),
        all_components(renamed, episode, episode.config),
        strict=True,
    ):
        assert one == pytest.approx(two, abs=1e-12)
    old, new = (ledgers(steps, episode.config)[-1] for steps in (episode.steps, renamed))
    for slot_id, entry in old.slots.items():
        assert new.slots[slot_id.replace("r0", "r9")].credit == pytest.approx(entry.credit, abs=1e-12)


def test_an_unmeasured_committed_loss_has_no_points() -> None:
    report = replace(wait_steps(world())[-1].after, committed_loss=None)
    assert committed_points(report, loss_config()) is None
    assert committed_points(report, make_config(world())) is not None
    assert set(coalition_points(report.coalitions, loss_config())) == {0}
