"""What the seeds are worth: one validation over coalitions, the attribution read from its table, the epoch's report.

It knows no rewards and no masks. What was not measured is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from esper.kasmina import EpochMeasurement, end_epoch
from esper.leyline import (
    CoalitionTable,
    EpochReport,
    GovernorState,
    GovernorStateChanged,
    LossCheck,
    SeedStage,
    Severity,
    SlotReport,
    TelemetryEvent,
    TelemetryEventType,
    attribute,
    coalition_mask,
    make_event,
)
from esper.runtime.tasks import TaskSpec
from esper.simic.rewards.types import family_points
from esper.simic.training.batch_ops import add_validation, collect_gradient_telemetry_for_batch, process_val_batch
from esper.simic.training.epoch_metrics import EpochMetrics
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tolaria.batches import Batch
from esper.tolaria.governor import Verdict


def process_fused_val_batch(env: ParallelEnvState, batch: Batch) -> None:
    """Validates every coalition of the env's plan; coalitions share what they have in common."""
    if len(env.plan.coalitions) == 1:
        process_val_batch(env, batch)
        return
    outputs = env.model.forward_coalitions(batch.inputs, env.plan.coalitions, env.stations())
    with torch.inference_mode():
        add_validation(env, torch.stack(outputs), batch.targets)


# ---- attribution


def points(task: TaskSpec, table: CoalitionTable) -> Mapping[int, float]:
    """Points of every measured coalition, in the task's metric."""
    return family_points(table, "loss" if task.metric == "loss" else "contribution", task.chance_loss)


# ---- the report


def report_epoch(env: ParallelEnvState, verdict: Verdict, restored_epoch: int | None) -> EpochReport:
    """Counts a finished epoch and reports it; after a rollback, reports the state of `restored_epoch`."""
    assert env.metrics is not None
    rolled_back = verdict.state is GovernorState.PANIC
    if not rolled_back:
        if env.epoch is not None:
            _book_epoch(env, env.metrics)
        env.signals = env.tracker.update(env.metrics.val_loss, env.metrics.val_accuracy_pct)
    done = 0 if env.epoch is None else env.epoch + 1
    env.terminal = done >= env.recipe.task.horizon or (rolled_back and env.recipe.rollback_ends_episode)
    state = env.reported_state(verdict)
    if state is not env.state or rolled_back:
        env.outbox.append(_governor_event(env, verdict, state, restored_epoch))
    env.state = state
    events = tuple(event for event in env.outbox if event.type in env.wanted)
    env.outbox.clear()
    report = _report(env, events, env.placement.train_timer.take_ms(), env.placement.val_timer.take_ms())
    if not env.gradient_detail or env.epoch is None or rolled_back:
        return report
    return replace(report, gradients=env.layer_gradients)


_GOVERNOR_SEVERITY = {
    GovernorState.HEALTHY: Severity.INFO,
    GovernorState.SUSPECT: Severity.WARNING,
    GovernorState.PANIC: Severity.CRITICAL,
}


def _governor_event(
    env: ParallelEnvState, verdict: Verdict, state: GovernorState, restored_epoch: int | None
) -> TelemetryEvent:
    rolled_back = verdict.state is GovernorState.PANIC
    data = GovernorStateChanged(
        from_state=env.state.value,
        to_state=state.value,
        reason=None if verdict.reason is None else verdict.reason.value,
        **{entry.name: getattr(verdict, entry.name) for entry in fields(LossCheck)},
        op=None if env.action is None else env.action.op.name,
        slot_id=None if env.action is None else env.action.slot,
        restored_epoch=restored_epoch,
        rolled_back=rolled_back,
        seeds_removed=env.seeds_removed if rolled_back else (),
    )
    kind, severity = TelemetryEventType.GOVERNOR_STATE_CHANGED, _GOVERNOR_SEVERITY[state]
    return make_event(kind, data, severity, episode=env.episode, env=env.env_id, epoch=env.epoch)


def report_again(env: ParallelEnvState) -> EpochReport:
    """The last report of an env whose episode is over: the same facts, nothing new."""
    return _report(env, (), 0.0, 0.0)


def _book_epoch(env: ParallelEnvState, metrics: EpochMetrics) -> None:
    assert metrics.train_loss is not None
    measured = EpochMeasurement(
        train_loss=metrics.train_loss,
        val_loss=metrics.val_loss,
        attributions=attribute(metrics.table, points(env.recipe.task, metrics.table)),
        gradients=collect_gradient_telemetry_for_batch(env),
    )
    env.note_attributions(measured.attributions)
    for move in end_epoch(env.model, measured):
        env.note_move(move)


def _report(env: ParallelEnvState, events: tuple[TelemetryEvent, ...], train_ms: float, val_ms: float) -> EpochReport:
    assert env.metrics is not None
    assert env.signals is not None
    metrics, table = env.metrics, env.metrics.table
    fossils = [s.spec.slot_id for s in env.model.all_slots() if s.stage is SeedStage.FOSSILIZED]
    # A seed fossilized in this very step was a player of its validation, so the committed coalition was measured.
    committed = coalition_mask(table, fossils)
    counts = env.param_counts()
    return EpochReport(
        env_id=env.env_id,
        episode=env.episode,
        epoch=env.epoch,
        train_loss=metrics.train_loss,
        train_accuracy_pct=metrics.train_accuracy_pct,
        val_loss=metrics.val_loss,
        val_accuracy_pct=metrics.val_accuracy_pct,
        committed_accuracy_pct=table.accuracy_pct.get(committed),
        committed_loss=table.loss.get(committed),
        coalitions=table,
        slots=tuple(_named(env, slot) for slot in env.model.reports()),
        signals=env.signals,
        host_params=counts.host,
        total_params=counts.total,
        committed_params=counts.committed,
        governor_state=env.state,
        rollback_reason=env.rollback_reason,
        terminal=env.terminal,
        events=events,
        train_ms=train_ms,
        val_ms=val_ms,
        tallies=dict(env.tallies),
    )


def _named(env: ParallelEnvState, slot: SlotReport) -> SlotReport:
    return slot if slot.seed_id is None else replace(slot, seed_id=env.seed_name(slot.seed_id))
