"""Events into a RunView, one by one. Pure: the same items give the same view, live or replayed.

Resuming a run rewrites part of its past, so a reader that meets a new attempt folds again from `EMPTY`; the replay
sees to it that only the events that count arrive here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from msgspec.structs import replace

from esper.karn.replay import BadLine, LogItem
from esper.karn.view import EMPTY, BlueprintYield, Cited, EnvNow, RunView
from esper.leyline import (
    ActionTaken,
    AnomalyDetected,
    BatchSummary,
    CheckpointRecorded,
    ChoiceStats,
    EpochCompleted,
    EventsDropped,
    GovernorStateChanged,
    LoggedEvent,
    PPOUpdateCompleted,
    ProfileMeasured,
    RewardHackingSuspected,
    RunEnded,
    RunStarted,
    SeedEnded,
    SeedGerminated,
    Severity,
    TelemetryEventType,
    TrendDetected,
    WorkerStateChanged,
)
from esper.leyline.thresholds import RECENT_ROUNDS

MAX_NOTES = 100
"""Safety notes kept, the newest ones."""

P = TypeVar("P")
ATTENTION = frozenset({Severity.WARNING, Severity.ERROR, Severity.CRITICAL})
_NO_YIELD = BlueprintYield(num_germinated=0, num_fossilized=0, num_pruned=0, sum_contribution_pp=0.0, num_measured=0)


def fold_all(items: Iterable[LogItem], view: RunView = EMPTY) -> RunView:
    """Folds many items into a view."""
    for item in items:
        view = fold(view, item)
    return view


def fold(view: RunView, item: LogItem) -> RunView:
    """The view after one more item of the log."""
    if isinstance(item, BadLine):
        log = view.log
        return replace(view, log=replace(log, num_bad=log.num_bad + 1, first_bad=log.first_bad or item))
    view = _FOLDS.get(item.type, _unchanged)(_logged(view, item), item, item.data)
    if item.severity in ATTENTION:
        notes = (*view.safety.notes[-MAX_NOTES + 1 :], item)
        view = replace(view, safety=replace(view.safety, notes=notes))
    return view


def _logged(view: RunView, event: LoggedEvent) -> RunView:
    log = view.log
    expected = 0 if log.last_seq is None else log.last_seq + 1
    return replace(
        view,
        log=replace(
            log,
            run=event.run,
            group=event.group,
            attempt=event.attempt,
            first_wall=event.wall if log.first_wall is None else log.first_wall,
            last_wall=event.wall,
            last_seq=event.seq,
            num_events=log.num_events + 1,
            num_missing=log.num_missing + max(event.seq - expected, 0),
        ),
    )


def _cite(event: LoggedEvent, data: P) -> Cited[P]:
    return Cited(seq=event.seq, round=event.round, env=event.env, epoch=event.epoch, severity=event.severity, data=data)


def _unchanged(view: RunView, event: LoggedEvent, data: object) -> RunView:
    return view


def _run_started(view: RunView, event: LoggedEvent, data: RunStarted) -> RunView:
    """A resumed run is running again, with new workers."""
    return replace(
        view,
        progress=replace(view.progress, started=data, ended=None),
        safety=replace(view.safety, workers={}),
    )


def _run_ended(view: RunView, event: LoggedEvent, data: RunEnded) -> RunView:
    return replace(view, progress=replace(view.progress, ended=_cite(event, data)))


def _round_completed(view: RunView, event: LoggedEvent, data: BatchSummary) -> RunView:
    assert event.round is not None
    progress = replace(
        view.progress,
        round=event.round,
        last_round=_cite(event, data),
        rounds=view.progress.rounds.add((event.round, data)),
    )
    return replace(view, progress=progress)


def _trend_detected(view: RunView, event: LoggedEvent, data: TrendDetected) -> RunView:
    return replace(view, progress=replace(view.progress, trend=_cite(event, data)))


def _epoch_completed(view: RunView, event: LoggedEvent, data: EpochCompleted) -> RunView:
    assert event.env is not None
    before = view.growth.envs.get(event.env)
    action = None if before is None else before.last_action
    now = EnvNow(seq=event.seq, episode=event.episode, epoch=event.epoch, state=data, last_action=action)
    return replace(
        view,
        progress=replace(view.progress, round=event.round, epoch=event.epoch),
        growth=replace(view.growth, envs={**view.growth.envs, event.env: now}),
    )


def _action_taken(view: RunView, event: LoggedEvent, data: ActionTaken) -> RunView:
    assert event.env is not None
    now = view.growth.envs.get(event.env)
    if now is None:
        return view
    envs = {**view.growth.envs, event.env: replace(now, last_action=data)}
    return replace(view, growth=replace(view.growth, envs=envs))


def _seed_germinated(view: RunView, event: LoggedEvent, data: SeedGerminated) -> RunView:
    before = view.growth.blueprints.get(data.blueprint, _NO_YIELD)
    return _with_yield(view, data.blueprint, replace(before, num_germinated=before.num_germinated + 1))


def _seed_fossilized(view: RunView, event: LoggedEvent, data: SeedEnded) -> RunView:
    before = view.growth.blueprints.get(data.blueprint, _NO_YIELD)
    after = replace(before, num_fossilized=before.num_fossilized + 1)
    if data.contribution_pp is not None:
        after = replace(
            after,
            num_measured=before.num_measured + 1,
            sum_contribution_pp=before.sum_contribution_pp + data.contribution_pp,
        )
    return _with_yield(view, data.blueprint, after)


def _seed_pruned(view: RunView, event: LoggedEvent, data: SeedEnded) -> RunView:
    before = view.growth.blueprints.get(data.blueprint, _NO_YIELD)
    return _with_yield(view, data.blueprint, replace(before, num_pruned=before.num_pruned + 1))


def _with_yield(view: RunView, blueprint: str, after: BlueprintYield) -> RunView:
    blueprints = {**view.growth.blueprints, blueprint: after}
    return replace(view, growth=replace(view.growth, blueprints=blueprints))


def _governor_changed(view: RunView, event: LoggedEvent, data: GovernorStateChanged) -> RunView:
    if not data.rolled_back:
        return view
    safety = replace(view.safety, num_rollbacks=view.safety.num_rollbacks + 1, last_rollback=_cite(event, data))
    return replace(view, safety=safety)


def _updated(view: RunView, event: LoggedEvent, data: PPOUpdateCompleted) -> RunView:
    assert event.round is not None
    policy = view.policy
    return replace(
        view,
        policy=replace(
            policy,
            num_updates=policy.num_updates + data.performed,
            num_skipped=0 if data.performed else policy.num_skipped + 1,
            last=_cite(event, data),
            updates=policy.updates.add((event.round, data)),
        ),
    )


def _anomaly(view: RunView, event: LoggedEvent, data: AnomalyDetected) -> RunView:
    key = (data.metric, event.env)
    alarms = {name: alarm for name, alarm in view.safety.alarms.items() if name != key}
    if data.state != "cleared":
        alarms[key] = _cite(event, data)
    return replace(view, safety=replace(view.safety, alarms=alarms))


def _suspected(view: RunView, event: LoggedEvent, data: RewardHackingSuspected) -> RunView:
    assert event.round is not None
    assert event.env is not None
    key, newest = (event.round, event.env), event.round
    recent = {place: cited for place, cited in view.safety.suspicions.items() if newest - place[0] < RECENT_ROUNDS}
    known = recent.get(key)
    if known is None or event.severity is Severity.CRITICAL or known.severity is not Severity.CRITICAL:
        recent[key] = _cite(event, data)
    return replace(view, safety=replace(view.safety, suspicions=recent))


def _worker_changed(view: RunView, event: LoggedEvent, data: WorkerStateChanged) -> RunView:
    workers = {**view.safety.workers, data.worker_id: _cite(event, data)}
    return replace(view, safety=replace(view.safety, workers=workers))


def _profiled(view: RunView, event: LoggedEvent, data: ProfileMeasured) -> RunView:
    return replace(view, machine=replace(view.machine, profile=_cite(event, data)))


def _counted(view: RunView, event: LoggedEvent, data: ChoiceStats) -> RunView:
    return replace(view, policy=replace(view.policy, choices={**view.policy.choices, data.head: data}))


def _checkpoint(view: RunView, event: LoggedEvent, data: CheckpointRecorded) -> RunView:
    if data.action == "saved":
        return replace(view, machine=replace(view.machine, saved=_cite(event, data), save_failure=None))
    if data.action == "save_failed":
        return replace(view, machine=replace(view.machine, save_failure=_cite(event, data)))
    return view


def _dropped(view: RunView, event: LoggedEvent, data: EventsDropped) -> RunView:
    log = replace(view.log, num_dropped=view.log.num_dropped + sum(data.counts.values()))
    if data.reason == "write_failed":
        log = replace(log, write_failure=_cite(event, data))
    return replace(view, log=log)


_T = TelemetryEventType
_FOLDS: dict[TelemetryEventType, Callable[[RunView, LoggedEvent, Any], RunView]] = {
    _T.RUN_STARTED: _run_started,
    _T.RUN_ENDED: _run_ended,
    _T.ROUND_COMPLETED: _round_completed,
    _T.EPOCH_COMPLETED: _epoch_completed,
    _T.ACTION_TAKEN: _action_taken,
    _T.SEED_GERMINATED: _seed_germinated,
    _T.SEED_FOSSILIZED: _seed_fossilized,
    _T.SEED_PRUNED: _seed_pruned,
    _T.GOVERNOR_STATE_CHANGED: _governor_changed,
    _T.PPO_UPDATE_COMPLETED: _updated,
    _T.ANOMALY_DETECTED: _anomaly,
    _T.REWARD_HACKING_SUSPECTED: _suspected,
    _T.TREND_DETECTED: _trend_detected,
    _T.PROFILE_MEASURED: _profiled,
    _T.CHOICE_STATS: _counted,
    _T.CHECKPOINT_RECORDED: _checkpoint,
    _T.WORKER_STATE_CHANGED: _worker_changed,
    _T.EVENTS_DROPPED: _dropped,
}
