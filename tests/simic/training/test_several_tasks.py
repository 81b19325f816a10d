"""Hosts of several tasks in one pool: who is who, the same bits everywhere, one policy that acts and learns on all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from esper.leyline import ActionExecutionResult, ActionOutcome, ActionSpec, EpisodeSeed, EpochReport, wait
from esper.runtime.tasks import get_task_spec, load_task_data, load_tasks_data
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_inputs import MixedInputs
from esper.simic.client import FrozenPolicy, SimicClient, network_shape
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.rewards import RewardComponentsTelemetry
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.env_factory import WorkerSpec, build_worker, make_worker_spec
from esper.simic.training.episode_rewards import EpisodeRewards, StepReward
from esper.simic.training.rollout import run_episodes
from esper.simic.training.simulated import build_simulated_worker
from esper.tamiyo.controller import Setting
from esper.tamiyo.random_controllers import RandomController
from esper.tolaria.pool import EnginePool
from tests.fakes import world
from tests.tolaria.worlds import OPEN_GATES, act, digest, facts, tiny_task

MLP = tiny_task("digits_mlp", horizon=5, slots=("r0c0", "r0c1"))
CNN = tiny_task("digits_blind", horizon=7)
HORIZON = 7
NAMES = (MLP.name, CNN.name, MLP.name, CNN.name)


def spec() -> WorkerSpec:
    return make_worker_spec([MLP, CNN], load_tasks_data([MLP, CNN]))


def starts(episode: int = 0, names: Sequence[str] = NAMES) -> list[EpisodeSeed]:
    return [EpisodeSeed(env_id=i, episode=episode, run_seed=3, task=name) for i, name in enumerate(names)]


SCRIPT: dict[tuple[int, int], ActionSpec] = {
    (0, 0): act(0, "GERMINATE", "r0c0", "mlp.mlp", "linear_fast"),
    (0, 1): act(0, "ADVANCE", "r0c0"),
    (1, 0): act(1, "GERMINATE", "r0c0", "cnn.conv", "linear_fast"),
    (1, 1): act(1, "ADVANCE", "r0c0"),
    (1, 4): act(1, "FOSSILIZE", "r0c0"),
    (3, 2): act(3, "GERMINATE", "r0c1", "cnn.conv", "gated"),
}


def play(pool: EnginePool, epochs: Sequence[int] = range(HORIZON)) -> list[object]:
    seen = [facts(pool.reset(starts()))] if 0 in epochs else []
    steps = ([SCRIPT.get((i, epoch), wait(i)) for i in range(len(NAMES))] for epoch in epochs)
    return seen + [facts(pool.step(specs)) for specs in steps]


@pytest.fixture(scope="module")
def expected() -> tuple[str, dict[int, str]]:
    with EnginePool(build_worker, spec()) as pool:
        return repr(play(pool)), digest(pool)


def test_every_env_trains_a_host_of_the_task_that_its_seed_names() -> None:
    with EnginePool(build_worker, spec()) as pool:
        state = observe_reset(pool, starts())
        assert [context.task for context in state.contexts] == list(NAMES)
        assert [context.layout.topology for context in state.contexts] == ["mlp", "cnn", "mlp", "cnn"]
        assert [len(masks.blueprint_by_slot) for masks in state.post_action_masks] == [2, 3, 2, 3]
        ends = []
        for _ in range(HORIZON):
            state = execute_actions(pool, [wait(i) for i in range(4)])
            ends.append([report.terminal for report in state.reports])
        assert [row.count(True) for row in zip(*ends, strict=True)] == [3, 1, 3, 1]
        assert [context.task for context in state.contexts] == list(NAMES)
        with pytest.raises(ValueError, match="several tasks"):
            pool.context  # noqa: B018
        with pytest.raises(ValueError, match="env 0 must name a task of digits_mlp, digits_blind"):
            pool.reset([EpisodeSeed(env_id=0, episode=0, run_seed=0)])


def test_beside_hosts_of_another_task_a_host_gets_the_bits_it_would_get_alone(
    expected: tuple[str, dict[int, str]],
) -> None:
    with EnginePool(build_worker, make_worker_spec(CNN, load_task_data(CNN))) as pool:
        pool.reset([starts()[1]])
        for epoch in range(HORIZON):
            pool.step([SCRIPT.get((1, epoch), wait(1))])
        assert digest(pool)[1] == expected[1][1]


@pytest.mark.slow
def test_two_processes_give_the_same_bits_also_from_snapshots_and_after_a_kill(
    expected: tuple[str, dict[int, str]],
) -> None:
    with EnginePool(build_worker, spec(), kind="process", workers=2) as pool:
        first = play(pool, range(3))
        packed = pool.snapshot()
        os.kill(pool.hellos[1].pid, 9)
        rest = play(pool, range(3, HORIZON))
        assert (repr(first + rest), digest(pool)) == expected
        assert pool.num_restarts == 1
        pool.restore(packed)
        again = play(pool, range(3, HORIZON))
        assert (repr(first + again), digest(pool)) == expected
        state = execute_actions(pool, [wait(i) for i in range(4)])
        assert [context.task for context in state.contexts] == list(NAMES)


def test_a_task_that_was_not_listed_is_found_by_its_name() -> None:
    """Nothing but the name travels, so the tasks of a round may be new to the workers."""
    empty = make_worker_spec([], [])
    task = get_task_spec("digits_limited")
    listed = make_worker_spec(task, load_task_data(task))
    digests = []
    for kind, workers, described in (("inline", 1, listed), ("process", 1, empty)):
        with EnginePool(build_worker, described, kind=kind, workers=workers) as pool:
            state = observe_reset(pool, starts(names=["digits_limited"]))
            execute_actions(pool, [wait(0)])
            digests.append((state.contexts, digest(pool)))
    assert digests[0] == digests[1]
    with EnginePool(build_worker, empty) as pool, pytest.raises(ValueError, match="unknown task 'nothing'"):
        pool.reset(starts(names=["nothing"]))


def test_rows_that_tasks_share_are_stored_once(tmp_path: object) -> None:
    same = replace(MLP, name="same")
    stored = make_worker_spec([MLP, CNN, same], load_tasks_data([MLP, CNN, same])).tasks
    assert stored["same"].rows["train_inputs"] is stored[MLP.name].rows["train_inputs"]
    assert stored["same"].rows["val_targets"] is not stored[CNN.name].rows["train_targets"]


def test_hosts_of_a_group_differ_by_decisions_only() -> None:
    seeds = [EpisodeSeed(env_id=i, episode=0, run_seed=3, task=CNN.name, group=7) for i in range(3)]
    seeds += [EpisodeSeed(env_id=3, episode=0, run_seed=3, task=CNN.name)]
    plant = {i: act(i, "GERMINATE", "r0c0", "cnn.conv", "linear_fast") for i in (0, 1)}
    with EnginePool(build_worker, spec()) as pool:
        pool.reset(seeds)
        for epoch in range(3):
            pool.step([plant[i] if epoch == 0 and i in plant else wait(i) for i in range(4)])
        tensors = {env_id: packed.tensors for env_id, packed in pool.snapshot().items()}
    assert tensors[0] == tensors[1]
    assert tensors[0] != tensors[2]
    assert tensors[2] != tensors[3], "an env without a group draws for itself"


# ---- one policy for all


class Gain:
    """Points of validation accuracy."""

    def price(self, ledger: object, before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> StepReward:
        gain = (after.val_accuracy_pct - before.val_accuracy_pct) / 10.0
        return StepReward(components=RewardComponentsTelemetry(amounts={"gain": gain}))


WORLDS = tuple(world(slots, name=name, lifecycle=OPEN_GATES) for name, slots in (("three", 3), ("one", 1)))


def learner(run_seed: int = 0) -> SimicClient:
    shape = network_shape(WORLDS[0].layout.blueprints)
    agent = PPOAgent(shape, PPOConfig(width=16, minibatches=3, ppo_epochs=2), run_seed=run_seed)
    return SimicClient(agent, EpisodeRewards(Gain()), RewardNormalizer(), horizon=10, run_seed=run_seed)


def round_of(client: SimicClient, names: Sequence[str], episode: int = 0) -> ActionExecutionResult:
    with EnginePool(build_simulated_worker, WORLDS) as pool:
        return run_episodes(pool, client, starts(episode, names), 10)


def test_choices_are_those_of_a_policy_that_sees_each_layout_alone() -> None:
    client = learner()
    names = ["three", "one", "one", "three", "one"]
    round_of(client, names)
    assert client.buffer is not None
    mixed = client.buffer.rollout()
    assert isinstance(mixed.inputs, MixedInputs)
    for name in ("three", "one"):
        alone = learner()
        with EnginePool(build_simulated_worker, WORLDS) as pool:
            run_episodes(pool, alone, [seed for seed in starts(0, names) if seed.task == name], 10)
        here = [i for i, other in enumerate(names) if other == name]
        assert alone.buffer is not None
        for tensor, own in zip(mixed.tensors().values(), alone.buffer.rollout().tensors().values(), strict=True):
            assert torch.equal(tensor[:, here], own)


def test_one_update_learns_from_all_layouts_and_starts_at_ratio_one() -> None:
    client = learner()
    round_of(client, ["three", "one", "three", "one", "one"])
    before = {name: tensor.clone() for name, tensor in client.agent.network.named_parameters()}
    metrics = client.update()
    client.end_round()
    assert metrics["performed"]
    assert client.agent.last_ratios_B is not None
    first_minibatch = client.agent.last_ratios_B[:5]
    assert torch.allclose(first_minibatch, torch.ones(5), atol=1e-5)
    assert metrics["env_steps"] == 50
    assert any(not torch.equal(before[name], tensor) for name, tensor in client.agent.network.named_parameters())
    round_of(client, ["one", "three", "one"], episode=1)  # other envs have other layouts now
    assert client.update()["performed"]
    client.check_policy()


def test_the_gradient_of_a_mixed_minibatch_is_that_of_its_parts() -> None:
    """Losses are sums over rows, so a joint pass must give what the parts give together."""
    from esper.simic.agent.advantages import with_gae
    from esper.simic.agent.ppo_update import UpdateSettings, compute_losses

    client = learner()
    round_of(client, ["three", "one", "three", "one"])
    assert client.buffer is not None
    agent = client.agent
    experience = with_gae(client.buffer.rollout(), gamma=0.99, lam=0.95, std_floor=1.0)
    settings = UpdateSettings.at(agent.config, 0, agent.exploration)
    together = compute_losses(agent.network, experience, torch.arange(4), settings)
    parts = [compute_losses(agent.network, experience, torch.tensor(envs), settings) for envs in ([0, 2], [1, 3])]
    # Each part weighs its rows as half a minibatch.
    assert torch.isclose(together.policy, sum(part.policy for part in parts) / 2, rtol=1e-5, atol=1e-7)
    assert torch.isclose(together.value, sum(part.value for part in parts) / 2, rtol=1e-5)
    assert together.head_sums_4H[3].tolist() == sum(part.head_sums_4H[3] for part in parts).tolist()


def test_real_hosts_of_two_topologies_learn_under_one_policy() -> None:
    blueprints = tuple(dict.fromkeys((*MLP.blueprint_keys, *CNN.blueprint_keys)))
    agent = PPOAgent(network_shape(blueprints), PPOConfig(width=16, minibatches=2), run_seed=1)
    client = SimicClient(agent, EpisodeRewards(Gain()), RewardNormalizer(), horizon=HORIZON, run_seed=1)
    with EnginePool(build_worker, spec()) as pool:
        final = run_episodes(pool, client, starts(), HORIZON)
        assert all(report.terminal for report in final.reports)
        metrics = client.update()
        assert metrics["performed"]
        assert metrics["env_steps"] == 2 * 5 + 2 * 7, "short episodes end earlier and count less"
        client.end_round()
        greedy = FrozenPolicy(agent, run_seed=1, greedy=True)
        run_episodes(pool, greedy, starts(1), HORIZON)


def test_a_fixed_controller_still_plays_one_layout() -> None:
    with EnginePool(build_simulated_worker, WORLDS) as pool:
        setting = Setting(layout=WORLDS[0].layout, lifecycle=OPEN_GATES, run_seed=0)
        run_episodes(pool, RandomController(setting), starts(0, ["three", "three"]), 10)
