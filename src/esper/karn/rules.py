"""The rules that judge a run, most urgent first. Each looks at the view and the process and says what it finds.

Limits come from the table of thresholds; there are none in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeGuard

from esper.karn.advice import ADVICE
from esper.karn.finding import Finding, State
from esper.karn.process import Heartbeat, ProcessState
from esper.karn.view import Cited, RunView
from esper.leyline import THRESHOLDS, AnomalyDetected, BatchSummary, Severity, TrendDetected
from esper.leyline.thresholds import MIN_PROGRESS_S, MIN_SUSPECT_SHARE, RECENT_ROUNDS, WARMUP_UPDATES

_BROKEN = ("num_nonfinite", "skipped_updates")
"""Alarms about an update that failed."""
_PASSIVE = ("decision_share", "wait_share")
"""Alarms about a policy that has nothing to decide, or decides nothing."""
RESUME_COMMAND = "esper train --resume RUN"
"""In advice, RUN stands for the run directory; the verdict puts its path there where it is known."""
_ORDER = {metric: place for place, metric in enumerate(THRESHOLDS)}


def _failed(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    ended = view.progress.ended
    if ended is not None and ended.data.status == "failed":
        yield Finding(
            state=State.FAILED,
            severity=Severity.CRITICAL,
            now=f"failed: {ended.data.error_type}: {ended.data.error_message}",
            why=f"RUN_ENDED with status failed (seq {ended.seq})",
            next=_resume(view),
        )


def _died(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    if view.progress.ended is not None or _is_alive(heartbeat):
        return
    if heartbeat is not None:
        age_s, process = heartbeat.age_s, f"process {heartbeat.status.pid} is {heartbeat.process.value}"
    elif view.log.last_wall is not None:
        age_s, process = wall - view.log.last_wall, "there is no heartbeat file"
    else:
        return
    row = THRESHOLDS["heartbeat_age_s"]
    severity = row.severity_of(age_s)
    if severity is not None:
        yield Finding(
            state=State.DIED,
            severity=severity,
            now="the process is gone and left no end marker",
            why=f"no RUN_ENDED up to seq {view.log.last_seq}, heartbeat_age_s {age_s:.0f}, "
            f"limit {row.limit_of(severity):g}, and {process}",
            next=_resume(view),
        )


def _evidence_broken(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    log = view.log
    reasons = []
    if log.problems:  # a check of the files has seen more than the events can tell
        first, *others = log.problems
        reasons.append(("the record is not whole", f"{first}; and {len(others)} more problems" if others else first))
    elif log.first_bad is not None:
        where = f"{log.first_bad.file} at byte {log.first_bad.offset}"
        reasons.append((f"{log.num_bad} damaged lines", f"the first is in {where}: {log.first_bad.reason}"))
    if log.num_missing > log.num_dropped and not log.problems:
        why = f"{log.num_missing} sequence numbers missing up to seq {log.last_seq}, {log.num_dropped} reported as lost"
        reasons.append(("events are missing without explanation", why))
    if log.write_failure is not None:
        lost = sum(log.write_failure.data.counts.values())
        reasons.append(
            ("events were lost because the log could not be written", f"{lost} lost (seq {log.write_failure.seq})")
        )
    if _is_alive(heartbeat) and heartbeat.status.log_error is not None:
        why = f"{heartbeat.status.log_error}; {heartbeat.status.num_held} events wait in memory"
        reasons.append(("the log cannot be written", why))
    for now, why in reasons:
        yield Finding(
            state=State.EVIDENCE_BROKEN,
            severity=Severity.ERROR,
            now=now,
            why=why,
            next="do not cite this run; esper verify RUN names every damaged place. Check disk space and permissions",
        )


def _ended(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    ended = view.progress.ended
    if ended is None or ended.data.status == "failed":
        return
    completed = ended.data.status == "completed"
    best = ended.data.best_accuracy_pct
    yield Finding(
        state=State.COMPLETED if completed else State.INTERRUPTED,
        severity=Severity.INFO,
        now=f"{ended.data.status} after {ended.data.num_rounds_total} rounds"
        + ("" if best is None else f", best accuracy {best:.1f} % (best single host)"),
        why=f"RUN_ENDED with status {ended.data.status} (seq {ended.seq})",
        next="esper report RUN shows what came of it" if completed else _resume(view),
    )


def _stalled(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    if view.progress.ended is not None or not _is_alive(heartbeat):
        return
    status = heartbeat.status
    epoch_s = MIN_PROGRESS_S if status.median_epoch_s is None else max(status.median_epoch_s, MIN_PROGRESS_S)
    measured = {"heartbeat_age_s": heartbeat.age_s, "silence_epochs": (status.silence_s + heartbeat.age_s) / epoch_s}
    for metric, value in measured.items():
        severity = THRESHOLDS[metric].severity_of(value)
        if severity is not None:
            now = f"process {status.pid} is alive but makes no progress"
            yield _by_limit(State.STALLED, severity, now, metric, value, view.log.last_seq)


def _broken_update(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    last = view.policy.last
    if last is None:
        return
    reason = "" if last.data.skip_reason is None else f": {last.data.skip_reason}"
    # What counts as not finite is the detector's to say; its alarm follows the update and ends with the next good one.
    alarm = view.safety.alarms.get(("num_nonfinite", None))
    if alarm is not None:
        now = f"the policy's update is not finite{reason}"
        yield _by_limit(State.BROKEN_UPDATE, alarm.severity, now, "num_nonfinite", alarm.data.value, alarm.seq)
    severity = THRESHOLDS["skipped_updates"].severity_of(view.policy.num_skipped)
    if severity is not None:
        now = f"the policy did not learn{reason}"
        yield _by_limit(State.BROKEN_UPDATE, severity, now, "skipped_updates", view.policy.num_skipped, last.seq)


def _unsafe(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    rollback = view.safety.last_rollback
    if rollback is not None and _is_recent(view, rollback.round):
        data = rollback.data
        limit = "" if data.limit is None else f", limit {data.limit:g}"
        yield Finding(
            state=State.UNSAFE,
            severity=Severity.ERROR,
            now=f"the governor set env {rollback.env} back in round {rollback.round}: {data.reason}",
            why=f"validation loss {data.value:g}{limit} (seq {rollback.seq}); {view.safety.num_rollbacks} in all",
            next="see what was planted before: esper query RUN 'from safety'",
        )
    for worker in view.safety.workers.values():
        if worker.data.state == "abandoned":
            envs = ", ".join(map(str, worker.data.env_ids))
            yield Finding(
                state=State.UNSAFE,
                severity=Severity.ERROR,
                now=f"worker {worker.data.worker_id} was given up, and with it envs {envs}",
                why=f"{worker.data.error} (seq {worker.seq})",
                next="look for memory or device errors of that worker; resume with fewer workers if it happens again",
            )


def _reward_hacking(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    """Speaks of the policy, so one odd host is not enough: it stays among the newest warnings.

    A policy that is paid for damage does it again and again; exploration meets a hostage now and then.
    """
    recent = [cited for cited in view.safety.suspicions.values() if _is_recent(view, cited.round)]
    # The recent rounds count as whole: early in a run the share is too small rather than too large.
    started = view.progress.started
    num_episodes = len(recent) if started is None else RECENT_ROUNDS * started.num_envs
    if not recent or len(recent) < MIN_SUSPECT_SHARE * num_episodes:
        return
    worst = max(recent, key=lambda cited: (cited.severity is Severity.CRITICAL, cited.seq))
    data = worst.data
    ratio = "" if data.ratio is None else f", ratio {data.ratio:.1f}"
    yield Finding(
        state=State.REWARD_HACKING,
        severity=worst.severity,
        now=f"the reward may pay for damage: {data.pattern} in slot {data.slot_id} of env {worst.env}",
        why=f"contribution {data.contribution_pp:.2f} pp, improvement {data.improvement_pp:.2f} pp{ratio} "
        f"(seq {worst.seq}); suspected in {len(recent)} of {num_episodes} recent episodes, "
        f"limit {MIN_SUSPECT_SHARE:g} of them",
        next="compare return and accuracy: esper query RUN 'from reward_calibration'",
    )


def _starting(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    if view.progress.ended is not None:
        return
    if view.progress.last_round is None:
        yield Finding(
            state=State.STARTING,
            severity=Severity.INFO,
            now="starting: no round is complete yet",
            why=f"{view.log.num_events} events, none of them ROUND_COMPLETED",
            next="wait for the first round",
        )
    elif view.policy.last is not None and view.policy.num_updates < WARMUP_UPDATES:
        yield Finding(
            state=State.WARMING_UP,
            severity=Severity.INFO,
            now="warming up: too early to judge the policy",
            why=f"{view.policy.num_updates} updates, limit {WARMUP_UPDATES} (seq {view.policy.last.seq})",
            next="wait; most alarms are silent until then",
        )


def _critical(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    yield from _alarms(view, State.ALARM, critical=True)
    failure = view.machine.save_failure
    if failure is not None:
        yield Finding(
            state=State.ALARM,
            severity=Severity.ERROR,
            now="checkpoints cannot be saved: a crash now would lose the rounds since the last one",
            why=f"{failure.data.error} (seq {failure.seq})",
            next=ADVICE["disk_free_bytes"],
        )


def _warnings(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    yield from _alarms(view, State.WARNING, critical=False)


def _alarms(view: RunView, state: State, *, critical: bool) -> Iterator[Finding]:
    """Open alarms of one severity, with those about the machine, in the order of the table."""
    found = [
        (_ORDER.get(alarm.data.kind, len(_ORDER)), _from_alarm(state, alarm))
        for alarm in view.safety.alarms.values()
        if alarm.data.kind not in (*_BROKEN, *_PASSIVE) and (alarm.severity is Severity.CRITICAL) is critical
    ]
    for metric, value, seq in _machine(view):
        severity = THRESHOLDS[metric].severity_of(value)
        if severity is not None and (severity is Severity.CRITICAL) is critical:
            now = THRESHOLDS[metric].reason
            found.append((_ORDER[metric], _by_limit(state, severity, now, metric, value, seq)))
    yield from (finding for _, finding in sorted(found, key=lambda entry: entry[0]))


def _from_alarm(state: State, alarm: Cited[AnomalyDetected]) -> Finding:
    """The build that wrote the log may know alarms that this one does not; then the log's own words must do."""
    data = alarm.data
    where = "" if alarm.env is None else f" in env {alarm.env}"
    reason = THRESHOLDS[data.kind].reason if data.kind in THRESHOLDS else data.detail
    return Finding(
        state=state,
        severity=alarm.severity,
        now=f"{reason}{where}",
        why=f"{data.metric} {data.value:g}, limit {data.limit:g} (seq {alarm.seq})",
        next=ADVICE.get(data.kind, "ask the Esper that wrote this log: this one does not know the alarm"),
    )


