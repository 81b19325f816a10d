"""Events that follow from the reports of the envs alone: epochs, coalitions, gates, suspicions, trends. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, cast

from esper.leyline import (
    THRESHOLDS,
    CoalitionMeasured,
    CoalitionRow,
    CoalitionTable,
    EpochCompleted,
    EpochReport,
    EventSink,
    Gate,
    GateEvaluated,
    GateResult,
    LifecycleConfig,
    RewardHackingSuspected,
    SeedEvidence,
    SeedStage,
    Severity,
    SlotReport,
    SlotState,
    TelemetryEventType,
    TrendDetected,
    coalition_mask,
    contribution,
    full_coalition,
    gate_blend,
    gate_fossilize,
    gate_hold,
    gate_train,
    interaction,
    make_event,
    shapley,
)
from esper.leyline.thresholds import MIN_TREND_SHARE, TREND_WINDOW_ROUNDS
from esper.simic.rewards.suspicion import HackingSuspicion
from esper.simic.telemetry.emitters import check_performance_degradation, emit_cf_unavailable
from esper.simic.telemetry.records import EnvContext

T = TelemetryEventType


def emit_epoch_completed(hub: EventSink, ctx: EnvContext, report: EpochReport, lr: float | None = None) -> None:
    """Tells one point of the learning curve and the state of every slot."""
    data = EpochCompleted(
        train_loss=report.train_loss,
        train_accuracy_pct=report.train_accuracy_pct,
        val_loss=report.val_loss,
        val_accuracy_pct=report.val_accuracy_pct,
        committed_accuracy_pct=report.committed_accuracy_pct,
        params_total=report.total_params,
        params_fossil=report.committed_params - report.host_params,
        lr=lr,
        slots={slot.slot_id: _slot(slot) for slot in report.slots},
        train_ms=report.train_ms,
        val_ms=report.val_ms,
    )
    _emit(hub, ctx, T.EPOCH_COMPLETED, data)


def emit_coalitions_measured(hub: EventSink, ctx: EnvContext, report: EpochReport) -> None:
    """Tells what the seeds are worth, in epochs with at least one; a table without rows is told as unavailable."""
    table = report.coalitions
    if not table.slot_ids:
        return
    if not table.accuracy_pct:
        emit_cf_unavailable(hub, ctx, "no coalition was measured")
        return
    _emit(hub, ctx, T.COALITION_MEASURED, describe_coalitions(table, _fossils(report)))


def describe_coalitions(table: CoalitionTable, fossils: Iterable[str]) -> CoalitionMeasured:
    """A coalition table with the worth of its seeds. What needs a coalition that was not measured is absent."""
    players, values = table.slot_ids, table.accuracy_pct
    worth = {slot: contribution(values, len(players), i) for i, slot in enumerate(players)}
    pairs = {f"{players[i]}+{players[j]}": interaction(values, i, j) for i, j in combinations(range(len(players)), 2)}
    fair = shapley(values, len(players))
    complete = len(values) == full_coalition(len(players)) + 1
    return CoalitionMeasured(
        slot_ids=players,
        rows=tuple(
            CoalitionRow(mask=_bits(mask, players), accuracy_pct=values.get(mask), loss=table.loss.get(mask))
            for mask in sorted({*values, *table.loss})
        ),
        strategy="full" if complete else "leave_one_out",
        committed_mask=_bits(coalition_mask(table, fossils), players),
        contribution_pp={slot: value for slot, value in worth.items() if value is not None},
        interaction_pp={pair: value for pair, value in pairs.items() if value is not None},
        shapley_pp=None if fair is None else dict(zip(players, fair, strict=True)),
        unavailable=None,
    )


@dataclass(slots=True)
class GateWatch:
    """Tells what guards the next move of each seed; below DEBUG only when the answer changed."""

    _last: dict[tuple[int, str], tuple[str, Gate, bool]] = field(default_factory=dict)

    def emit(
        self, hub: EventSink, ctx: EnvContext, report: EpochReport, config: LifecycleConfig, *, always: bool = False
    ) -> None:
        """Evaluates the gates on a report, with the functions that model and masks use too."""
        if ctx.epoch == 0:
            self._last = {key: value for key, value in self._last.items() if key[0] != ctx.env}
        for slot in report.slots:
            guarded = _NEXT.get(slot.stage)
            if guarded is None or slot.seed_id is None:
                self._last.pop((ctx.env, slot.slot_id), None)
                continue
            target, gate = guarded
            result = gate(slot, config)
            answer = slot.seed_id, result.gate, result.passed
            if always or self._last.get((ctx.env, slot.slot_id)) != answer:
                _emit(hub, ctx, T.GATE_EVALUATED, _evaluation(slot.seed_id, slot.slot_id, target, result))
            self._last[ctx.env, slot.slot_id] = answer


def emit_suspicions(hub: EventSink, ctx: EnvContext, found: Iterable[HackingSuspicion]) -> None:
    """Tells each sign that the reward may be paying for damage."""
    for sign in found:
        data = RewardHackingSuspected(
            pattern=cast(Literal["attribution_ratio", "ransomware"], sign.pattern),
            slot_id=sign.slot_id,
            contribution_pp=sign.contribution_pp,
            improvement_pp=sign.improvement_pp,
            ratio=sign.ratio,
        )
        severity = Severity.CRITICAL if sign.pattern == "ransomware" else Severity.WARNING
        _emit(hub, ctx, T.REWARD_HACKING_SUSPECTED, data, severity)


def find_trend(rolling_pct: Sequence[float], num_rounds: int) -> TrendDetected | None:
    """Where the rolling accuracy is heading; None early in a run, without a full window, or in between the bands.

    Args:
        rolling_pct: Rolling accuracy after each round so far.
        num_rounds: Rounds the run is to have.
    """
    if len(rolling_pct) <= max(TREND_WINDOW_ROUNDS, MIN_TREND_SHARE * num_rounds):
        return None
    now, before = rolling_pct[-1], rolling_pct[-1 - TREND_WINDOW_ROUNDS]
    fell, delta = check_performance_degradation(now, before)
    moved = THRESHOLDS["trend_pp"].severity_of(abs(delta)) is not None
    kind: Literal["plateau", "improvement", "degradation"]
    if fell or (moved and delta < 0):
        kind = "degradation"
    elif moved:
        kind = "improvement"
    elif THRESHOLDS["plateau_pp"].severity_of(abs(delta)) is not None:
        kind = "plateau"
    else:
        return None
    return TrendDetected(
        kind=kind, delta_pp=delta, rolling_pct=now, previous_pct=before, window_rounds=TREND_WINDOW_ROUNDS
    )


def emit_trend(hub: EventSink, round_idx: int, trend: TrendDetected | None) -> None:
    """Tells a trend, if there is one."""
    if trend is not None:
        severity = Severity.WARNING if trend.kind == "degradation" else Severity.INFO
        hub.emit(make_event(T.TREND_DETECTED, trend, severity, round=round_idx))


_NEXT: dict[SeedStage, tuple[SeedStage, Callable[[SeedEvidence, LifecycleConfig], GateResult]]] = {
    SeedStage.GERMINATED: (SeedStage.TRAINING, gate_train),
    SeedStage.TRAINING: (SeedStage.BLENDING, gate_blend),
    SeedStage.BLENDING: (SeedStage.HOLDING, gate_hold),
    SeedStage.HOLDING: (SeedStage.FOSSILIZED, gate_fossilize),
}


def _evaluation(seed_id: str, slot_id: str, target: SeedStage, result: GateResult) -> GateEvaluated:
    return GateEvaluated(
        seed_id=seed_id,
        slot_id=slot_id,
        gate=result.gate,
        target_stage=target.name,
        passed=result.passed,
        checks=result.checks,
    )


def _slot(slot: SlotReport) -> SlotState:
    return SlotState(
        stage=slot.stage.name,
        seed_id=slot.seed_id,
        blueprint=slot.blueprint,
        alpha_share=slot.alpha,
        epochs_in_stage=slot.epochs_in_stage,
        params=slot.params,
        contribution_pp=slot.contribution_pp,
        grad_ratio=slot.grad_ratio,
        grad_health=slot.grad_health,
    )


def _fossils(report: EpochReport) -> list[str]:
    return [slot.slot_id for slot in report.slots if slot.stage is SeedStage.FOSSILIZED]


def _bits(mask: int, players: Sequence[str]) -> str:
    return "".join("1" if mask >> i & 1 else "0" for i in range(len(players)))


def _emit(
    hub: EventSink, ctx: EnvContext, kind: TelemetryEventType, data: object, severity: Severity = Severity.INFO
) -> None:
    hub.emit(make_event(kind, data, severity, round=ctx.round, episode=ctx.episode, env=ctx.env, epoch=ctx.epoch))
