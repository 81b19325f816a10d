"""Plays and trains in a simulated world: real masks, features, sampling and updates, no host and no engine."""

# N envs

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from esper.leyline import (
    HEAD_NAMES,
    ActionExecutionResult,
    ActionMasks,
    ActionSpec,
    EpisodeSeed,
    EpochReport,
    LifecycleOp,
    PolicyProtocol,
    SeedStage,
    derive_seed,
)
from esper.scripts.sandboxes import NUM_ENVS, Episode, Played, Reward, Sandbox
from esper.simic.agent.ppo import Decision, PPOAgent
from esper.simic.agent.tamiyo_buffer import StepBatch, TamiyoRolloutBuffer
from esper.simic.agent.tamiyo_inputs import Observation, make_cards, make_observation
from esper.simic.agent.tamiyo_network import NetworkShape
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.training.action_execution import parse_sampled_action
from esper.tamiyo.chance import RandomController
from esper.tamiyo.features import (
    CARD_COLUMNS,
    GLOBAL_COLUMNS,
    SLOT_COLUMNS,
    EnvView,
    FeatureContext,
    card_rows,
    global_row,
    slot_rows,
)
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


def network_shape(blueprints: Sequence[str]) -> NetworkShape:
    """The shape of a network that sees Tamiyo's features."""
    return NetworkShape(
        global_columns=tuple(column.name for column in GLOBAL_COLUMNS),
        global_normalised=tuple(column.normalised for column in GLOBAL_COLUMNS),
        slot_columns=tuple(column.name for column in SLOT_COLUMNS),
        slot_normalised=tuple(column.normalised for column in SLOT_COLUMNS),
        card_columns=tuple(column.name for column in CARD_COLUMNS),
        blueprints=tuple(blueprints),
    )


class AgentPolicy:
    """The agent as a controller that plays and does not learn: sampled by a generator per step, or greedy."""

    def __init__(self, agent: PPOAgent, world: SimulationSpec, *, run_seed: int, greedy: bool) -> None:
        self.agent = agent
        self.layout = world.layout
        self.run_seed = run_seed
        self.greedy = greedy
        self.context = FeatureContext(layout=self.layout, lifecycle=world.lifecycle, num_classes=world.num_classes)
        self.cards = make_cards(card_rows(self.layout), self.layout.blueprints, agent.shape.blueprints)
        self.observation: Observation
        self.decision: Decision | None = None
        self.previous: ActionExecutionResult | None = None

    def begin(self, state: ActionExecutionResult) -> None:
        self.decision, self.previous = None, None

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        self.observation = self._observe(state)
        memory = None if self.decision is None else self.decision.state
        self.decision = self.agent.act(self.observation, self.cards, memory, self._uniforms(state))
        ids = [report.env_id for report in state.reports]
        return [parse_sampled_action(env_id, self.decision.action(env), self.layout) for env, env_id in enumerate(ids)]

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        self.previous = before

    def _observe(self, state: ActionExecutionResult) -> Observation:
        views = [
            EnvView(
                report=report,
                masks=masks,
                previous=None if self.previous is None else self.previous.reports[env],
                outcome=state.outcomes[env] if state.outcomes else None,
                context=self.context,
            )
            for env, (report, masks) in enumerate(zip(state.reports, state.post_action_masks, strict=True))
        ]
        return make_observation(
            [global_row(view) for view in views], [slot_rows(view) for view in views], state.post_action_masks
        )

    def _uniforms(self, state: ActionExecutionResult) -> torch.Tensor | None:
        if self.greedy:
            return None
        # An env whose episode ended early no longer counts epochs, so the step is that of the furthest one.
        episode, step = state.reports[0].episode, max(report.epochs_done for report in state.reports)
        generator = torch.Generator().manual_seed(derive_seed(self.run_seed, None, episode, step, "act"))
        return torch.rand(len(state.reports), len(HEAD_NAMES), generator=generator)


