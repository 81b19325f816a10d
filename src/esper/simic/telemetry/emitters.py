"""Turns figures of training into events. Stateless; takes plain numbers, so it cannot wait for a device.

`compute_grad_norm_surrogate` is the one exception that sees tensors; it is for debugging, not for the hot loop.
Importing this module loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from esper.leyline import (
    ActionOutcome,
    ActionSpec,
    ActionTaken,
    AnomalyDebug,
    BatchSummary,
    ChoiceStats,
    CoalitionMeasured,
    EpisodeCompleted,
    EventSink,
    HeadDecision,
    LayerGradientStats,
    LayerHealth,
    PPOUpdateCompleted,
    ProfileMeasured,
    SeenByPolicy,
    Severity,
    TelemetryEvent,
    TelemetryEventType,
    TelemetryLevel,
    fill_ids,
    make_event,
    record,
)
from esper.leyline.thresholds import DEAD_ZERO_SHARE, DEGRADATION_SHARE, EXPLODING_LARGE_SHARE
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.rewards.types import RewardComponentsTelemetry
from esper.simic.telemetry.anomaly_detector import AnomalyReport, EscalationState, level_at
from esper.simic.telemetry.readings import Clock, EnvContext
from esper.simic.telemetry.telemetry_config import enabled

if TYPE_CHECKING:
    from torch import nn

T = TelemetryEventType


def brief(value: float) -> float:
    """A figure as step events keep it: seven significant digits, which is what single precision has."""
    return float("%.7g" % value)  # noqa: UP031 (a tenth faster, and there are dozens per step)


def price(value: float) -> float:
    """A reward as step events keep it: to nine places, so that terms still sum to their total."""
    return round(value, 9)


def brief_or_none(value: float | None) -> float | None:
    """The same of a figure that may not have been measured."""
    return None if value is None else brief(value)


@record
class Decision:
    """What a controller knew when it chose; None in its place for one that does not sample."""

    value: float | None
    log_prob: float | None
    heads: Mapping[str, HeadDecision]
    """Only the heads the op uses."""
    seen: SeenByPolicy | None = None
    """How unusual its observation was, at level DEBUG."""


class Outbox(Protocol):
    """The pool, as far as telemetry sets what its reports carry."""

    wanted: frozenset[TelemetryEventType]
    gradient_detail_envs: frozenset[int]
    """Envs whose gradients are described tensor by tensor."""


# ---- one env


def emit_with_env_context(hub: EventSink, event: TelemetryEvent, ctx: EnvContext) -> None:
    """Sends an event from an env's outbox with its ids filled in; an id that says otherwise is an error."""
    hub.emit(fill_ids(event, round=ctx.round, episode=ctx.episode, env=ctx.env, epoch=ctx.epoch))


def emit_last_action(
    hub: EventSink,
    ctx: EnvContext,
    spec: ActionSpec,
    outcome: ActionOutcome,
    decision: Decision | None,
    rewards: RewardComponentsTelemetry | None,
    reward_scaled: float | None = None,
    *,
    forced: bool = False,
) -> None:
    """Emits ACTION_TAKEN: choice and reward. Fixed controllers have no decision, runs without rewards no components.

    `forced` says that nothing else was legal.
    """
    data = ActionTaken(
        op=spec.op.name,
        slot_id=spec.slot,
        blueprint=spec.blueprint,
        blend=spec.blend,
        ok=outcome.applied,
        forced=forced,
        value=decision.value if decision else None,
        log_prob=decision.log_prob if decision else None,
        heads=decision.heads if decision else {},
        reward_raw=price(rewards.total) if rewards else None,
        reward_scaled=brief_or_none(reward_scaled),
        components={name: price(paid) for name, paid in rewards.amounts.items() if paid} if rewards else {},
        seen=decision.seen if decision else None,
    )
    emit_env_event(hub, ctx, T.ACTION_TAKEN, data)


def emit_reward_summary(hub: EventSink, ctx: EnvContext, episode: EpisodeCompleted) -> None:
    """Emits EPISODE_COMPLETED, once per env and episode."""
    emit_env_event(hub, ctx, T.EPISODE_COMPLETED, episode)


def emit_cf_unavailable(hub: EventSink, ctx: EnvContext, reason: str) -> None:
    """Emits COALITION_MEASURED without rows, for an epoch in which none was measured."""
    data = CoalitionMeasured(slot_ids=(), rows=(), contribution_pp={}, interaction_pp={}, unavailable=reason)
    emit_env_event(hub, ctx, T.COALITION_MEASURED, data)


