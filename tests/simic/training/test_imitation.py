"""Learning from a rule first: what is stored, who decides, that it is learned, and that PPO goes on afterwards."""

from __future__ import annotations

import torch

from esper.leyline import ActionExecutionResult, ActionSpec, FeatureContext, LifecycleOp, PolicyProtocol
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_inputs import OP
from esper.simic.client import FrozenPolicy, SimicClient, network_shape
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.training.action_execution import action_indices, observe_reset, parse_sampled_action
from esper.simic.training.episode_rewards import EpisodeRewards, TaskPricing
from esper.simic.training.rollout import StepObserver, grouped_seeds, run_episodes
from esper.simic.training.runner import run_ppo_updates
from esper.simic.training.simulated import build_simulated_worker
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.side_by_side import OnePerHost
from esper.tolaria.pool import EnginePool
from tests.fakes import legal_specs
from tests.simic.training.test_groups import WORLDS, prices

TASKS, ENVS, HORIZON = ["three", "one"], 8, 10


def largest() -> OnePerHost:
    def make(context: FeatureContext, horizon: int) -> PolicyProtocol:
        setting = Setting(layout=context.layout, lifecycle=context.lifecycle, run_seed=0)
        return make_controller("largest", setting)

    return OnePerHost(make)


class Deeds(StepObserver):
    """What was done, and what the rule would have done on the same hosts."""

    def __init__(self) -> None:
        self.rule = largest()
        self.pairs: list[list[tuple[ActionSpec, ActionSpec]]] = []

    def reset(self, state: ActionExecutionResult) -> None:
        self.rule.begin(state)

    def acted(self, state: ActionExecutionResult, specs: object) -> None:
        self.pairs.append(list(zip(specs, self.rule.act(state), strict=True)))  # type: ignore[call-overload]

    def stored(self, before: ActionExecutionResult, specs: object, after: ActionExecutionResult) -> None:
        self.rule.store(before, after)

    def share(self, envs: range) -> float:
        same = [done == ruled for step in self.pairs for done, ruled in (step[env] for env in envs)]
        return sum(same) / len(same)


def learner(imitate_rounds: int, relative_to: str = "group") -> SimicClient:
    config = PPOConfig(width=16, minibatches=2, lr=1e-2, ppo_epochs=8)
    agent = PPOAgent(network_shape(WORLDS[0].layout.blueprints), config, run_seed=0)
    rewards = EpisodeRewards(TaskPricing(mode="sparse", config_of=prices))
    return SimicClient(
        agent,
        rewards,
        RewardNormalizer(),
        horizon=HORIZON,
        run_seed=0,
        relative_to=relative_to,
        teacher=largest(),
        imitate_rounds=imitate_rounds,
    )


def play(policy: FrozenPolicy, episode: int) -> Deeds:
    deeds = Deeds()
    with EnginePool(build_simulated_worker, WORLDS) as pool:
        run_episodes(pool, policy, grouped_seeds(0, episode, ENVS, TASKS), HORIZON, (deeds,))
    return deeds


def test_indices_name_every_legal_choice() -> None:
    with EnginePool(build_simulated_worker, WORLDS) as pool:
        state = observe_reset(pool, grouped_seeds(0, 0, 2, TASKS))
    for masks, context in zip(state.post_action_masks, state.contexts, strict=True):
        for spec in legal_specs(masks, context.layout):
            slot, blueprint, blend, op = action_indices(spec, context.layout)
            action = {"slot": slot, "blueprint": blueprint, "blend": blend, "op": op}
            assert parse_sampled_action(0, action, context.layout) == spec  # type: ignore[arg-type]


def test_the_rule_decides_on_every_other_host_and_is_what_is_learned_from() -> None:
    client = learner(imitate_rounds=1, relative_to="twin")
    deeds = play(client, 0)
    assert deeds.share(range(0, ENVS, 2)) == 1.0
    assert deeds.share(range(1, ENVS, 2)) < 0.9, "the others are led by a policy that knows nothing yet"
    assert client.buffer is not None
    rollout = client.buffer.rollout()
    ruled = torch.tensor([[rule.op for _, rule in step] for step in deeds.pairs])
    for twin in (3, 7):
        ruled[:, twin] = LifecycleOp.WAIT
    assert torch.equal(rollout.actions_TNH[..., OP], ruled)
    metrics = client.update()
    assert metrics["performed"]
    assert metrics["approx_kl"] is None, "no ratio was compared"


def test_after_imitation_the_greedy_policy_does_what_the_rule_does_and_then_learns_by_itself() -> None:
    rounds = 12
    client = learner(imitate_rounds=rounds)
    before = play(FrozenPolicy(client.agent, run_seed=0, greedy=True), 100).share(range(ENVS))
    losses = []
    for episode in range(rounds):
        play(client, episode)
        metrics, _ = run_ppo_updates(client, 0)
        assert metrics is not None
        losses.append(metrics["policy_loss"])
    after = play(FrozenPolicy(client.agent, run_seed=0, greedy=True), 100).share(range(ENVS))
    assert losses[-1] < losses[0] / 3
    assert before < 0.8
    assert after > 0.97, after
    assert client.agent.network.obs_norm.stats.count.item() == rounds * ENVS * HORIZON
    play(client, rounds)
    assert client.update()["approx_kl"] is not None, "now it learns from what its own choices brought"
