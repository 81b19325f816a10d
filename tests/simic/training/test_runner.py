"""Several updates over one rollout: they add up, their metrics are one, and a round is still counted once."""

from __future__ import annotations

import pytest
import torch

from esper.simic.agent import PPOUpdateMetrics
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import SimicClient
from esper.simic.training.config import TrainingConfig
from esper.simic.training.runner import run_ppo_updates
from esper.simic.training.vectorized import train_ppo_vectorized
from tests.simic.agent.rounds import play_round, same_bits, small_agent, small_world, weights
from tests.simic.telemetry.updates import metrics

SPEC = small_world()


def trained(num_updates: int, **changes: object) -> tuple[PPOAgent, SimicClient, PPOUpdateMetrics]:
    agent = small_agent(SPEC, **{"target_kl": 1e9, **changes})
    learner = play_round(agent, SPEC)
    merged, _ = run_ppo_updates(learner, 0, num_updates)
    assert merged is not None
    return agent, learner, merged


def test_two_updates_move_the_policy_further_than_one() -> None:
    start = weights(small_agent(SPEC))
    (once, _, one), (twice, _, two) = trained(1), trained(2)

    def distance(agent: PPOAgent) -> float:
        now, names = weights(agent), [name for name, _ in agent.network.named_parameters()]
        return float(torch.stack([(now[name] - start[name]).square().sum() for name in names]).sum())

    assert distance(twice) > 1.2 * distance(once) > 0.0
    assert two["num_optimizer_steps"] == 2 * one["num_optimizer_steps"]
    assert two["approx_kl"] is not None
    assert one["approx_kl"] is not None
    assert two["approx_kl"] > one["approx_kl"]


def test_a_round_counts_once_however_often_it_is_learned_from() -> None:
    (once, first, one), (twice, second, two) = trained(1), trained(2)
    assert twice.env_steps == once.env_steps == two["env_steps"] == one["env_steps"] == 4 * SPEC.horizon
    assert (twice.updates, once.updates) == (2, 1)
    assert second.scale.state_dict() == first.scale.state_dict()
    for agent in (once, twice):
        assert agent.network.obs_norm.stats.count == agent.network.value.returns.count == 4 * SPEC.horizon
    assert two["observations"] == one["observations"], "judged by the statistics the round was acted with"
    assert {head.num_usable for head in two["heads"].values()} == {head.num_usable for head in one["heads"].values()}


def test_one_update_is_what_it_was_without_the_setting() -> None:
    agent = small_agent(SPEC, target_kl=1e9)
    learner = play_round(agent, SPEC)
    alone = learner.update()
    learner.end_round()
    other, _, merged = trained(1)
    assert merged == alone
    assert same_bits(weights(agent), weights(other))


def test_no_update_follows_one_that_moved_the_policy_far_enough() -> None:
    agent, _, merged = trained(5, target_kl=1e-6, lr=1e-2)
    assert agent.updates == 1
    assert merged["kl_stopped"]


class Scripted:
    """Gives metrics out one by one."""

    def __init__(self, *updates: PPOUpdateMetrics) -> None:
        self.left = list(updates)
        self.ended = 0

    def update(self) -> PPOUpdateMetrics | None:
        return self.left.pop(0) if self.left else None

    def end_round(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(("performed", "left", "num_skipped"), [(True, 1, 0), (False, 2, 4)])
def test_updates_end_with_one_that_was_skipped(performed: bool, left: int, num_skipped: int) -> None:
    learner = Scripted(metrics(performed=performed), metrics(), metrics())
    _, counted = run_ppo_updates(learner, 3, 2)
    assert (len(learner.left), learner.ended, counted) == (left, 1, num_skipped)


def test_a_controller_that_does_not_learn_is_never_skipped() -> None:
    learner = Scripted()
    assert run_ppo_updates(learner, 3, 2) == (None, 0)
    assert learner.ended == 1


def test_a_run_updates_as_often_per_round_as_it_is_set_to() -> None:
    run = TrainingConfig(task="digits_blind", rounds=1, envs=2, episode_length=3, calibration_runs=0, target_kl=1e9)
    for num_updates in (1, 3):
        agent, _ = train_ppo_vectorized(run, worker_kind="inline", ppo_updates_per_batch=num_updates)
        assert (agent.updates, agent.env_steps) == (num_updates, 6)