class LearningPolicy(AgentPolicy):
    """The agent as a controller that also remembers a round and learns from it."""

    def __init__(self, agent: PPOAgent, world: SimulationSpec, reward: Reward, *, run_seed: int) -> None:
        super().__init__(agent, world, run_seed=run_seed, greedy=False)
        self.horizon = world.horizon
        self.reward = reward
        self.scale = RewardNormalizer()
        self.buffer: TamiyoRolloutBuffer | None = None
        self._paid: list[float] = []

    def begin(self, state: ActionExecutionResult) -> None:
        super().begin(state)
        if self.buffer is None:
            self.buffer = TamiyoRolloutBuffer.allocate(self.horizon, self._observe(state), self.cards)
        self.buffer.clear()
        self._paid = []

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        assert self.buffer is not None
        assert self.decision is not None
        super().store(before, after)
        paid = prices(self.reward, before, after)
        valid = [not report.terminal for report in before.reports]
        no_truncation = torch.zeros(len(paid), dtype=torch.bool)
        self.buffer.write(
            StepBatch(
                observation=self.observation,
                actions_NH=self.decision.actions_NH,
                log_probs_NH=self.decision.log_probs_NH,
                usable_NH=self.decision.usable_NH,
                values_N=self.decision.values_N,
                rewards_N=torch.tensor([self.scale.normalize_only(amount) for amount in paid]),
                terminated_N=torch.tensor([report.terminal for report in after.reports]),
                truncated_N=no_truncation,
                valid_N=torch.tensor(valid),
                bootstraps_N=torch.zeros(len(paid)),
            )
        )
        self._paid += [amount for amount, counts in zip(paid, valid, strict=True) if counts]

    def value_error(self) -> float | None:
        """How far the values of the last round lay from the discounted sum of what came, as a share of the first.

        None where nothing came.
        """
        assert self.buffer is not None
        rollout, gamma = self.buffer.rollout(), self.agent.config.gamma
        sums_TN, following_N = torch.zeros_like(rollout.rewards_TN), torch.zeros_like(rollout.rewards_TN[0])
        for step in reversed(range(len(sums_TN))):
            following_N = rollout.rewards_TN[step] + gamma * following_N
            sums_TN[step] = following_N
        error = (rollout.values_TN - sums_TN)[rollout.valid_TN].square().mean().sqrt()
        start = float(sums_TN[0].abs().mean())
        return float(error) / start if start > 0.0 else None

    def update(self) -> PPOUpdateMetrics:
        """Learns from the round; only then may the reward scale move."""
        assert self.buffer is not None
        metrics = self.agent.update(self.buffer)
        self.scale.update(self._paid)
        return metrics


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
    if sandbox.first_world is not None:
        first = LearningPolicy(agent, sandbox.first_world, sandbox.reward, run_seed=run_seed)
        learn(first, sandbox.first_world, range(sandbox.first_rounds), after_round)
    learner = LearningPolicy(agent, sandbox.world, sandbox.reward, run_seed=run_seed)
    learn(learner, sandbox.world, range(sandbox.first_rounds, sandbox.first_rounds + sandbox.rounds), after_round)
    return judge(sandbox, learner)


def learn(
    learner: LearningPolicy, world: SimulationSpec, rounds: range, after_round: Callable[[], None] = lambda: None
) -> None:
    """Plays and learns, one round of episodes at a time."""
    for number in rounds:
        run_episodes(world, learner, learner.reward, episode_seeds(learner.run_seed, number))
        learner.update()
        after_round()


def judge(sandbox: Sandbox, learner: LearningPolicy) -> Played:
    """Plays greedily, and once more as in training to compare values with what then came."""
    fresh = unseen(learner.run_seed)
    greedy = AgentPolicy(learner.agent, sandbox.world, run_seed=learner.run_seed, greedy=True)
    episodes = run_episodes(sandbox.world, greedy, sandbox.reward, fresh)
    run_episodes(sandbox.world, learner, sandbox.reward, fresh[:NUM_ENVS])
    return Played(episodes=episodes, value_error=learner.value_error())


def episode_seeds(run_seed: int, episode: int, num_envs: int = NUM_ENVS) -> list[EpisodeSeed]:
    """One episode of every env."""
    return [EpisodeSeed(env_id=env, episode=episode, run_seed=run_seed) for env in range(num_envs)]


def unseen(run_seed: int) -> list[EpisodeSeed]:
    """Episodes that no training reaches."""
    return episode_seeds(run_seed, TEST_EPISODE, num_envs=NUM_TEST_ENVS)
