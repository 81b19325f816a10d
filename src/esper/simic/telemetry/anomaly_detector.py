"""Alarms: checks readings against the threshold table, remembers open alarms, and opens windows of level DEBUG.

It has no limits of its own, and its output depends on training facts only: what depends on the machine is judged
elsewhere. Everything it remembers goes into checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from esper.leyline import THRESHOLDS, AnomalyDetected, EpochReport, Severity, TelemetryLevel, Threshold, record
from esper.leyline.thresholds import GRAD_MIN_HISTORY, GRAD_WINDOW, LOSS_MIN_HISTORY, LOSS_WINDOW
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.telemetry.readings import Clock, EnvContext, Readings, UpdateInputs, epoch_readings, update_readings
from esper.simic.telemetry.telemetry_config import TelemetryConfig


class Finding(NamedTuple):
    """One alarm that changed its state."""

    data: AnomalyDetected
    severity: Severity
    """Of the alarm, also when it clears."""


@record
class AnomalyReport:
    """What changed at one check."""

    findings: tuple[Finding, ...]

    @property
    def raised(self) -> bool:
        """True if an alarm was entered or got worse."""
        return any(found.data.state != "cleared" for found in self.findings)


@dataclass(slots=True)
class _Alarm:
    num_consecutive: int = 0
    severity: Severity | None = None
    """None while it is not open."""
    value: float = 0.0


_RANK = {kind: position for position, kind in enumerate(THRESHOLDS)}
_POLICY = -1
"""Stands for the policy where alarms are kept by env."""


@dataclass(slots=True)
class AnomalyDetector:
    """Says on each check which alarms were entered, got worse or cleared; nothing about those that stay as they are."""

    _alarms: dict[int, dict[str, _Alarm]] = field(default_factory=dict)
    _grad_norms: deque[float] = field(default_factory=lambda: deque(maxlen=GRAD_WINDOW))
    _val_losses: dict[int, deque[float]] = field(default_factory=dict)
    _num_updates: int = 0
    _num_skipped: int = 0

    def check_all(self, inputs: UpdateInputs | EpochReport, clock: Clock) -> AnomalyReport:
        """Checks the rows that apply: those of an env once per epoch, all others once per round."""
        if isinstance(inputs, UpdateInputs):
            return AnomalyReport(findings=tuple(self._check_update(inputs)))
        assert isinstance(clock, EnvContext), "an epoch belongs to an env"
        return AnomalyReport(findings=tuple(self._check_epoch(inputs, clock)))

    def state_dict(self) -> dict[str, Any]:
        """Everything remembered, as plain JSON."""
        return {
            "alarms": [
                [env, metric, alarm.num_consecutive, alarm.severity and alarm.severity.value, str(alarm.value)]
                for env, alarms in self._alarms.items()
                for metric, alarm in alarms.items()
            ],
            "grad_norms": list(self._grad_norms),
            "val_losses": [[env, list(losses)] for env, losses in self._val_losses.items()],
            "num_updates": self._num_updates,
            "num_skipped": self._num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remembers what another detector did."""
        self._alarms = {}
        for env, metric, num_consecutive, severity, value in state["alarms"]:
            alarm = _Alarm(num_consecutive, severity and Severity(severity), float(value))
            self._alarms.setdefault(env, {})[metric] = alarm
        self._grad_norms = deque(state["grad_norms"], maxlen=GRAD_WINDOW)
        self._val_losses = {env: deque(losses, maxlen=LOSS_WINDOW) for env, losses in state["val_losses"]}
        self._num_updates, self._num_skipped = state["num_updates"], state["num_skipped"]

    def _check_update(self, inputs: UpdateInputs) -> Iterator[Finding]:
        readings = update_readings(inputs)
        if inputs.metrics is not None:
            readings |= self._learn(inputs.metrics)
        for row, metric in _in_table_order(readings):
            if row.warmup == 0 or self._num_updates > row.warmup:
                yield from self._judge(row, metric, _POLICY, readings[metric])

    def _learn(self, metrics: PPOUpdateMetrics) -> Readings:
        """Remembers an update; the readings that compare it with those before."""
        self._num_updates += 1
        self._num_skipped = 0 if metrics["performed"] else self._num_skipped + 1
        readings = {"skipped_updates": float(self._num_skipped)}
        norm = metrics["gradient_stats"]["grad_norm"]
        if norm is not None and math.isfinite(norm) and norm > 0:
            if len(self._grad_norms) >= GRAD_MIN_HISTORY:
                readings["grad_drift"] = abs(math.log(norm / median(self._grad_norms)))
            self._grad_norms.append(norm)
        return readings

    def _check_epoch(self, report: EpochReport, ctx: EnvContext) -> Iterator[Finding]:
        if ctx.epoch == 0:
            self._val_losses[ctx.env] = deque(maxlen=LOSS_WINDOW)
            yield from self._end(ctx.env, tuple(self._alarms.get(ctx.env, ())), "a new host began")
        readings, known = epoch_readings(report), self._alarms.get(ctx.env, {})
        if known:
            live = {slot.slot_id for slot in report.slots if slot.stage.is_live}
            gone = [metric for metric in known if metric.partition(":")[2] not in {"", *live}]
            yield from self._end(ctx.env, gone, "the seed is gone or kept")
        losses, loss = self._val_losses.setdefault(ctx.env, deque(maxlen=LOSS_WINDOW)), report.val_loss
        if len(losses) >= LOSS_MIN_HISTORY and (usual := median(losses)) > 0:
            readings["val_loss_ratio"] = loss / usual
        if math.isfinite(loss):
            losses.append(loss)
        # Almost always nothing is wrong, and that is soon seen: this runs once per epoch of every host.
        odd = {m: v for m, v in readings.items() if m in known or THRESHOLDS[_kind(m)].severity_of(v) is not None}
        for row, metric in _in_table_order(odd):
            yield from self._judge(row, metric, ctx.env, readings[metric])

    def _judge(self, row: Threshold, metric: str, env: int, value: float) -> Iterator[Finding]:
        alarm = self._alarms.setdefault(env, {}).setdefault(metric, _Alarm())
        severity, alarm.value = row.severity_of(value), value
        alarm.num_consecutive = 0 if severity is None else alarm.num_consecutive + 1
        if severity is None:
            if alarm.severity is not None and row.clears(value):
                yield _finding(row, metric, "cleared", alarm, "back to normal")
                alarm.severity = None
            return
        worse = alarm.severity is None or (severity is Severity.CRITICAL and alarm.severity is Severity.WARNING)
        if worse and alarm.num_consecutive >= row.num_consecutive:
            state: Literal["entered", "worsened"] = "entered" if alarm.severity is None else "worsened"
            alarm.severity = severity
            yield _finding(row, metric, state, alarm, row.reason)

    def _end(self, env: int, metrics: Collection[str], why: str) -> Iterator[Finding]:
        """Forgets alarms whose subject is gone. Open ones are cleared at their last value."""
        for metric in metrics:
            alarm = self._alarms[env].pop(metric)
            if alarm.severity is not None:
                yield _finding(THRESHOLDS[_kind(metric)], metric, "cleared", alarm, why)


