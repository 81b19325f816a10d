"""The observer of a run: emits its events, watches for alarms, offers checkpoints. Nothing here changes training."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from esper.leyline import (
    ActionExecutionResult,
    ActionSpec,
    BatchSummary,
    CudaMemory,
    EpisodeCompleted,
    EpochReport,
    PhaseTime,
    ProfileMeasured,
    TelemetryEventType,
    TelemetryLevel,
    lr_factor,
    make_event,
)
from esper.leyline.files import free_bytes
from esper.nissa import Hub, complain
from esper.runtime.tasks import get_task_spec
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.client import StepFacts
from esper.simic.run.checkpoint_schedule import CheckpointWriter
from esper.simic.run.environment import run_started
from esper.simic.run.run_state import run_files
from esper.simic.run.session import RunStart, log_trouble
from esper.simic.telemetry.anomaly_detector import (
    AnomalyDetector,
    EscalationState,
    carry_window,
    handle_telemetry_escalation,
    level_at,
)
from esper.simic.telemetry.decisions import ChoiceCounter, decision_records
from esper.simic.telemetry.emitters import (
    Decision,
    apply_slot_telemetry,
    brief,
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
from esper.simic.telemetry.readings import EnvContext, UpdateInputs
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
from esper.simic.training.vectorized_trainer import Recorder, RunParts, VectorizedPPOTrainer

T = TelemetryEventType
PRIMARY_TERMS = frozenset({"terminal", "size", "rollback"})
"""Reward terms that pay for the outcome; all others are shaping."""


def open_recorder(
    start: RunStart, hub: Hub, telemetry: TelemetryConfig, checkpoints: CheckpointWriter | None, parts: RunParts
) -> RunRecorder:
    """Emits the first events of a session and returns its recorder."""
    found = start.checkpoint
    payload = run_started(
        parts.config,
        parts.task,
        parts.data,
        parts.pool.context.layout,
        workers=(parts.pool.kind, len(parts.pool.hellos)),
        resumed_from=None if found is None else found.path.name,
        differences=start.differences,
    )
    hub.emit(make_event(T.RUN_STARTED, payload))
    if found is not None and checkpoints is not None:
        checkpoints.loaded(found, start.rejected)
    path = None if start.run is None else start.run.path
    recorder = RunRecorder(hub, telemetry, parts, checkpoints=checkpoints, run_path=path)
    if start.saved is not None and (log := start.saved.facts["log"]) is not None:
        recorder.load_state_dict(log)
    return recorder


class RunRecorder(Recorder):
    """Emits what happens in one run, at the level in force, and offers its boundaries as checkpoints.

    Args:
        hub: Takes the events.
        telemetry: Level and escalation.
        parts: The run; its pool is set to report what the level wants.
        checkpoints: Saves boundaries; None where nothing is saved.
        run_path: Directory whose free space is reported; None if the run is not on disk.
    """

    def __init__(
        self,
        hub: Hub,
        telemetry: TelemetryConfig,
        parts: RunParts,
        *,
        checkpoints: CheckpointWriter | None = None,
        run_path: Path | None = None,
    ) -> None:
        self._hub, self._parts = hub, parts
        self._checkpoints, self._run_path = checkpoints, run_path
        self._detector = AnomalyDetector()
        self._escalation = EscalationState.of(telemetry, parts.task.horizon)
        self._gates = GateWatch()
        self._suspicions = SuspicionWatch()
        self._choices = ChoiceCounter()
        self._rolling: list[float] = []
        self._num_rollbacks = 0
        self._round_idx = 0
        self.cpu_total_s = 0.0
        """CPU time of the training thread in here, for benchmarks."""
        self._cpu_s = 0.0
        self._writer_ms = 0.0

    def must_stop(self) -> bool:
        """Looks at the log once more at each boundary, and says so when it ends the run."""
        if self.log_trouble is None and (trouble := log_trouble(self._hub)) is not None:
            self.log_trouble = trouble
            complain(f"stopping after this round: {trouble}")
        return self.log_trouble is not None

    def round_begins(self, round_idx: int) -> None:
        """Starts the counts of a round."""
        self._round_idx, started = round_idx, time.thread_time()
        self._choices.begin()
        envs = range(self._parts.config.envs)
        first = [EnvContext(round=round_idx, episode=round_idx, env=env, epoch=0) for env in envs]
        apply_slot_telemetry(self._parts.pool, self._escalation, first)
        self._add_cpu_time(started)
        self._hub.progress("play", round=round_idx, epoch=0)

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        """Emits a step, all of an env before the next. An env without a reward sat it out and emits nothing."""
        started = time.thread_time()
        self._hub.progress("play", round=self._round_idx, epoch=max(report.epochs_done for report in after.reports))
        facts, pool = self._parts.client.last_step, self._parts.pool
        decisions = self._decisions(facts) if T.ACTION_TAKEN in pool.wanted else None
        for env, reward in enumerate(facts.rewards):
            if reward is not None:
                self._emit_env_step(facts, env, reward, None if decisions is None else decisions[env])
        apply_slot_telemetry(pool, self._escalation, map(self._context, after.reports))
        self._add_cpu_time(started)

    def _decisions(self, facts: StepFacts) -> list[Decision] | None:
        """What the agent knew when it chose, by env; None for a fixed controller."""
        if facts.decision is None:
            return None
        pool = self._parts.pool
        detailed = [env for env, spec in enumerate(facts.specs) if spec.env_id in pool.gradient_detail_envs]
        seen = self._parts.reads.seen(facts, detailed) if detailed else {}
        layouts = [context.layout for context in facts.before.contexts]
        return decision_records(facts.decision, facts.specs, layouts, detailed, seen)

    def _emit_env_step(self, facts: StepFacts, env: int, reward: StepReward, decision: Decision | None) -> None:
        before, report = facts.before.reports[env], facts.after.reports[env]
        spec, outcome = facts.specs[env], facts.after.outcomes[env]
        masks, context = facts.before.post_action_masks[env], facts.before.contexts[env]
        task = self._parts.task if context.task == self._parts.task.name else get_task_spec(context.task)
        ctx = self._context(before)
        self._choices.add(masks, spec, outcome, context.layout)
        level = level_at(self._escalation, ctx)
        wanted = enabled(level)
        for event in report.events:
            emit_with_env_context(self._hub, event, ctx)
        if T.EPOCH_COMPLETED in wanted:
            lr = task.optimizer.lr * lr_factor(task.optimizer.schedule, ctx.epoch, task.horizon)
            emit_epoch_completed(self._hub, ctx, report, brief(lr))
        if T.COALITION_MEASURED in wanted:
            emit_coalitions_measured(self._hub, ctx, report, points(task, report.coalitions))
        if T.GATE_EVALUATED in wanted:
            then, always = facts.after.post_action_masks[env], level is TelemetryLevel.DEBUG
            self._gates.emit(self._hub, ctx, report, then, task.lifecycle, always=always)
        if T.ACTION_TAKEN in wanted:
            forced = sum(masks.op) == 1
            scaled = facts.scaled[env]
            emit_last_action(self._hub, ctx, spec, outcome, decision, reward.components, scaled, forced=forced)
        self._suspicions.emit(self._hub, ctx, reward.suspicions)
        found = self._detector.check_all(report, ctx)
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
        phases: Mapping[str, PhaseTime],
    ) -> None:
        """Emits the episodes, the update, alarms, counts and times of a round, and the round last."""
        profile, started = self._profile(summary, episodes, phases), time.thread_time()
        self._cpu_s = 0.0  # what follows is part of the next round's profile, as saving is
        hub, reads = self._hub, self._parts.reads
        for env, episode in enumerate(episodes):
            last = max(0, episode.num_epochs - 1)
            ctx = EnvContext(round=round_idx, episode=round_idx, env=env, epoch=last)
            emit_reward_summary(hub, ctx, episode)
        self._num_rollbacks += summary.num_rollbacks
        in_detail = metrics is not None and level_at(self._escalation, round_idx) is TelemetryLevel.DEBUG
        if metrics is not None:
            emit_ppo_update_event(hub, round_idx, metrics, reads.layers() if in_detail else None)
        ops, *others = self._choices.stats()
        inputs = UpdateInputs(
            metrics=metrics,
            ops=ops,
            num_rollbacks_total=self._num_rollbacks,
            num_episodes_total=summary.num_episodes_total,
            shaping_share=shaping_share(episodes),
        )
        found = self._detector.check_all(inputs, round_idx)
        emit_anomaly_diagnostics(hub, found, round_idx, reads.bundle() if in_detail and found.raised else None)
        handle_telemetry_escalation(found, self._escalation, round_idx)
        emit_action_distribution(hub, round_idx, ops)
        emit_mask_hit_rates(hub, round_idx, others)
        self._rolling = [*self._rolling, summary.rolling_accuracy_pct]
        emit_trend(hub, round_idx, find_trend(self._rolling, self._parts.config.rounds))
        emit_throughput(hub, round_idx, profile)
        emit_batch_completed(hub, round_idx, summary)
        self._add_cpu_time(started)

    def checkpoint(self, trainer: VectorizedPPOTrainer, *, last: bool) -> None:
        """Saves the boundary if it is due."""
        if self._checkpoints is None:
            return
        score = trainer.history[-1].committed_accuracy_pct if trainer.history else None
        self._hub.progress("save", round=trainer.next_round)
        self._checkpoints.offer(
            trainer.next_round,
            lambda: run_files(trainer, self.state_dict()),
            score=score,
            last=last,
            bitwise=self._parts.pool.bitwise,
        )

    def _context(self, before: EpochReport) -> EnvContext:
        """The epoch that follows a report."""
        return EnvContext(round=self._round_idx, episode=before.episode, env=before.env_id, epoch=before.epochs_done)

    def _add_cpu_time(self, started: float) -> None:
        spent_s = time.thread_time() - started
        self._cpu_s += spent_s
        self.cpu_total_s += spent_s

    def _profile(
        self, summary: BatchSummary, episodes: Sequence[EpisodeCompleted], phases: Mapping[str, PhaseTime]
    ) -> ProfileMeasured:
        """Where the round's time went. Saving comes after a round and counts for the next."""
        steps, duration_s = sum(episode.num_epochs for episode in episodes), summary.duration_s
        health, has_workers = self._hub.health(), self._parts.pool.kind != "inline"
        writer_ms, self._writer_ms = health.writer_cpu_ms - self._writer_ms, health.writer_cpu_ms
        timed = duration_s > 0.0
        # Hosts of several tasks see different numbers of rows, which nobody counts.
        samples = steps * len(self._parts.data.train) if self._parts.config.groups == 1 else None
        return ProfileMeasured(
            env_steps_per_s=steps / duration_s if timed else 0.0,
            host_samples_per_s=samples / duration_s if timed and samples is not None else None,
            phases=phases,
            controller_ms_per_env_step=phases["act"].wall_ms / steps if steps else None,
            telemetry_cpu_ms=1e3 * self._cpu_s + writer_ms,
            wait_share=phases["execute"].wall_ms / (1e3 * duration_s) if has_workers and timed else None,
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            cuda=cuda_memory(),
            disk_free_bytes=None if self._run_path is None else free_bytes(self._run_path),
            queue_high_water=health.queue_high_water,
        )

    # ---- across restarts

    def state_dict(self) -> dict[str, Any]:
        """What alarms and trends remember, as JSON values."""
        return {
            "detector": self._detector.state_dict(),
            "escalation": self._escalation.state_dict(),
            "num_rollbacks": self._num_rollbacks,
            "rolling": self._rolling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another recorder stopped."""
        self._detector.load_state_dict(state["detector"])
        self._escalation.load_state_dict(state["escalation"])
        self._num_rollbacks, self._rolling = state["num_rollbacks"], list(state["rolling"])


def shaping_share(episodes: Sequence[EpisodeCompleted]) -> float | None:
    """Share of shaping terms in all that was paid, by absolute amounts; None where nothing was paid.

    Terms count with their sum over a whole episode: an advance that is settled later shapes nothing.
    """
    sizes = [(name, abs(amount)) for episode in episodes for name, amount in episode.components_sum.items()]
    everything = sum(size for _, size in sizes)
    shaping = sum(size for name, size in sizes if name not in PRIMARY_TERMS)
    return shaping / everything if everything > 0.0 else None


def cuda_memory() -> dict[str, CudaMemory] | None:
    """Memory of this process on its devices; None where it uses none. Worker processes hold their own."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    found = {}
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(device)
        found[f"cuda:{device}"] = CudaMemory(
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            total_bytes=torch.cuda.get_device_properties(device).total_memory,
            num_retries=stats.get("num_alloc_retries", 0),
        )
    return found