def apply_slot_telemetry(outbox: Outbox, state: EscalationState, epochs: Iterable[EnvContext]) -> None:
    """Sets what the reports of the coming epochs carry. Nothing that is trained or measured changes."""
    if not state.windows and state.level is not TelemetryLevel.DEBUG:
        outbox.wanted, outbox.gradient_detail_envs = enabled(state.level) | {T.GOVERNOR_STATE_CHANGED}, frozenset()
        return
    levels = {ctx.env: level_at(state, ctx) for ctx in epochs}
    # Rollbacks reach the person at the terminal even where nothing is logged.
    outbox.wanted = frozenset({T.GOVERNOR_STATE_CHANGED}).union(*(enabled(level) for level in set(levels.values())))
    outbox.gradient_detail_envs = frozenset(env for env, level in levels.items() if level is TelemetryLevel.DEBUG)


# ---- one round


def emit_batch_completed(hub: EventSink, round_idx: int, summary: BatchSummary) -> None:
    """Emits ROUND_COMPLETED: the round is over and counted."""
    hub.emit(make_event(T.ROUND_COMPLETED, summary, round=round_idx))


def emit_action_distribution(hub: EventSink, round_idx: int, ops: ChoiceStats) -> None:
    """Emits CHOICE_STATS of the op head."""
    assert ops.head == "op", f"expected the counts of the op head, got those of {ops.head}"
    hub.emit(make_event(T.CHOICE_STATS, ops, round=round_idx))


def emit_mask_hit_rates(hub: EventSink, round_idx: int, others: Iterable[ChoiceStats]) -> None:
    """Emits CHOICE_STATS of every other head."""
    for stats in others:
        assert stats.head != "op", "the op head is emitted by emit_action_distribution"
        hub.emit(make_event(T.CHOICE_STATS, stats, round=round_idx))


def emit_throughput(hub: EventSink, round_idx: int, profile: ProfileMeasured) -> None:
    """Emits PROFILE_MEASURED."""
    hub.emit(make_event(T.PROFILE_MEASURED, profile, round=round_idx))


def check_performance_degradation(
    current_accuracy: float, baseline_accuracy: float, threshold: float = DEGRADATION_SHARE
) -> tuple[bool, float]:
    """Whether accuracy fell by more than a share of its baseline, and by how much it changed."""
    delta = current_accuracy - baseline_accuracy
    return delta < -threshold * abs(baseline_accuracy), delta


# ---- the policy


def emit_ppo_update_event(
    hub: EventSink, round_idx: int, metrics: PPOUpdateMetrics, layers: Sequence[LayerGradientStats] | None = None
) -> None:
    """Emits PPO_UPDATE_COMPLETED, also for an update that was skipped. `layers` is given at level DEBUG."""
    data = PPOUpdateCompleted(metrics=metrics.copy(), layers=None if layers is None else tuple(layers))
    severity = Severity.INFO if metrics["performed"] else Severity.WARNING
    hub.emit(make_event(T.PPO_UPDATE_COMPLETED, data, severity, round=round_idx))


def aggregate_layer_gradient_health(layers: Sequence[LayerGradientStats]) -> LayerHealth | None:
    """All layers in one line; None where there are none. Worst is not finite, else exploding, else the largest."""
    if not layers:
        return None
    exploding = [layer.large_share > EXPLODING_LARGE_SHARE for layer in layers]
    nonfinite = [layer.num_nan + layer.num_inf > 0 for layer in layers]
    worst = max(range(len(layers)), key=lambda i: (nonfinite[i], exploding[i], layers[i].norm))
    return LayerHealth(
        num_layers=len(layers),
        num_dead=sum(layer.zero_share > DEAD_ZERO_SHARE for layer in layers),
        num_exploding=sum(exploding),
        num_nonfinite=sum(nonfinite),
        min_norm=min(layer.norm for layer in layers),
        max_norm=max(layer.norm for layer in layers),
        worst_layer=layers[worst].name,
    )


def compute_grad_norm_surrogate(model: nn.Module) -> float | None:
    """L2 norm of the gradients a model has right now, in one read; None if it has none."""
    import torch

    gradients = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    if not gradients:
        return None
    norms = torch._foreach_norm(gradients)
    return math.sqrt(float(torch.stack([norm.double() for norm in norms]).square().sum()))  # sync: a debug read


def emit_anomaly_diagnostics(
    hub: EventSink, report: AnomalyReport, clock: Clock, debug: AnomalyDebug | None = None
) -> None:
    """Emits ANOMALY_DETECTED per finding; `debug` goes with those that were entered or got worse."""
    for data, severity in report.findings:
        if data.state == "cleared":
            severity = Severity.INFO
        elif debug is not None:
            data = replace(data, debug=debug)
        if isinstance(clock, EnvContext):
            emit_env_event(hub, clock, T.ANOMALY_DETECTED, data, severity)
        else:
            hub.emit(make_event(T.ANOMALY_DETECTED, data, severity, round=clock))


def emit_env_event(
    hub: EventSink, ctx: EnvContext, kind: TelemetryEventType, data: object, severity: Severity = Severity.INFO
) -> None:
    """Emits a payload with the four ids of an env's epoch."""
    event = make_event(kind, data, severity, round=ctx.round, episode=ctx.episode, env=ctx.env, epoch=ctx.epoch)
    hub.emit(event)