def _finding(
    row: Threshold, metric: str, state: Literal["entered", "worsened", "cleared"], alarm: _Alarm, detail: str
) -> Finding:
    assert alarm.severity is not None
    data = AnomalyDetected(
        kind=row.metric,
        metric=metric,
        state=state,
        value=alarm.value,
        limit=row.limit_of(alarm.severity),
        num_consecutive=alarm.num_consecutive,
        detail=detail,
    )
    return Finding(data, alarm.severity)


def _kind(metric: str) -> str:
    return metric.partition(":")[0]


def _in_table_order(readings: Readings) -> Iterator[tuple[Threshold, str]]:
    for metric in sorted(readings, key=lambda name: (_RANK[_kind(name)], name)):
        yield THRESHOLDS[_kind(metric)], metric


# ---- escalation: level DEBUG for a while


@dataclass(slots=True)
class EscalationState:
    """Windows of epochs in which the level is DEBUG.

    Epochs are counted through the whole run: round times epochs per episode plus epoch. Windows are (first, last) of
    such epochs, both included, by env; those of the policy cover all envs.
    """

    level: TelemetryLevel
    """The level of the run, in force outside of all windows."""
    escalation_epochs: int
    """0 for never."""
    epochs_per_episode: int
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TelemetryConfig, epochs_per_episode: int) -> EscalationState:
        """The state at the start of a run."""
        logs = config.level is not TelemetryLevel.OFF
        return cls(config.level, config.escalation_epochs if logs else 0, epochs_per_episode)

    def state_dict(self) -> dict[str, Any]:
        """The open windows, as plain JSON. Level and length belong to the configuration."""
        return {"windows": [[env, first, last] for env, (first, last) in self.windows.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Opens the windows that another state had open, unless this one is never to open any."""
        known = state["windows"] if self.escalation_epochs > 0 else ()
        self.windows = {env: (first, last) for env, first, last in known}


def level_at(state: EscalationState, clock: Clock) -> TelemetryLevel:
    """The level in force at an epoch of an env, or at the update of a round. Pure: asking changes nothing."""
    return _level(state, clock, 0) if state.windows else state.level


def _level(state: EscalationState, clock: Clock, epochs_later: int) -> TelemetryLevel:
    now = _position(state, clock) + epochs_later
    mine = (_POLICY,) if isinstance(clock, int) else (_POLICY, clock.env)
    inside = any(env in state.windows and state.windows[env][0] <= now <= state.windows[env][1] for env in mine)
    return TelemetryLevel.DEBUG if inside else state.level


def handle_telemetry_escalation(report: AnomalyReport, state: EscalationState, clock: Clock) -> TelemetryLevel:
    """Opens a window after an alarm was raised, and returns the level in force right after this moment.

    An alarm of an env covers its next epochs, across the end of an episode. One of the policy, found at the update of
    a round, covers the whole next round with its update, and more if the window is longer than a round.
    """
    if not report.raised and not state.windows:
        return state.level
    first = _position(state, clock) + 1
    if report.raised and state.escalation_epochs > 0:
        env, length = _POLICY, max(state.escalation_epochs, state.epochs_per_episode)
        if isinstance(clock, EnvContext):
            env, length = clock.env, state.escalation_epochs
        last = first - 1 + length
        known = state.windows.get(env)
        if known is not None and known[1] >= first - 1:
            first, last = known[0], max(known[1], last)
        state.windows[env] = (first, last)
    return _level(state, clock, 1)


def carry_window(state: EscalationState, ctx: EnvContext) -> None:
    """Moves what an early end of its episode left of an env's window to its next episode: it idles until then.

    `ctx` is the last epoch that the env played.
    """
    now, next_episode = _position(state, ctx), (ctx.round + 1) * state.epochs_per_episode
    first, last = state.windows.get(ctx.env, (now, now))
    if last > now and next_episode > now + 1:
        state.windows[ctx.env] = (next_episode, next_episode + last - max(first, now + 1))


def _position(state: EscalationState, clock: Clock) -> int:
    round_idx, epoch = (clock, state.epochs_per_episode - 1) if isinstance(clock, int) else (clock.round, clock.epoch)
    return round_idx * state.epochs_per_episode + epoch
