"""The policy side of the engine: states into observations, choices into specs, steps into rewards and rollout rows.

Streams, processes and loaders are unknown here. A learning client, a frozen policy and a fixed controller all run in
the same step loop.
"""

# N envs, H heads

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, zip_longest

import torch

from esper.leyline import (
    HEAD_NAMES,
    ActionExecutionResult,
    ActionOutcome,
    ActionSpec,
    EpisodeCompleted,
    EpochReport,
    HostLayout,
    LifecycleOp,
    ModelFileError,
    NumericFailure,
    PolicyProtocol,
    derive_seed,
)
from esper.simic.agent.advantages import Rollout
from esper.simic.agent.policy import LSTMState
from esper.simic.agent.ppo import PolicyOutput, PPOAgent
from esper.simic.agent.sampling import Choice
from esper.simic.agent.tamiyo_buffer import TamiyoRolloutBuffer
from esper.simic.agent.tamiyo_inputs import OP, Cards, EnvGroup, RolloutInputs, make_cards, step_of
from esper.simic.agent.tamiyo_network import NetworkShape
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.control.normalization import REWARD_LIMIT, RewardNormalizer
from esper.simic.rewards.groups import group_scales, twin_scales
from esper.simic.training.action_execution import action_indices, parse_sampled_action
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.episode_rewards import EpisodeRewards, StepReward, price_step
from esper.tamiyo.features import CARD_COLUMNS, GLOBAL_COLUMNS, OFFER_COLUMNS, SEES, SLOT_COLUMNS, card_rows
from esper.tamiyo.masks import wait_only_masks

OWN_CHOICE = ("blueprints", "seen_columns")
"""Of a network's shape: what may differ from one to the next."""
MEANT = 0.8
"""A chance of waiting above this is no tie with something else."""


def network_shape(blueprints: Sequence[str], sees: str = "all") -> NetworkShape:
    """The shape of a network that sees Tamiyo's features, or those of `features.SEES` that are named."""
    return NetworkShape(
        global_columns=tuple(column.name for column in GLOBAL_COLUMNS),
        global_normalised=tuple(column.normalised for column in GLOBAL_COLUMNS),
        slot_columns=tuple(column.name for column in SLOT_COLUMNS),
        slot_normalised=tuple(column.normalised for column in SLOT_COLUMNS),
        card_columns=tuple(column.name for column in CARD_COLUMNS),
        offer_columns=tuple(column.name for column in OFFER_COLUMNS),
        blueprints=tuple(blueprints),
        seen_columns=SEES[sees],
    )


def check_columns(shape: NetworkShape) -> None:
    """Compares what a network was built to see with what it would see now.

    Weights know columns by position only: another feature in the place of one would be taken for it without a sign.

    Raises:
        ModelFileError: Names the first difference.
    """
    today = network_shape(shape.blueprints)
    for name in (entry.name for entry in fields(NetworkShape) if entry.name not in OWN_CHOICE):
        for position, (built, now) in enumerate(zip_longest(getattr(shape, name), getattr(today, name))):
            if built != now:
                raise ModelFileError(
                    f"the policy was built for other features: {name}[{position}] is {_or_nothing(built)} in it and "
                    f"{_or_nothing(now)} in this release. Use it with the release that made it, or train a new one"
                )


