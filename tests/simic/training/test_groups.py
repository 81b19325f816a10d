"""Rounds over groups of tasks: draws that repeat, rewards that compare within a group, twins that wait, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.leyline import LifecycleOp
from esper.runtime.nursery import VALIDATION
from esper.runtime.tasks import get_task_spec
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_inputs import OP
from esper.simic.client import SimicClient, network_shape
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.rewards import RewardConfig, uncalibrated
from esper.simic.run.run_state import load_policy
from esper.simic.run.session import start_again, start_new
from esper.simic.training.config import TrainingConfig, preset
from esper.simic.training.episode_rewards import EpisodeRewards, ModePricing, TaskPricing
from esper.simic.training.rollout import grouped_seeds, run_episodes
from esper.simic.training.simulated import build_simulated_worker
from esper.simic.training.vectorized import open_session
from esper.simic.training.vectorized_trainer import round_seeds
from esper.tolaria.pool import EnginePool
from tests.fakes import world

WORLDS = tuple(world(slots, name=name) for name, slots in (("three", 3), ("one", 1)))
ENVS = 8


def prices(task: str) -> RewardConfig:
    (spec,) = (spec for spec in WORLDS if spec.name == task)
    scale = uncalibrated("contribution", 10)
    return RewardConfig(horizon=10, gamma=0.995, calibration=scale, lifecycle=spec.lifecycle, loss_ref=math.log(10))


def played(relative_to: str) -> SimicClient:
    agent = PPOAgent(network_shape(WORLDS[0].layout.blueprints), PPOConfig(width=16, minibatches=2), run_seed=0)
    rewards = EpisodeRewards(TaskPricing(mode="sparse", config_of=prices))
    client = SimicClient(agent, rewards, RewardNormalizer(), horizon=10, run_seed=0, relative_to=relative_to)
    with EnginePool(build_simulated_worker, WORLDS) as pool:
        run_episodes(pool, client, grouped_seeds(0, 0, ENVS, ["three", "one"]), 10)
    return client


def returns(client: SimicClient) -> torch.Tensor:
    assert client.buffer is not None
    rollout = client.buffer.rollout()
    return (rollout.rewards_TN * rollout.valid_TN).sum(dim=0)


def test_rewards_compare_decisions_within_a_group() -> None:
    client = played("group")
    before = returns(client).clone()
    assert client.update()["performed"]
    after = returns(client)
    for envs in (slice(0, 4), slice(4, 8)):
        assert after[envs].mean().item() == pytest.approx(0.0, abs=1e-5)
        assert after[envs].argsort().tolist() == before[envs].argsort().tolist()
        spread = before[envs].std(unbiased=False).item()
        assert after[envs].std(unbiased=False).item() == pytest.approx(min(1.0, spread / 0.03), rel=1e-3)
    client.update()
    assert torch.equal(returns(client), after), "a second update of the round finds them as they are"
    client.end_round()
    assert client.scale.count == 0


def test_a_twin_waits_and_the_others_are_measured_by_it() -> None:
    client = played("twin")
    assert client.buffer is not None
    rollout = client.buffer.rollout()
    for twin in (3, 7):
        assert (rollout.actions_TNH[:, twin, OP] == LifecycleOp.WAIT).all()
        assert not rollout.usable_TNH[:, twin].any(), "nothing is learned from what it could not choose"
    before = returns(client).clone()
    client.update()
    after = returns(client)
    for envs, twin in ((slice(0, 4), 3), (slice(4, 8), 7)):
        assert after[twin].item() == pytest.approx(0.0, abs=1e-5)
        error = max(0.1, 1.0 - before[twin].item())
        assert after[envs].tolist() == pytest.approx(((before[envs] - before[twin]) / error).tolist(), abs=1e-5)


def test_every_round_draws_other_tasks_and_the_same_again() -> None:
    config = replace(preset("nursery"), envs=12, groups=4)
    first, second = round_seeds(config, 0), round_seeds(config, 1)
    assert first == round_seeds(config, 0)
    assert {seed.task for seed in first}.isdisjoint({seed.task for seed in second})
    assert [seed.group for seed in first] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len({seed.task for seed in first}) == 4
    assert all(int(str(seed.task).partition(":")[2]) < VALIDATION for seed in first)
    assert {seed.task for seed in round_seeds(replace(config, seed=1), 0)}.isdisjoint({seed.task for seed in first})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "nursery", "envs": 9, "groups": 2}, "envs=9 cannot be shared out equally among groups=2"),
        ({"task": "digits_blind", "envs": 4, "groups": 2}, "groups=2 are for --task nursery"),
        ({"task": "nursery", "envs": 2, "groups": 2, "relative_to": "group"}, "at least 2 envs per group"),
        ({"task": "nursery", "calibration_runs": 5}, "--calibration-runs 0"),
        ({"task": "nursery", "calibration_runs": 0, "param_budget": 500}, "have their own episode_length"),
        ({"relative_to": "neighbours"}, "relative_to must be one of nothing, group, twin"),
    ],
)
def test_groups_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**changes)  # type: ignore[arg-type]


def test_one_task_can_be_learned_in_groups_too() -> None:
    config = TrainingConfig(task="digits_blind", envs=4, relative_to="group", calibration_runs=0)
    assert [seed.group for seed in round_seeds(config, 3)] == [0, 0, 0, 0]
    assert all(seed.group is None for seed in round_seeds(replace(config, relative_to="nothing"), 3))


def test_prices_follow_the_task() -> None:
    pricing = TaskPricing(mode="shaped", config_of=prices)
    assert isinstance(pricing.of("one"), ModePricing)
    assert pricing.of("one").config.lifecycle == WORLDS[1].lifecycle
    assert get_task_spec("nursery").horizon == 30


@pytest.mark.parametrize("imitate_rounds", [0, 2])
def test_a_run_over_the_nursery_goes_on_to_the_same_bits(tmp_path: Path, imitate_rounds: int) -> None:
    small = replace(
        preset("nursery"), envs=4, groups=2, rounds=2, minibatches=2, width=16, worker_kind="inline", level="off"
    )
    small = replace(small, imitate_rounds=imitate_rounds)
    with open_session(start_new(small, tmp_path, "whole")) as session:
        session.run()
    with open_session(start_new(small, tmp_path, "parts")) as session:
        session.trainer.run_round()
        session.trainer.offer_checkpoint(last=True)
    with open_session(start_again(tmp_path / "parts", {})) as session:
        session.run()
    whole, parts = (load_policy(tmp_path / name) for name in ("whole", "parts"))
    assert whole.rounds == parts.rounds == 2
    assert whole.agent.to_files() == parts.agent.to_files()
