"""The run in its event log: what the trainer did, told in the order it happened. Nothing here changes training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from esper.leyline import (
    AnomalyDebug,
    BatchSummary,
    EpisodeCompleted,
    EpochReport,
    HostLayout,
    LayerGradientStats,
    ProfileMeasured,
    SeenByPolicy,
    TelemetryEventType,
    TelemetryLevel,
    lr_factor,
)
from esper.nissa import Hub
from esper.runtime.tasks import TaskSpec
from esper.simic.agent.ppo import Decision as AgentDecision
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.client import StepFacts
from esper.simic.telemetry.anomaly_detector import (
    AnomalyDetector,
    AnomalyReport,
    EscalationState,
    carry_window,
    handle_telemetry_escalation,
    level_at,
)
from esper.simic.telemetry.choices import ChoiceCounter
from esper.simic.telemetry.emitters import (
    Outbox,
    apply_slot_telemetry,
    emit_action_distribution,
    emit_anomaly_diagnostics,
    emit_batch_completed,
    emit_last_action,
    emit_mask_hit_rates,
    emit_ppo_update_event,
    emit_reward_summary,
    emit_throughput,
    emit_with_env_context,
)
from esper.simic.telemetry.readings import EpochInputs, UpdateInputs
from esper.simic.telemetry.records import Decision, EnvContext, UpdateClock, brief
from esper.simic.telemetry.report_events import (
    GateWatch,
    SuspicionWatch,
    emit_coalitions_measured,
    emit_epoch_completed,
    emit_trend,
    find_trend,
)
from esper.simic.telemetry.telemetry_config import TelemetryConfig, enabled
from esper.simic.training.counterfactual_eval import points
from esper.simic.training.episode_rewards import StepReward
from esper.simic.training.step_payloads import decision_records

T = TelemetryEventType
PRIMARY_TERMS = frozenset({"terminal", "size", "rollback"})
"""Reward terms that speak of the outcome; all others are shaping."""


class PolicyReads(Protocol):
    """A closer look at the policy, which costs something."""

    def seen(self, facts: StepFacts, envs: Sequence[int]) -> dict[int, SeenByPolicy]:
        """How unusual what it decided on was, by position of the env; empty for a fixed controller."""

    def layers(self) -> Sequence[LayerGradientStats] | None:
        """Its gradients, by layer; None if the last update had none."""

    def bundle(self) -> AnomalyDebug:
        """What goes with an alarm."""


def shaping_share(episodes: Sequence[EpisodeCompleted]) -> float | None:
    """How much of what was paid speaks of anything but the outcome; None where nothing was paid.

    Terms count with what is left of them over a whole episode: an advance that is settled later shapes nothing.
    """
    sizes = [(name, abs(amount)) for episode in episodes for name, amount in episode.components_sum.items()]
    everything = sum(size for _, size in sizes)
    shaping = sum(size for name, size in sizes if name not in PRIMARY_TERMS)
    return shaping / everything if everything > 0.0 else None


class RunLog:
    """Tells one run's steps and rounds to a hub, at the level in force, and watches for alarms.

    Args:
        hub: Where events go.
        config: Level and escalation.
        task: For the learning rate of an epoch and the length of an episode.
        layout: Names of slots and blueprints.
        num_rounds: Of the whole run.
        outbox: Told what the envs are to report.
    """

    def __init__(
        self, hub: Hub, config: TelemetryConfig, task: TaskSpec, layout: HostLayout, *, num_rounds: int, outbox: Outbox
    ) -> None:
        self._hub, self._task, self._num_rounds, self._outbox = hub, task, num_rounds, outbox
        self._layout = layout
        plan = task.optimizer
        self._lrs = [brief(plan.lr * lr_factor(plan.schedule, epoch, task.horizon)) for epoch in range(task.horizon)]
        self._detector = AnomalyDetector()
        self._escalation = EscalationState.of(config, task.horizon)
        self._gates = GateWatch()
        self._suspicions = SuspicionWatch()
        self._choices = ChoiceCounter(layout)
        self._rolling: list[float] = []
        self._num_rollbacks = 0
        self._round_idx = 0

    def round_begins(self, round_idx: int, num_envs: int) -> None:
        """New episodes: counts start again."""
        self._round_idx = round_idx
        self._choices.begin()
        first = [EnvContext(round=round_idx, episode=round_idx, env=env, epoch=0) for env in range(num_envs)]
        apply_slot_telemetry(self._outbox, self._escalation, first)

    def step(self, facts: StepFacts, reads: PolicyReads) -> None:
        """All envs finished a step; each is told whole before the next. Envs that sat it out are not told.

        Args:
            facts: The step.
            reads: A closer look at the policy; asked at level DEBUG only.
        """
        decisions = (
            None
            if facts.decision is None or T.ACTION_TAKEN not in self._outbox.wanted
            else self._decisions(facts, facts.decision, reads)
        )
        for env, reward in enumerate(facts.rewards):
            if reward is not None:
                self._env_step(facts, env, reward, None if decisions is None else decisions[env])
        apply_slot_telemetry(self._outbox, self._escalation, map(self._context, facts.after.reports))

    def _decisions(self, facts: StepFacts, decision: AgentDecision, reads: PolicyReads) -> list[Decision]:
        """What the agent knew when it chose, for every env."""
        closer = [env for env, spec in enumerate(facts.specs) if spec.env_id in self._outbox.closer]
        seen = reads.seen(facts, closer) if closer else {}
        return decision_records(decision, facts.specs, self._layout, closer, seen)

    def _env_step(self, facts: StepFacts, env: int, reward: StepReward, decision: Decision | None) -> None:
        before, report = facts.before.reports[env], facts.after.reports[env]
        spec, outcome = facts.specs[env], facts.after.outcomes[env]
        ctx = self._context(before)
        self._choices.add(facts.before.post_action_masks[env], spec, outcome)
        level = level_at(self._escalation, ctx)
        wanted = enabled(level)
        for event in report.events:
            emit_with_env_context(self._hub, event, ctx)
        if T.EPOCH_COMPLETED in wanted:
            emit_epoch_completed(self._hub, ctx, report, self._lrs[ctx.epoch])
        if T.COALITION_MEASURED in wanted:
            emit_coalitions_measured(self._hub, ctx, report, points(self._task, report.coalitions))
        if T.GATE_EVALUATED in wanted:
            masks, always = facts.after.post_action_masks[env], level is TelemetryLevel.DEBUG
            self._gates.emit(self._hub, ctx, report, masks, self._task.lifecycle, always=always)
        if T.ACTION_TAKEN in wanted:
            emit_last_action(
                self._hub,
                ctx,
                spec,
                outcome,
                decision,
                reward.components,
                facts.scaled[env],
                forced=sum(facts.before.post_action_masks[env].op) == 1,
            )
        self._suspicions.emit(self._hub, ctx, reward.suspicions)
        found = self._detector.check_all(EpochInputs(report=report), ctx)
        emit_anomaly_diagnostics(self._hub, found, ctx)
        handle_telemetry_escalation(found, self._escalation, ctx)
        if report.terminal:
            carry_window(self._escalation, ctx)

    def round_ends(
        self,
        round_idx: int,
        summary: BatchSummary,
        metrics: PPOUpdateMetrics | None,
        episodes: Sequence[EpisodeCompleted],
        profile: ProfileMeasured,
        reads: PolicyReads,
    ) -> None:
        """Tells the outcomes of the episodes, the update and the round; the round is told last.

        Args:
            round_idx: The round.
            summary: Its figures.
            metrics: Its update; None for a fixed controller.
            episodes: In env order.
            profile: Where its time went.
            reads: A closer look at the policy; asked at level DEBUG only.
        """
        clock = UpdateClock(round=round_idx)
        for env, episode in enumerate(episodes):
            last = max(0, episode.num_epochs - 1)
            ctx = EnvContext(round=clock.round, episode=clock.round, env=env, epoch=last)
            emit_reward_summary(self._hub, ctx, episode)
        self._num_rollbacks += summary.num_rollbacks
        learned_at_debug = metrics is not None and level_at(self._escalation, clock) is TelemetryLevel.DEBUG
        if metrics is not None:
            emit_ppo_update_event(self._hub, clock.round, metrics, reads.layers() if learned_at_debug else None)
        found = self._check_round(clock, summary, metrics, episodes)
        bundle = reads.bundle() if learned_at_debug and found.raised else None
        emit_anomaly_diagnostics(self._hub, found, clock, bundle)
        handle_telemetry_escalation(found, self._escalation, clock)
        emit_action_distribution(self._hub, clock.round, self._choices.stats("op"))
        emit_mask_hit_rates(self._hub, clock.round, self._choices.others())
        self._rolling = [*self._rolling, summary.rolling_accuracy_pct]
        emit_trend(self._hub, clock.round, find_trend(self._rolling, self._num_rounds))
        emit_throughput(self._hub, clock.round, profile)
        emit_batch_completed(self._hub, round_idx, summary)

    def _check_round(
        self,
        clock: UpdateClock,
        summary: BatchSummary,
        metrics: PPOUpdateMetrics | None,
        episodes: Sequence[EpisodeCompleted],
    ) -> AnomalyReport:
        inputs = UpdateInputs(
            metrics=metrics,
            ops=self._choices.stats("op"),
            num_rollbacks_total=self._num_rollbacks,
            num_episodes_total=summary.num_episodes_total,
            shaping_share=shaping_share(episodes),
        )
        return self._detector.check_all(inputs, clock)

    def _context(self, before: EpochReport) -> EnvContext:
        """The epoch that follows a report."""
        return EnvContext(round=self._round_idx, episode=before.episode, env=before.env_id, epoch=before.epochs_done)

    # ---- across restarts

    def state_dict(self) -> dict[str, Any]:
        """What the alarms remember, as JSON values."""
        return {
            "detector": self._detector.state_dict(),
            "escalation": self._escalation.state_dict(),
            "num_rollbacks": self._num_rollbacks,
            "rolling": self._rolling,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another log stopped."""
        self._detector.load_state_dict(state["detector"])
        self._escalation.load_state_dict(state["escalation"])
        self._num_rollbacks, self._rolling = state["num_rollbacks"], list(state["rolling"])
