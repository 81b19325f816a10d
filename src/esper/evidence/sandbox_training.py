"""Runs controllers and trains agents in the sandboxes: real masks, features, sampling and updates, a simulated host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from esper.evidence.sandboxes import NUM_ENVS, Episode, Played, Reward, Rule, Sandbox, SandboxResult
from esper.leyline import (
    ActionExecutionResult,
    ActionOutcome,
    ActionSpec,
    EpisodeSeed,
    EpochReport,
    LifecycleOp,
    PolicyProtocol,
    SeedStage,
)
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy, SimicClient, network_shape
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.rewards import Ledger, RewardComponentsTelemetry
from esper.simic.training.episode_rewards import EpisodeRewards, StepReward
from esper.simic.training.rollout import StepObserver, episode_seeds, run_episodes
from esper.simic.training.runner import run_ppo_updates
from esper.simic.training.simulated import build_simulated_worker
from esper.tamiyo.controller import Setting
from esper.tamiyo.random_controllers import RandomController
from esper.tamiyo.simulation import SimulationSpec
from esper.tolaria.pool import EnginePool

TEST_EPISODE = 1_000_000
"""Training episodes are numbered by round; test episodes lie far beyond."""
NUM_TEST_ENVS = 64


def unseen_seeds(run_seed: int) -> tuple[EpisodeSeed, ...]:
    """Episodes that no training reaches."""
    return episode_seeds(run_seed, TEST_EPISODE, NUM_TEST_ENVS)


def open_worlds(
    worlds: Sequence[SimulationSpec],
    kind: str = "inline",
    workers: int | None = None,
    options: Mapping[str, str] | None = None,
) -> EnginePool:
    """Workers for simulated worlds of different names. Results do not depend on their kind and number."""
    return EnginePool(build_simulated_worker, tuple(worlds), kind=kind, workers=workers, options=options)


def play_episodes(
    world: SimulationSpec,
    policy: PolicyProtocol,
    reward: Reward,
    seeds: Sequence[EpisodeSeed],
    pool: EnginePool | None = None,
) -> tuple[Episode, ...]:
    """Runs one episode per seed, in workers that know the world; in this process if there are none."""
    log = _EpisodeLog(reward)
    with open_worlds([world]) if pool is None else nullcontext(pool) as workers:
        named = [replace(seed, task=world.name) for seed in seeds]
        final = run_episodes(workers, policy, named, world.horizon, [log])
    return tuple(
        Episode(
            total=total,
            kept=tuple(str(slot.blueprint) for slot in report.slots if slot.stage is SeedStage.FOSSILIZED),
            num_germinated=count,
        )
        for total, report, count in zip(log.totals, final.reports, log.num_germinated, strict=True)
    )


class _EpisodeLog(StepObserver):
    """Return and germinations of every env."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def reset(self, state: ActionExecutionResult) -> None:
        self.totals = [0.0] * len(state.reports)
        self.num_germinated = [0] * len(state.reports)

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        rows = zip(before.reports, after.outcomes, after.reports, strict=True)
        for env, (earlier, outcome, later) in enumerate(rows):
            self.totals[env] += 0.0 if earlier.terminal else self._reward(earlier, outcome, later)
            self.num_germinated[env] += outcome.op is LifecycleOp.GERMINATE


