"""Events that follow from the reports of the envs alone: epochs, coalitions, gates, suspicions, trends. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Literal

from esper.leyline import (
    THRESHOLDS,
    ActionMasks,
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
    LifecycleOp,
    RewardHackingSuspected,
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
    record,
    shapley,
)
from esper.leyline.thresholds import MIN_TREND_SHARE, TREND_WINDOW_ROUNDS
from esper.simic.rewards.suspicion import ROWS, severity_of
from esper.simic.telemetry.emitters import (
    brief,
    brief_or_none,
    check_performance_degradation,
    emit_cf_unavailable,
    emit_env_event,
)
from esper.simic.telemetry.readings import EnvContext

T = TelemetryEventType


def emit_epoch_completed(hub: EventSink, ctx: EnvContext, report: EpochReport, lr: float | None = None) -> None:
    """Emits EPOCH_COMPLETED: one point of the learning curve and the state of every seed."""
    data = EpochCompleted(
        train_loss=brief_or_none(report.train_loss),
        train_accuracy_pct=brief_or_none(report.train_accuracy_pct),
        val_loss=brief(report.val_loss),
        val_accuracy_pct=brief(report.val_accuracy_pct),
        committed_accuracy_pct=brief_or_none(report.committed_accuracy_pct),
        params_total=report.total_params,
        params_fossil=report.committed_params - report.host_params,
        lr=lr,
        slots={slot.slot_id: state for slot in report.slots if (state := _slot(slot)) is not None},
        train_ms=round(report.train_ms, 3),
        val_ms=round(report.val_ms, 3),
        debug=report.gradients,
    )
    emit_env_event(hub, ctx, T.EPOCH_COMPLETED, data)


def emit_coalitions_measured(hub: EventSink, ctx: EnvContext, report: EpochReport, values: Mapping[int, float]) -> None:
    """Emits COALITION_MEASURED where a seed that is not fossilized took part, and at the end of an episode.

    In all others there is nothing to decide about; what each fossil is worth is in EPOCH_COMPLETED. An epoch that was
    rolled back is logged without a table: the report speaks of the state that was restored. `values` are the points
    of its coalitions, as the slot reports count them.
    """
    if report.rollback_reason is not None:
        emit_cf_unavailable(hub, ctx, "the epoch was rolled back")
        return
    table = report.coalitions
    undecided = set(table.slot_ids).difference(_fossils(report))
    if not table.slot_ids or not (undecided or report.terminal):
        return
    emit_env_event(hub, ctx, T.COALITION_MEASURED, describe_coalitions(table, _fossils(report), values))


def describe_coalitions(
    table: CoalitionTable, fossils: Iterable[str], values: Mapping[int, float]
) -> CoalitionMeasured:
    """A coalition table with the worth of its seeds, in points. What needs an unmeasured coalition is absent."""
    players = table.slot_ids
    worth = {slot: contribution(values, len(players), i) for i, slot in enumerate(players)}
    pairs = {name: interaction(values, i, j) for name, i, j in _pairs(players)}
    fair = shapley(values, len(players))
    complete = len(values) == full_coalition(len(players)) + 1
    return CoalitionMeasured(
        slot_ids=players,
        rows=tuple(
            CoalitionRow(
                mask=_bits(mask, len(players)),
                accuracy_pct=brief_or_none(table.accuracy_pct.get(mask)),
                loss=brief_or_none(table.loss.get(mask)),
            )
            for mask in sorted({*table.accuracy_pct, *table.loss})
        ),
        strategy="full" if complete else "leave_one_out",
        committed_mask=_bits(coalition_mask(table, fossils), len(players)),
        contribution_pp={slot: brief(value) for slot, value in worth.items() if value is not None},
        interaction_pp={pair: brief(value) for pair, value in pairs.items() if value is not None},
        shapley_pp=None if fair is None else dict(zip(players, map(brief, fair), strict=True)),
        unavailable=None,
    )


@dataclass(slots=True)
class GateWatch:
    """Emits GATE_EVALUATED: what holds each seed up.

    Below DEBUG only what failed, and only when the answer changed: a gate that is found open holds nobody up and is
    not emitted.
    """

    _last: dict[tuple[int, str], tuple[str, Gate, bool]] = field(default_factory=dict)

    def emit(
        self,
        hub: EventSink,
        ctx: EnvContext,
        report: EpochReport,
        masks: ActionMasks,
        config: LifecycleConfig,
        *,
        always: bool = False,
    ) -> None:
        """Evaluates the gates on a report, with the functions that model and masks use too.

        The masks were made of that report, so they have evaluated most of the gates already. `always` emits every
        gate with all of its checks.
        """
        if ctx.epoch == 0:
            self._last = {key: value for key, value in self._last.items() if key[0] != ctx.env}
        for position, slot in enumerate(report.slots):
            step = _NEXT.get(slot.stage)
            if step is None or slot.seed_id is None:
                self._last.pop((ctx.env, slot.slot_id), None)
                continue
            # A mask that is open says it all; one that is closed may have other reasons.
            is_open = not always and step.op is not None and masks.slot_by_op[step.op][position]
            result = None if is_open else step.ask(slot, config)
            passed = result is None or result.passed
            answer = slot.seed_id, step.gate, passed
            before = self._last.get((ctx.env, slot.slot_id))
            known = before is not None and before[:2] == answer[:2]
            if always or (before != answer if known else not passed):
                data = GateEvaluated(
                    seed_id=slot.seed_id,
                    slot_id=slot.slot_id,
                    gate=step.gate,
                    target_stage=step.target.name,
                    passed=passed,
                    checks=() if result is None else tuple(c for c in result.checks if always or not c.passed),
                )
                emit_env_event(hub, ctx, T.GATE_EVALUATED, data)
            self._last[ctx.env, slot.slot_id] = answer


@dataclass(slots=True)
class SuspicionWatch:
    """Emits REWARD_HACKING_SUSPECTED: once a sign has lasted, and not again until it was gone.

    Every episode starts without suspicion, so there is nothing to keep between rounds.
    """

    _lasting: dict[int, dict[tuple[str, str], int]] = field(default_factory=dict)
    """By env: for how many epochs running each sign has been seen."""

    def emit(self, hub: EventSink, ctx: EnvContext, found: Iterable[RewardHackingSuspected]) -> None:
        """Takes the signs of one epoch of one env."""
        before = {} if ctx.epoch == 0 else self._lasting.get(ctx.env, {})
        now: dict[tuple[str, str], int] = {}
        for sign in found:
            # A ratio is about all seeds together, whichever of them claims most in this epoch.
            key = sign.pattern, sign.slot_id if sign.ratio is None else ""
            now[key] = before.get(key, 0) + 1
            if now[key] == ROWS[sign.pattern].num_consecutive:
                severity = severity_of(sign)
                assert severity is not None
                emit_env_event(hub, ctx, T.REWARD_HACKING_SUSPECTED, sign, severity)
        self._lasting[ctx.env] = now


def find_trend(rolling_pct: Sequence[float], num_rounds: int) -> TrendDetected | None:
    """The trend of the rolling accuracy; None early in a run, without a full window, or in between the bands."""
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
    """Emits TREND_DETECTED, if there is a trend."""
    if trend is not None:
        severity = Severity.WARNING if trend.kind == "degradation" else Severity.INFO
        hub.emit(make_event(T.TREND_DETECTED, trend, severity, round=round_idx))


@record
class _NextStep:
    """What a seed of some stage is waiting for."""

    target: SeedStage
    gate: Gate
    ask: Callable[[SlotReport, LifecycleConfig], GateResult]
    op: LifecycleOp | None
    """The op whose mask has asked this gate; None for a step that no op takes."""


_NEXT: dict[SeedStage, _NextStep] = {
    SeedStage.GERMINATED: _NextStep(target=SeedStage.TRAINING, gate=Gate.TRAIN, ask=gate_train, op=None),
    SeedStage.TRAINING: _NextStep(target=SeedStage.BLENDING, gate=Gate.BLEND, ask=gate_blend, op=LifecycleOp.ADVANCE),
    SeedStage.BLENDING: _NextStep(target=SeedStage.HOLDING, gate=Gate.HOLD, ask=gate_hold, op=None),
    SeedStage.HOLDING: _NextStep(
        target=SeedStage.FOSSILIZED, gate=Gate.FOSSILIZE, ask=gate_fossilize, op=LifecycleOp.FOSSILIZE
    ),
}


def _slot(slot: SlotReport) -> SlotState | None:
    """The seed in a slot; None if there is none."""
    if slot.seed_id is None or slot.blueprint is None:
        return None
    return SlotState(
        stage=slot.stage.name,
        seed_id=slot.seed_id,
        blueprint=slot.blueprint,
        alpha_share=brief(slot.alpha),
        epochs_in_stage=slot.epochs_in_stage,
        params=slot.params,
        contribution_pp=brief_or_none(slot.contribution_pp),
        grad_ratio=brief_or_none(slot.grad_ratio),
        grad_health=slot.grad_health,
    )


def _fossils(report: EpochReport) -> list[str]:
    return [slot.slot_id for slot in report.slots if slot.stage is SeedStage.FOSSILIZED]


@cache
def _bits(mask: int, num_players: int) -> str:
    return "".join("1" if mask >> i & 1 else "0" for i in range(num_players))


@cache
def _pairs(players: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    """Names and positions of every two players."""
    return tuple((f"{players[i]}+{players[j]}", i, j) for i, j in combinations(range(len(players)), 2))