def _or_nothing(value: object) -> str:
    return "nothing" if value is None else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One finished step of all envs, for the log."""

    before: ActionExecutionResult
    after: ActionExecutionResult
    specs: tuple[ActionSpec, ...]
    rewards: tuple[StepReward | None, ...]
    """None for an env whose episode was over before, or whose worker was lost."""
    scaled: tuple[float | None, ...]
    """Rewards as the agent learns from them; None where there is nothing to learn, or the scale is not known yet."""
    groups: tuple[EnvGroup, ...]
    """What the agent saw when it chose, layout by layout; empty for a fixed controller."""
    decision: PolicyOutput | None
    """What it sampled, with log-probs and values."""


class FrozenPolicy:
    """The agent as a controller that does not learn.

    Samples are drawn per env from a generator keyed by run seed, env, episode and step, so a choice does not depend
    on which envs play beside it.

    Greedy, it takes the most likely choice and draws nothing, but does not wait longer than half of all samples would.
    Hosts may have other slots than those the agent was trained with, and differ from each other: those of one layout
    are decided on together.

    Raises:
        ModelFileError: The agent was built for other features than this release has.
    """

    def __init__(self, agent: PPOAgent, *, run_seed: int, greedy: bool) -> None:
        check_columns(agent.shape)
        self.agent = agent
        self.run_seed = run_seed
        self.greedy = greedy
        self._layouts: list[tuple[tuple[int, ...], Cards]] = []
        """Positions of the envs of each layout, and its cards."""
        self._groups: tuple[EnvGroup, ...] = ()
        self._decision: PolicyOutput | None = None
        self._specs: tuple[ActionSpec, ...] = ()
        self._previous: ActionExecutionResult | None = None
        self._log_waiting_N: torch.Tensor | None = None
        """Greedy: logarithm of the chance that a sample would have done nothing since the last op."""

    def begin(self, state: ActionExecutionResult) -> None:
        """Forgets the last episodes and looks at the hosts of the new ones."""
        self._decision, self._previous, self._log_waiting_N = None, None, None
        positions: dict[HostLayout, list[int]] = {}
        for position, context in enumerate(state.contexts):
            positions.setdefault(context.layout, []).append(position)
        self._layouts = [
            (tuple(envs), make_cards(card_rows(layout), layout.blueprints, self.agent.shape.blueprints))
            for layout, envs in positions.items()
        ]

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        """Chooses for every env."""
        self._groups = self._observe(state)
        memory = None if self._decision is None else self._decision.state
        self._decision = self.agent.act_in_groups(self._groups, memory, self._uniforms(state))
        if self.greedy:
            self._decision = self._when_most_would(self._decision, memory)
        self._specs = tuple(
            parse_sampled_action(report.env_id, action, context.layout)
            for report, action, context in zip(state.reports, self._decision.actions(), state.contexts, strict=True)
        )
        return self._specs

    def _when_most_would(self, decision: PolicyOutput, memory: LSTMState | None) -> PolicyOutput:
        """Where half of all samples would have done something by now, waiting has had its time.

        An op now or an epoch later brings much the same, so a policy may give it a fair chance in every epoch and
        waiting a better one each time. The most likely choice would then be to wait for ever, which no sample does.
        Where waiting is all but certain it is meant: the penalty towards the prior keeps the rest from vanishing.
        """
        waits_N = decision.choice.actions_BH[:, OP] == LifecycleOp.WAIT
        waiting_N = decision.choice.distributions[OP].probs_BC()[:, LifecycleOp.WAIT]
        log_waiting_N = torch.where(waiting_N > MEANT, 0.0, waiting_N.log())
        if self._log_waiting_N is not None:
            log_waiting_N = log_waiting_N + self._log_waiting_N
        acts_N = waits_N & (log_waiting_N < math.log(0.5))
        self._log_waiting_N = torch.where(waits_N & ~acts_N, log_waiting_N, 0.0)
        if not bool(acts_N.any()):
            return decision
        return self.agent.act_in_groups([_must_act(group, acts_N) for group in self._groups], memory, None)

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Remembers the last state: the next observation shows what changed."""
        self._previous = before

    def _observe(self, state: ActionExecutionResult) -> tuple[EnvGroup, ...]:
        return tuple(
            EnvGroup(
                envs_G=torch.tensor(envs),
                observation=batch_signals_to_features(state, self._previous, envs),
                cards=cards,
            )
            for envs, cards in self._layouts
        )

    def _uniforms(self, state: ActionExecutionResult) -> torch.Tensor | None:
        if self.greedy:
            return None
        rows = []
        for report in state.reports:
            rng_seed = derive_seed(self.run_seed, report.env_id, report.episode, report.epochs_done, "act")
            rows.append(torch.rand(len(HEAD_NAMES), generator=torch.Generator().manual_seed(rng_seed)))
        return torch.stack(rows)