class SandboxPricing:
    """The reward of a sandbox as a client asks for it: one amount per step, which depends on nothing earlier."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def price(
        self, ledger: Ledger | None, before: EpochReport, outcome: ActionOutcome, after: EpochReport
    ) -> StepReward:
        """Prices one transition."""
        return StepReward(components=RewardComponentsTelemetry(amounts={"reward": self.reward(before, outcome, after)}))


class RulePolicy:
    """Follows a rule on each env's report and masks."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def begin(self, state: ActionExecutionResult) -> None:
        """Nothing to remember."""

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        return [self.rule(report, masks) for report, masks in zip(state.reports, state.post_action_masks, strict=True)]

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Nothing to remember."""


def make_learner(
    world: SimulationSpec, agent: PPOAgent, reward: Reward, *, run_seed: int, scale: RewardNormalizer | None = None
) -> SimicClient:
    """A client that trains the agent in a world, with the reward scale of earlier training if there was any."""
    return SimicClient(
        agent,
        EpisodeRewards(SandboxPricing(reward)),
        RewardNormalizer() if scale is None else scale,
        horizon=world.horizon,
        run_seed=run_seed,
    )


# ---- one sandbox


def run_sandbox(
    sandbox: Sandbox,
    run_seed: int,
    after_round: Callable[[], None] = lambda: None,
    *,
    kind: str = "inline",
    workers: int | None = None,
    options: Mapping[str, str] | None = None,
) -> SandboxResult:
    """Trains an agent and compares it with the oracle and with random actions on the same unseen episodes.

    `kind`, `workers` and `options` say where the worlds run.
    """
    seeds = unseen_seeds(run_seed)
    worlds = [sandbox.world] if sandbox.first_world is None else [sandbox.world, sandbox.first_world]
    with open_worlds(worlds, kind, workers, options) as pool:
        optimum = sandbox.measure(oracle_play(sandbox, seeds, pool))
        random = sandbox.measure(random_play(sandbox, seeds, pool))
        start = time.process_time()
        reached = sandbox.measure(train(sandbox, run_seed=run_seed, after_round=after_round, pool=pool))
    return SandboxResult(
        run_seed=run_seed,
        optimum=optimum,
        random=random,
        reached=reached,
        passed=reached is not None and sandbox.passes(reached, optimum),
        cpu_s=time.process_time() - start,
    )


def oracle_play(sandbox: Sandbox, seeds: Sequence[EpisodeSeed], pool: EnginePool | None = None) -> Played:
    """What is possible on these episodes."""
    episodes = play_episodes(sandbox.world, RulePolicy(sandbox.oracle()), sandbox.reward, seeds, pool)
    return Played(episodes=episodes, value_error=None)


def random_play(sandbox: Sandbox, seeds: Sequence[EpisodeSeed], pool: EnginePool | None = None) -> Played:
    """What random actions reach on these episodes."""
    setting = Setting(layout=sandbox.world.layout, lifecycle=sandbox.world.lifecycle, run_seed=seeds[0].run_seed)
    return Played(
        episodes=play_episodes(sandbox.world, RandomController(setting), sandbox.reward, seeds, pool),
        value_error=None,
    )


def train(
    sandbox: Sandbox,
    *,
    run_seed: int,
    after_round: Callable[[], None] = lambda: None,
    pool: EnginePool | None = None,
) -> Played:
    """Trains an agent from scratch, then evaluates it greedily on episodes it has not seen."""
    agent = PPOAgent(network_shape(sandbox.world.layout.blueprints), sandbox.config, run_seed=run_seed)
    scale = RewardNormalizer()
    if sandbox.first_world is not None:
        first = make_learner(sandbox.first_world, agent, sandbox.reward, run_seed=run_seed, scale=scale)
        _learn(first, sandbox.first_world, sandbox.reward, range(sandbox.first_rounds), after_round, pool)
    # The world changes without notice, so the agent and its reward scale carry over.
    learner = make_learner(sandbox.world, agent, sandbox.reward, run_seed=run_seed, scale=scale)
    rounds = range(sandbox.first_rounds, sandbox.first_rounds + sandbox.rounds)
    _learn(learner, sandbox.world, sandbox.reward, rounds, after_round, pool)
    return evaluate(sandbox, learner, pool)


def _learn(
    learner: SimicClient,
    world: SimulationSpec,
    reward: Reward,
    rounds: range,
    after_round: Callable[[], None],
    pool: EnginePool | None,
) -> None:
    for number in rounds:
        play_episodes(world, learner, reward, episode_seeds(learner.run_seed, number, NUM_ENVS), pool)
        run_ppo_updates(learner, 0)
        after_round()


def evaluate(sandbox: Sandbox, learner: SimicClient, pool: EnginePool | None = None) -> Played:
    """Plays greedily, and once more as in training to compare values with returns."""
    seeds = unseen_seeds(learner.run_seed)
    greedy = FrozenPolicy(learner.agent, run_seed=learner.run_seed, greedy=True)
    episodes = play_episodes(sandbox.world, greedy, sandbox.reward, seeds, pool)
    play_episodes(sandbox.world, learner, sandbox.reward, seeds[:NUM_ENVS], pool)
    return Played(episodes=episodes, value_error=_value_error(learner))


def _value_error(learner: SimicClient) -> float | None:
    """RMSE of the values of the last round, as a share of the mean return at the start; None if that is zero."""
    assert learner.buffer is not None
    rollout, gamma = learner.buffer.rollout(), learner.agent.config.gamma
    returns_TN, following_N = torch.zeros_like(rollout.rewards_TN), torch.zeros_like(rollout.rewards_TN[0])
    for step in reversed(range(len(returns_TN))):
        following_N = rollout.rewards_TN[step] + gamma * following_N
        returns_TN[step] = following_N
    error = (rollout.values_TN - returns_TN)[rollout.valid_TN].square().mean().sqrt()
    start = float(returns_TN[0].abs().mean())
    return float(error) / start if start > 0.0 else None
