"""Plays and trains in a simulated world: real masks, features, sampling and updates, no host and no engine."""

# N envs

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from esper.leyline import (
    ActionExecutionResult,
    ActionMasks,
    ActionOutcome,
    ActionSpec,
    EpisodeCompleted,
    EpisodeSeed,
    EpochReport,
    LifecycleOp,
    PolicyProtocol,
    SeedStage,
)
from esper.scripts.sandboxes import NUM_ENVS, Episode, Played, Reward, Sandbox
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy, SimicClient, network_shape
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.rewards import RewardComponentsTelemetry
from esper.simic.training.episode_rewards import StepAccount
from esper.tamiyo.chance import RandomController
from esper.tamiyo.features import FeatureContext
from esper.tamiyo.observe import observe
from esper.tamiyo.simulation import SimulatedWorker, SimulationSpec
from esper.tamiyo.situation import Setting

TEST_EPISODE = 1_000_000
"""Episodes are numbered by round while training; these are far beyond."""
NUM_TEST_ENVS = 64


def run_episodes(
    world: SimulationSpec, policy: PolicyProtocol, reward: Reward, seeds: Sequence[EpisodeSeed]
) -> tuple[Episode, ...]:
    """One episode per seed, all in step."""
    worker, layout = SimulatedWorker(world), world.layout
    state = observe(worker.reset(seeds), layout, world.lifecycle)
    policy.begin(state)
    totals, germinated = [0.0] * len(seeds), [0] * len(seeds)
    for _ in range(world.horizon):
        after = observe(worker.step(policy.act(state)), layout, world.lifecycle)
        policy.store(state, after)
        for env, paid in enumerate(prices(reward, state, after)):
            totals[env] += paid
            germinated[env] += after.outcomes[env].op is LifecycleOp.GERMINATE
        state = after
    return tuple(
        Episode(total=total, kept=_kept(report), num_germinated=count)
        for total, report, count in zip(totals, state.reports, germinated, strict=True)
    )


def prices(reward: Reward, before: ActionExecutionResult, after: ActionExecutionResult) -> list[float]:
    """The reward of one step in each env; 0 where the episode was over before it."""
    return [
        0.0 if earlier.terminal else reward(earlier, outcome, later)
        for earlier, outcome, later in zip(before.reports, after.outcomes, after.reports, strict=True)
    ]


def _kept(report: EpochReport) -> tuple[str, ...]:
    return tuple(str(slot.blueprint) for slot in report.slots if slot.stage is SeedStage.FOSSILIZED)