def _by_limit(state: State, severity: Severity, now: str, metric: str, value: float, seq: int | None) -> Finding:
    limit = THRESHOLDS[metric].limit_of(severity)
    why = f"{metric} {value:g}, limit {limit:g} (seq {seq})"
    return Finding(state=state, severity=severity, now=now, why=why, next=ADVICE[metric])


def _machine(view: RunView) -> Iterator[tuple[str, float, int]]:
    """(metric, value, seq) of the rows that depend on the machine; what was not measured is absent."""
    if view.machine.profile is None:
        return
    seq, profile = view.machine.profile.seq, view.machine.profile.data
    for device in (profile.cuda or {}).values():
        if device.total_bytes > 0:
            yield "gpu_memory_share", device.reserved_bytes / device.total_bytes, seq
    if profile.disk_free_bytes is not None:
        yield "disk_free_bytes", profile.disk_free_bytes, seq
    wall_ms = sum(phase.wall_ms for phase in profile.phases.values())
    if profile.telemetry_cpu_ms is not None and wall_ms > 0:
        yield "telemetry_cpu_share", profile.telemetry_cpu_ms / wall_ms, seq


def _not_acting(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    for alarm in view.safety.alarms.values():
        if alarm.data.kind in _PASSIVE:
            yield _from_alarm(State.NOT_ACTING, alarm)


def _trend(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Iterator[Finding]:
    """A trend is told in every round in which there is one, so only one of the newest round speaks of now."""
    trend, last = view.progress.trend, view.progress.last_round
    if trend is None or _is_older(trend, last):
        yield Finding(
            state=State.STEADY,
            severity=Severity.INFO,
            now="steady",
            why="no trend yet" if last is None else f"no trend in round {last.round} (seq {last.seq})",
            next="nothing to do",
        )
        return
    states = {"improvement": State.IMPROVING, "plateau": State.PLATEAU, "degradation": State.DEGRADING}
    state, data = states[trend.data.kind], trend.data
    yield Finding(
        state=state,
        severity=trend.severity,
        now=f"{state.value}: rolling accuracy {data.rolling_pct:.1f} %",
        why=f"{data.delta_pp:+.2f} pp in {data.window_rounds} rounds (seq {trend.seq})",
        next="look at the newest rounds" if state is State.DEGRADING else "nothing to do",
    )


def _is_alive(heartbeat: Heartbeat | None) -> TypeGuard[Heartbeat]:
    return heartbeat is not None and heartbeat.process is ProcessState.ALIVE


def _is_recent(view: RunView, round_idx: int | None) -> bool:
    now = view.progress.round
    return now is not None and round_idx is not None and now - round_idx < RECENT_ROUNDS


def _is_older(one: Cited[TrendDetected], than: Cited[BatchSummary] | None) -> bool:
    return one.round is not None and than is not None and than.round is not None and one.round < than.round


def _resume(view: RunView) -> str:
    saved = view.machine.saved
    if saved is None:
        return "start again: no checkpoint was saved"
    return f"resume from {saved.data.path}: {RESUME_COMMAND}"


Rule = Callable[[RunView, Heartbeat | None, float], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    _failed,
    _died,
    _evidence_broken,
    _ended,
    _stalled,
    _broken_update,
    _unsafe,
    _reward_hacking,
    _starting,
    _critical,
    _not_acting,
    _warnings,
    _trend,
)
"""In order of urgency. The last one always finds something."""