class SimicClient(FrozenPolicy):
    """The agent as a controller that samples, computes rewards, fills a rollout buffer and learns from it.

    The reward scale is frozen during a round and refreshed after its update. Before the first update it is not known:
    the first round is stored unscaled and scaled as a whole when it is over. With `relative_to`, one of
    `rewards.groups.RELATIVE_TO`, every round is: envs with the same task are a group, and each other's scale.

    In the first `imitate_rounds` rounds the policy learns to choose what the teacher would. The teacher decides on
    every other host, the policy on the rest, so that it is also taught where its own mistakes lead.
    """

    def __init__(
        self,
        agent: PPOAgent,
        rewards: EpisodeRewards,
        scale: RewardNormalizer,
        *,
        horizon: int,
        run_seed: int,
        relative_to: str | None = None,
        teacher: PolicyProtocol | None = None,
        imitate_rounds: int = 0,
    ) -> None:
        super().__init__(agent, run_seed=run_seed, greedy=False)
        self.relative_to = relative_to
        self._teacher, self._imitate_rounds = teacher, imitate_rounds
        self._leader: PolicyProtocol | None = None
        """The teacher, in a round in which it teaches."""
        self._lesson: Choice | None = None
        """What the leader would have done in this step, and what the policy thinks of it."""
        self._tasks: tuple[str, ...] = ()
        self._twins: frozenset[int] = frozenset()
        """Positions of the hosts that must wait, because the others of their group are compared with them."""
        self.rewards = rewards
        self.scale = scale
        self._horizon = horizon
        self._raw_rewards: list[list[float]] = []
        self._num_clipped_before = scale.num_clipped
        self.last_step: StepFacts
        """The step stored last."""
        self.buffer: TamiyoRolloutBuffer | None = None
        """The round so far; None before the first."""

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts a round."""
        before = self._layouts
        super().begin(state)
        self.rewards.begin(state)
        self._leader = self._teacher if state.reports[0].episode < self._imitate_rounds else None
        self._lesson = None
        self._tasks = tuple(context.task for context in state.contexts)
        last = {task: position for position, task in enumerate(self._tasks)}
        self._twins = frozenset(last.values()) if self.relative_to == "twin" else frozenset()
        self._raw_rewards = [[] for _ in state.reports]
        self._num_clipped_before = self.scale.num_clipped
        if self.buffer is None or not _same_layouts(before, self._layouts):
            self.buffer = TamiyoRolloutBuffer.allocate(self._horizon, self._observe(state))
        self.buffer.clear()
        if self._leader is not None:
            self._leader.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        """Samples for every env; while it imitates, the teacher's choice takes the place of every other sample."""
        memory = None if self._decision is None else self._decision.state
        sampled = super().act(state)
        if self._leader is None:
            return sampled
        taught = self._leader.act(self._with_twins(state))
        pairs = enumerate(zip(taught, sampled, strict=True))
        self._specs = tuple(own if position % 2 else lesson for position, (lesson, own) in pairs)
        self._lesson = self._judge(state, taught, memory).choice
        self._decision = self._judge(state, self._specs, memory)
        return self._specs

    def _judge(
        self, state: ActionExecutionResult, specs: Sequence[ActionSpec], memory: LSTMState | None
    ) -> PolicyOutput:
        """What the policy thinks of choices that somebody made."""
        contexts = zip(specs, state.contexts, strict=True)
        actions_NH = torch.tensor([action_indices(spec, context.layout) for spec, context in contexts])
        return self.agent.act_in_groups(self._groups, memory, None, actions_NH)

    def compute_reward(self, before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
        """Reward of the next transition of its env's episode, before scaling."""
        return self.rewards.compute_reward(before, outcome, after)

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Computes the rewards of the step and writes it into the buffer.

        Raises:
            NumericFailure: A reward is not finite. It is in neither the buffer nor the scale.
        """
        assert self.buffer is not None
        assert self._decision is not None
        super().store(before, after)
        if self._leader is not None:
            self._leader.store(before, after)
        self._bootstrap_lost(before, after)
        rewards = price_step(self, before, after)
        known = self.scale.count > 0 and self.relative_to is None
        stored = [self.scale.normalize_only(r) if known and r is not None else r for r in rewards]
        self.buffer.write(self._step(after, stored))
        for raw, reward in zip(self._raw_rewards, rewards, strict=True):
            raw += [] if reward is None else [reward]
        self.last_step = StepFacts(
            before=before,
            after=after,
            specs=self._specs,
            rewards=_priced(self.rewards, rewards, after.reports),
            scaled=tuple(stored) if known else (None,) * len(stored),
            groups=self._groups,
            decision=self._decision,
        )

    def _step(self, after: ActionExecutionResult, scaled: Sequence[float | None]) -> Rollout[RolloutInputs]:
        assert self._decision is not None
        choice = self._decision.choice if self._lesson is None else self._lesson
        num_envs = len(after.reports)
        return Rollout(
            inputs=step_of(self._groups),
            actions_TNH=choice.actions_BH[None],
            log_probs_TNH=choice.log_probs_BH[None],
            usable_TNH=choice.usable_BH[None],
            values_TN=self._decision.values_N[None],
            rewards_TN=torch.tensor([[0.0 if reward is None else reward for reward in scaled]]),
            terminated_TN=torch.tensor([[report.terminal for report in after.reports]]),
            truncated_TN=torch.zeros(1, num_envs, dtype=torch.bool),
            valid_TN=torch.tensor([[reward is not None for reward in scaled]]),
            bootstraps_TN=torch.zeros(1, num_envs),
        )

    def _bootstrap_lost(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """A lost worker truncates: the last complete row of its envs is bootstrapped with the critic's value."""
        assert self.buffer is not None
        assert self._decision is not None
        for env, report in enumerate(before.reports):
            if report.env_id in after.truncated_bootstrap_targets and not report.terminal:
                self.buffer.truncate(env, float(self._decision.values_N[env]))

    def update(self) -> PPOUpdateMetrics:
        """One update on the rollout. Several may follow each other; `end_round` comes after the last."""
        assert self.buffer is not None
        if self.relative_to is not None:
            self._relate()
        elif not self.scale.count:
            # In other units than all later rounds, the first would leave the critic with a wrong scale.
            rewards_TN = self.buffer.storage.rewards_TN
            rewards_TN.copy_(self.scale.update_and_normalize(rewards_TN, chain(*self._raw_rewards)))
            self._raw_rewards = []
        metrics = self.agent.update(self.buffer, imitate=self._leader is not None)
        metrics["num_rewards_clipped"] = self.scale.num_clipped - self._num_clipped_before
        return metrics

    def _relate(self) -> None:
        """Turns the rewards of the round into what their groups make of them, once."""
        assert self.buffer is not None
        if not self._raw_rewards:
            return
        rollout = self.buffer.rollout()
        ended = (rollout.terminated_TN & rollout.valid_TN).any(dim=0).tolist()
        returns = [sum(raw) if over else None for raw, over in zip(self._raw_rewards, ended, strict=True)]
        if self.relative_to == "twin":
            scores = [self.rewards.final_score(report.env_id) for report in self.last_step.after.reports]
            twins = [position in self._twins for position in range(len(returns))]
            scales = twin_scales(self._tasks, returns, scores, twins)
        else:
            scales = group_scales(self._tasks, returns)
        for env, scale in enumerate(scales):
            rows = rollout.valid_TN[:, env].nonzero()[:, 0]
            rollout.rewards_TN[:, env] /= scale.unit
            if len(rows) and ended[env]:
                rollout.rewards_TN[rows[-1], env] -= scale.baseline / scale.unit
        rollout.rewards_TN.clamp_(-REWARD_LIMIT, REWARD_LIMIT)
        self._raw_rewards = []

    def _observe(self, state: ActionExecutionResult) -> tuple[EnvGroup, ...]:
        return super()._observe(self._with_twins(state))

    def _with_twins(self, state: ActionExecutionResult) -> ActionExecutionResult:
        """The state in which twins can only wait."""
        masks = tuple(
            wait_only_masks(context.layout) if position in self._twins else own
            for position, (context, own) in enumerate(zip(state.contexts, state.post_action_masks, strict=True))
        )
        return replace(state, post_action_masks=masks)

    def check_policy(self) -> None:
        """Lets the policy choose again where it chose last: weights that are all finite may be too large to use.

        Raises:
            NumericFailure: It gives no scores, or no values.
        """
        if self._decision is None:
            return  # nothing was played, so nothing was learned
        again = self.agent.act_in_groups(self._groups, None, None)
        if not bool(torch.isfinite(again.values_N).all()):
            raise NumericFailure("the critic's values are not finite; lower the learning rate")

    def end_round(self) -> None:
        """Only now may the statistics of observations and rewards move, except that the first round has no scale."""
        assert self.buffer is not None
        self.agent.end_round(self.buffer)
        if self.relative_to is None:
            self.scale.update(chain(*self._raw_rewards))

    def episode_stats(self) -> tuple[EpisodeCompleted, ...]:
        """The round's episodes, in env order."""
        return self.rewards.episodes()


def _must_act(group: EnvGroup, acts_N: torch.Tensor) -> EnvGroup:
    """The same envs, some of which may not wait."""
    masks = group.observation.masks
    op_GO = masks.op_NO.clone()
    op_GO[:, LifecycleOp.WAIT] &= ~acts_N[group.envs_G]
    return replace(group, observation=replace(group.observation, masks=replace(masks, op_NO=op_GO)))


def _same_layouts(
    before: Sequence[tuple[tuple[int, ...], Cards]], now: Sequence[tuple[tuple[int, ...], Cards]]
) -> bool:
    """True if what was stored of the one fits the other."""
    return len(before) == len(now) and all(
        envs == others
        and cards.rows_SPC.equal(other_cards.rows_SPC)
        and cards.blueprint_ids_P.equal(other_cards.blueprint_ids_P)
        for (envs, cards), (others, other_cards) in zip(before, now, strict=True)
    )


def _priced(
    rewards: EpisodeRewards, totals: Sequence[float | None], reports: Sequence[EpochReport]
) -> tuple[StepReward | None, ...]:
    return tuple(
        None if reward is None else rewards.last_step(report.env_id)
        for reward, report in zip(totals, reports, strict=True)
    )


class FixedClient:
    """A fixed controller: rewarded and logged like a learning one, but `update` learns nothing."""

    def __init__(self, policy: PolicyProtocol, rewards: EpisodeRewards) -> None:
        self.policy = policy
        self.rewards = rewards
        self.last_step: StepFacts
        self._specs: tuple[ActionSpec, ...] = ()

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts a round."""
        self.rewards.begin(state)
        self.policy.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        """Asks the rule."""
        self._specs = tuple(self.policy.act(state))
        return self._specs

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Computes the rewards of the step, for the log."""
        self.policy.store(before, after)
        rewards = price_step(self.rewards, before, after)
        self.last_step = StepFacts(
            before=before,
            after=after,
            specs=self._specs,
            rewards=_priced(self.rewards, rewards, after.reports),
            scaled=(None,) * len(rewards),
            groups=(),
            decision=None,
        )

    def update(self) -> None:
        """Nothing to learn."""

    def end_round(self) -> None:
        """Nothing to refresh."""

    def episode_stats(self) -> tuple[EpisodeCompleted, ...]:
        """The round's episodes, in env order."""
        return self.rewards.episodes()


Client = SimicClient | FixedClient
"""The controller of a run, learned or fixed."""