class SandboxAccounts:
    """The books of a simulated round: one price per step, no episodes to sum up."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def begin(self, state: ActionExecutionResult) -> None:
        """Nothing is carried from step to step."""

    def compute(self, env: int, before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> StepAccount:
        """The price of one transition."""
        paid = RewardComponentsTelemetry(amounts={"reward": self.reward(before, outcome, after)})
        return StepAccount(components=paid, suspicions=())

    def book(self, before: ActionExecutionResult, after: ActionExecutionResult) -> tuple[StepAccount | None, ...]:
        """The prices of one step; None where the episode was over before it."""
        rows = zip(before.reports, after.outcomes, after.reports, strict=True)
        return tuple(
            None if earlier.terminal else self.compute(env, earlier, outcome, later)
            for env, (earlier, outcome, later) in enumerate(rows)
        )

    def episodes(self) -> tuple[EpisodeCompleted, ...]:
        """A sandbox counts its episodes itself."""
        return ()


def context_of(world: SimulationSpec) -> FeatureContext:
    """What an agent is told once about a world."""
    return FeatureContext(layout=world.layout, lifecycle=world.lifecycle, num_classes=world.num_classes)


def learner_in(
    world: SimulationSpec, agent: PPOAgent, reward: Reward, *, run_seed: int, scale: RewardNormalizer | None = None
) -> SimicClient:
    """The agent as a controller that learns in a world, with the reward scale of its earlier life if it had one."""
    return SimicClient(
        agent,
        context_of(world),
        SandboxAccounts(reward),
        RewardNormalizer() if scale is None else scale,
        horizon=world.horizon,
        run_seed=run_seed,
    )


def value_error(learner: SimicClient) -> float | None:
    """How far the values of the last round lay from the discounted sum of what came, as a share of the first.

    None where nothing came.
    """
    assert learner.buffer is not None
    rollout, gamma = learner.buffer.rollout(), learner.agent.config.gamma
    sums_TN, following_N = torch.zeros_like(rollout.rewards_TN), torch.zeros_like(rollout.rewards_TN[0])
    for step in reversed(range(len(sums_TN))):
        following_N = rollout.rewards_TN[step] + gamma * following_N
        sums_TN[step] = following_N
    error = (rollout.values_TN - sums_TN)[rollout.valid_TN].square().mean().sqrt()
    start = float(sums_TN[0].abs().mean())
    return float(error) / start if start > 0.0 else None


class ScriptPolicy:
    """Plays by a rule on one env's report and masks."""

    def __init__(self, rule: Callable[[EpochReport, ActionMasks], ActionSpec]) -> None:
        self.rule = rule

    def begin(self, state: ActionExecutionResult) -> None:
        """Nothing to remember."""

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        return [self.rule(report, masks) for report, masks in zip(state.reports, state.post_action_masks, strict=True)]

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Nothing to remember."""


# ---- one sandbox


def oracle_play(sandbox: Sandbox, seeds: Sequence[EpisodeSeed]) -> Played:
    """What is possible on these episodes."""
    episodes = run_episodes(sandbox.world, ScriptPolicy(sandbox.oracle()), sandbox.reward, seeds)
    return Played(episodes=episodes, value_error=None)


def random_play(sandbox: Sandbox, seeds: Sequence[EpisodeSeed]) -> Played:
    """What chance reaches on these episodes."""
    setting = Setting(layout=sandbox.world.layout, lifecycle=sandbox.world.lifecycle, run_seed=seeds[0].run_seed)
    episodes = run_episodes(sandbox.world, RandomController(setting), sandbox.reward, seeds)
    return Played(episodes=episodes, value_error=None)


def train(sandbox: Sandbox, *, run_seed: int, after_round: Callable[[], None] = lambda: None) -> Played:
    """Trains an agent from nothing, then lets it play greedily on episodes it has not seen."""
    agent = PPOAgent(network_shape(sandbox.world.layout.blueprints), sandbox.config, run_seed=run_seed)
    scale = RewardNormalizer()
    if sandbox.first_world is not None:
        first = learner_in(sandbox.first_world, agent, sandbox.reward, run_seed=run_seed, scale=scale)
        learn(first, sandbox.first_world, sandbox.reward, range(sandbox.first_rounds), after_round)
    # A world that changes gives no notice, so nothing of the earlier life is forgotten.
    learner = learner_in(sandbox.world, agent, sandbox.reward, run_seed=run_seed, scale=scale)
    rounds = range(sandbox.first_rounds, sandbox.first_rounds + sandbox.rounds)
    learn(learner, sandbox.world, sandbox.reward, rounds, after_round)
    return judge(sandbox, learner)


def learn(
    learner: SimicClient,
    world: SimulationSpec,
    reward: Reward,
    rounds: range,
    after_round: Callable[[], None] = lambda: None,
) -> None:
    """Plays and learns, one round of episodes at a time."""
    for number in rounds:
        run_episodes(world, learner, reward, episode_seeds(learner.run_seed, number))
        learner.update()
        after_round()


def judge(sandbox: Sandbox, learner: SimicClient) -> Played:
    """Plays greedily, and once more as in training to compare values with what then came."""
    fresh = unseen(learner.run_seed)
    greedy = FrozenPolicy(learner.agent, context_of(sandbox.world), run_seed=learner.run_seed, greedy=True)
    episodes = run_episodes(sandbox.world, greedy, sandbox.reward, fresh)
    run_episodes(sandbox.world, learner, sandbox.reward, fresh[:NUM_ENVS])
    return Played(episodes=episodes, value_error=value_error(learner))


def episode_seeds(run_seed: int, episode: int, num_envs: int = NUM_ENVS) -> list[EpisodeSeed]:
    """One episode of every env."""
    return [EpisodeSeed(env_id=env, episode=episode, run_seed=run_seed) for env in range(num_envs)]


def unseen(run_seed: int) -> list[EpisodeSeed]:
    """Episodes that no training reaches."""
    return episode_seeds(run_seed, TEST_EPISODE, num_envs=NUM_TEST_ENVS)
