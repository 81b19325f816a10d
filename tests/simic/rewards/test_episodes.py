"""Properties of whole episodes, for every mode: what cancels, what nets a loss, what is paid once."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import EpochReport
from esper.simic.rewards import MODES, RewardWeights, compute_components
from esper.simic.rewards.modes import TermKind
from tests.fakes import Chooser, play, random_chooser, script_chooser, world
from tests.simic.rewards.pricing import discounted, discounted_return, inputs, make_config, price, wait_steps
from tests.simic.rewards.strategies import PRUNING, Episode, episodes

NEUTRAL = [(mode.name, term.name) for mode in MODES.values() for term in mode.terms if term.kind is TermKind.NEUTRAL]


@settings(max_examples=150)
@given(episodes())
def test_neutral_terms_cancel_exactly_over_any_episode(episode: Episode) -> None:
    for mode, term in NEUTRAL:
        amounts = [step.amounts[term] for step in price(mode, episode.steps, episode.spec, episode.config)]
        assert abs(discounted(amounts, episode.config.gamma)) < 1e-12


def test_neutral_terms_are_not_silent() -> None:
    """The property above would also hold for terms that are always 0."""
    spec = world(horizon=20)
    steps = play(spec, random_chooser(random.Random(5)))
    for mode, term in NEUTRAL:
        assert any(abs(step.amounts[term]) > 1e-3 for step in price(mode, steps, spec, make_config(spec)))


def closed_cycles(episode: Episode) -> list[tuple[int, int]]:
    """Segments between neighbouring seedless states that are not just waiting; the last step is left out."""
    seedless = [t for t, step in enumerate(episode.steps) if empty(step.before)]
    return [(i, j) for i, j in itertools.pairwise(seedless) if j > i + 1]


def empty(report: EpochReport) -> bool:
    return not any(slot.stage.has_seed for slot in report.slots)


def cycle_sums(episode: Episode, mode: str) -> list[float]:
    rewards = [components.total for components in price(mode, episode.steps, episode.spec, episode.config)]
    return [discounted(rewards[i:j], episode.config.gamma) for i, j in closed_cycles(episode)]


@settings(max_examples=60)
@given(episodes(op_weights=PRUNING, may_crash=False, max_slots=2))
def test_whatever_is_grown_and_pruned_again_nets_a_loss(episode: Episode) -> None:
    free = RewardWeights(germinate=0.0, prune=0.0, advance=0.0)
    no_costs = replace(episode, config=replace(episode.config, weights=free))
    for mode in MODES.values():
        sums = cycle_sums(episode, mode.name)
        if any(term.name == "action" for term in mode.terms):
            assert all(total < 0.0 for total in sums)
        else:
            assert all(total == 0.0 for total in sums)
        assert all(total <= 1e-12 for total in cycle_sums(no_costs, mode.name))


def test_the_cycles_above_are_found() -> None:
    spec = world(1, horizon=30)
    steps = play(spec, random_chooser(random.Random(3), PRUNING))
    assert len(closed_cycles(Episode(spec=spec, steps=steps, config=make_config(spec)))) >= 2


@pytest.mark.parametrize("family", ["contribution", "loss"])
@pytest.mark.parametrize("mode", MODES)
def test_waiting_earns_exactly_nothing_before_the_end(mode: str, family: str) -> None:
    spec = world(noise_pp=1.0)
    *early, last = price(mode, wait_steps(spec), spec, make_config(spec, family=family))
    assert all(amount == 0.0 for components in early for amount in components.amounts.values())
    assert last.total == last.amounts["terminal"] != 0.0


@settings(max_examples=60)
@given(episodes())
def test_components_are_the_terms_of_the_mode_and_sum_to_the_reward(episode: Episode) -> None:
    for mode in MODES.values():
        for transition in inputs(episode.steps, episode.spec, episode.config):
            components = compute_components(mode.name, transition)
            assert list(components.amounts) == [term.name for term in mode.terms]
            assert all(math.isfinite(amount) for amount in components.amounts.values())
            assert components.total == math.fsum(components.amounts.values())
            again = json.loads(json.dumps(dict(components.amounts)))
            assert list(again.items()) == list(components.amounts.items())
            assert compute_components(mode.name, transition) == components


@settings(max_examples=60)
@given(episodes())
def test_exactly_one_transition_carries_the_outcome(episode: Episode) -> None:
    crashed = episode.steps[-1].after.rollback_reason is not None
    for mode in MODES:
        *early, last = price(mode, episode.steps, episode.spec, episode.config)
        for components in early:
            assert components.amounts["terminal"] == components.amounts["size"] == components.amounts["rollback"] == 0.0
        if crashed:
            assert last.amounts["terminal"] == last.amounts["size"] == 0.0
            assert last.amounts["rollback"] == -2.0
        else:
            assert last.amounts["rollback"] == 0.0


def then_wait(choose: Chooser, epoch: int) -> Chooser:
    waiting = script_chooser([])
    return lambda state, layout: (choose if state.reports[0].epochs_done < epoch else waiting)(state, layout)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 19), st.floats(0.0, 100.0), st.sampled_from([0.9, 0.995, 1.0]))
def test_crashing_is_worse_than_waiting_whatever_the_end_would_bring(
    seed: int, crash: int, final_pct: float, gamma: float
) -> None:
    spec = world(horizon=20)
    config = make_config(spec, gamma=gamma)
    crashed_spec = replace(spec, rollback_epoch=crash)
    crashed = play(crashed_spec, then_wait(random_chooser(random.Random(seed)), crash))
    assert len(crashed) == crash + 1, "the penalty lands on the row that caused it"
    waited = play(spec, then_wait(random_chooser(random.Random(seed)), crash))
    end = replace(waited[-1], after=replace(waited[-1].after, committed_accuracy_pct=final_pct))
    for mode in MODES:
        worst = discounted_return(mode, crashed, crashed_spec, config)
        assert worst < discounted_return(mode, [*waited[:-1], end], spec, config)


@pytest.mark.parametrize("crash", range(10))
@pytest.mark.parametrize("mode", MODES)
def test_the_penalty_is_paid_at_any_epoch(mode: str, crash: int) -> None:
    spec = world(rollback_epoch=crash)
    amounts = [components.amounts["rollback"] for components in price(mode, wait_steps(spec), spec, make_config(spec))]
    assert amounts == [0.0] * crash + [-2.0]


@pytest.mark.parametrize("weight", RewardWeights.__record_fields__)  # type: ignore[attr-defined]
def test_each_weight_matters(weight: str) -> None:
    rewards, silenced = (all_rewards(RewardWeights(**changes)) for changes in ({}, {weight: 0.0}))
    assert rewards != silenced


def all_rewards(weights: RewardWeights) -> list[float]:
    """Every reward of every mode over episodes in which everything happens."""
    found = []
    for seed, crash in ((1, None), (2, None), (3, 15)):
        spec = world(horizon=20, rollback_epoch=crash)
        steps = play(spec, random_chooser(random.Random(seed)))
        for mode in MODES:
            found += [components.total for components in price(mode, steps, spec, make_config(spec, weights=weights))]
    return found
