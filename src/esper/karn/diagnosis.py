"""Diagnosis of a run: rules over its view and its process, each finding with its evidence and what to do about it.

Pure. Limits come from the table of thresholds; there are none in here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TypeGuard

from esper.karn.process import Heartbeat, ProcessState, UnreadableStatus
from esper.karn.view import Cited, RunView, known
from esper.leyline import THRESHOLDS, AnomalyDetected, Severity, record
from esper.leyline.thresholds import MIN_HOST_SHARE, MIN_PROGRESS_S, MIN_ROLLBACK_SHARE, RECENT_ROUNDS, WARMUP_UPDATES


class RunCondition(str, Enum):
    """What a run is doing, in one word, most urgent first."""

    FAILED = "failed"
    DIED = "died"
    EVIDENCE_BROKEN = "evidence broken"
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    STALLED = "stalled"
    BROKEN_UPDATE = "broken update"
    UNSAFE = "unsafe"
    REWARD_HACKING = "reward hacking"
    STARTING = "starting"
    WARMING_UP = "warming up"
    ALARM = "alarm"
    NOT_ACTING = "not acting"
    WARNING = "warning"
    IMPROVING = "improving"
    PLATEAU = "plateau"
    DEGRADING = "degrading"
    STEADY = "steady"


@record
class Diagnosis:
    """One rule that matched, with its evidence."""

    state: RunCondition
    severity: Severity
    now: str
    """What is the case."""
    why: str
    """Metric, value, limit and sequence number."""
    next: str
    """What to do about it."""

    @property
    def headline(self) -> str:
        """The state and what is the case in one sentence, without saying it twice."""
        return self.now if self.now.startswith(self.state.value) else f"{self.state.value}: {self.now}"


def diagnose(
    view: RunView,
    heartbeat: Heartbeat | UnreadableStatus | None,
    wall: float,
    *,
    run_dir: Path | None = None,
    problems: Sequence[str] = (),
) -> tuple[Diagnosis, ...]:
    """Judges a run: at least one diagnosis, most urgent first. The first one is the verdict.

    Args:
        view: The run, as its log describes it.
        heartbeat: What its status file and process say; None if there is no such file.
        wall: Unix seconds now.
        run_dir: Where the run is, for commands that are advised; None leaves the word RUN in them.
        problems: What a check of the files found damaged; empty if nothing was found, or no check was made.
    """
    found = (
        *_failed(view),
        *_died(view, heartbeat, wall),
        *_evidence_broken(view, heartbeat, problems),
        *_unreadable_status(view, heartbeat),
        *_ended(view),
        *_stalled(view, heartbeat),
        *_broken_update(view),
        *_unsafe(view),
        *_reward_hacking(view),
        *_starting(view),
        *_alarms(view, RunCondition.ALARM, critical=True),
        *_unsaved(view),
        *_not_acting(view),
        *_alarms(view, RunCondition.WARNING, critical=False),
        _trend(view),
    )
    if run_dir is None:
        return found
    quoted = shlex.quote(str(run_dir))
    return tuple(replace(one, next=_RUN.sub(lambda _: quoted, one.next)) for one in found)


_RUN = re.compile(r"\bRUN\b")
"""In advice, RUN stands for the run directory."""
_SMALLER_STEPS = "lower the learning rate or the passes per update"
_LOOK_AT_OBSERVATIONS = "look at the observations of the newest rounds; the task may differ from the one trained on"

ADVICE: dict[str, str] = {
    "num_nonfinite": "look at the first event with this alarm and lower the learning rate; its weights are suspect",
    "skipped_updates": "look at the skip reason; the trainer stops by itself if it goes on",
    "kl_over_target": _SMALLER_STEPS,
    "approx_kl": "check the learning rate and whether any head has more than one legal choice",
    "clip_fraction": _SMALLER_STEPS,
    "ratio_max": _SMALLER_STEPS,
    "ratio_min": _SMALLER_STEPS,
    "entropy_share": "raise the entropy coefficient, or accept it if the return is still rising",
    "value_nrmse": "give the critic time; if it stays, check the scale of the rewards",
    "return_corr": "give the critic time; if it stays, check the observations and the discount",
    "grad_norm_over_clip": _SMALLER_STEPS,
    "grad_drift": "compare with the losses of the same rounds; lower the learning rate if they jump too",
    "lstm_saturated_share": "lower the learning rate; the memory has lost its range",
    "lstm_c_rms": "lower the learning rate; the memory runs away",
    "lstm_h_rms": "the memory carries nothing; check that episodes are long enough to need one",
    "observation_outlier_share": _LOOK_AT_OBSERVATIONS,
    "observation_clipped_share": _LOOK_AT_OBSERVATIONS,
    "observation_drift": _LOOK_AT_OBSERVATIONS,
    "decision_share": "check gates and budget: the policy has almost nothing to decide",
    "wait_share": "raise the entropy coefficient or check that acting can pay under this reward",
    "rollbacks_per_100_episodes": "find out which blueprint precedes the rollbacks: esper query RUN 'from safety'",
    "shaping_share": "lower the shaping terms: the policy may be earning them instead of accuracy",
    "seed_grad_health": "look at the seed's blueprint; it may not suit this host",
    "seed_grad_ratio": "the seed hardly learns; it will be refused by its gate or pruned",
    "val_loss_ratio": "wait for the governor, which acts by limits of its own",
    "silence_epochs": "see what the process does (py-spy dump --pid PID); stop and resume it if it hangs",
    "heartbeat_age_s": "see whether the process is suspended or its disk hangs",
    "gpu_memory_share": "use fewer envs or workers on the device",
    "disk_free_bytes": "free space now: log and checkpoints fail without it",
    "telemetry_cpu_share": "use telemetry level minimal",
}

_BROKEN = ("num_nonfinite", "skipped_updates")
"""Alarms about an update that failed."""
_PASSIVE = ("decision_share", "wait_share")
"""Alarms about a policy that has nothing to decide, or decides nothing."""
_ORDER = {metric: place for place, metric in enumerate(THRESHOLDS)}


def _failed(view: RunView) -> Iterator[Diagnosis]:
    ended = view.ended
    if ended is not None and ended.data.status == "failed":
        yield Diagnosis(
            state=RunCondition.FAILED,
            severity=Severity.CRITICAL,
            now=f"failed: {ended.data.error_type}: {ended.data.error_message}",
            why=f"RUN_ENDED with status failed (seq {ended.event.seq})",
            next=_resume(view),
        )


def _died(view: RunView, heartbeat: Heartbeat | UnreadableStatus | None, wall: float) -> Iterator[Diagnosis]:
    if view.ended is not None or _is_alive(heartbeat):
        return
    if isinstance(heartbeat, Heartbeat):
        age_s, process = heartbeat.age_s, f"process {heartbeat.status.pid} is {heartbeat.process.value}"
    elif view.last_wall is not None:
        missing = "there is no heartbeat file" if heartbeat is None else heartbeat.reason
        age_s, process = abs(wall - view.last_wall), missing  # an event ahead of the clock was before it was set back
    else:
        return
    row = THRESHOLDS["heartbeat_age_s"]
    severity = row.severity_of(age_s)
    if severity is not None:
        yield Diagnosis(
            state=RunCondition.DIED,
            severity=severity,
            now="the process is gone and left no end marker",
            why=f"no RUN_ENDED up to seq {view.last_seq}, heartbeat_age_s {age_s:.0f}, "
            f"limit {row.limit_of(severity):g}, and {process}",
            next=_resume(view),
        )


def _unreadable_status(view: RunView, heartbeat: Heartbeat | UnreadableStatus | None) -> Iterator[Diagnosis]:
    if isinstance(heartbeat, UnreadableStatus) and view.ended is None:
        yield Diagnosis(
            state=RunCondition.WARNING,
            severity=Severity.WARNING,
            now="whether the process lives cannot be told",
            why=heartbeat.reason,
            next="look at the file; a process that writes this run replaces it within seconds",
        )


def _evidence_broken(
    view: RunView, heartbeat: Heartbeat | UnreadableStatus | None, problems: Sequence[str]
) -> Iterator[Diagnosis]:
    reasons = []
    if problems:  # a check of the files has seen more than the events show
        first, *others = problems
        reasons.append(("the record is not whole", f"{first}; and {len(others)} more problems" if others else first))
    elif view.first_bad is not None:
        where = f"{view.first_bad.file} at byte {view.first_bad.offset}"
        reasons.append((f"{view.num_bad} damaged lines", f"the first is in {where}: {view.first_bad.reason}"))
    if view.num_missing > view.num_dropped and not problems:
        missing = f"{view.num_missing} sequence numbers missing up to seq {view.last_seq}"
        reasons.append(("events are missing without explanation", f"{missing}, {view.num_dropped} reported as lost"))
    if (failure := view.write_failure) is not None:
        lost = f"{sum(failure.data.counts.values())} lost (seq {failure.event.seq})"
        reasons.append(("events were lost because the log could not be written", lost))
    if _is_alive(heartbeat) and heartbeat.status.log_error is not None:
        held = f"{heartbeat.status.log_error}; {heartbeat.status.num_held} events wait in memory"
        reasons.append(("the log cannot be written", held))
    advice = "do not cite this run; esper verify RUN names every damaged place. Check disk space and permissions"
    for now, why in reasons:
        yield Diagnosis(state=RunCondition.EVIDENCE_BROKEN, severity=Severity.ERROR, now=now, why=why, next=advice)


def _ended(view: RunView) -> Iterator[Diagnosis]:
    ended = view.ended
    if ended is None or ended.data.status == "failed":
        return
    completed = ended.data.status == "completed"
    best = ended.data.best_accuracy_pct
    yield Diagnosis(
        state=RunCondition.COMPLETED if completed else RunCondition.INTERRUPTED,
        severity=Severity.INFO,
        now=f"{ended.data.status} after {ended.data.num_rounds_total} rounds"
        + ("" if best is None else f", best accuracy {best:.1f} % (best single host)"),
        why=f"RUN_ENDED with status {ended.data.status} (seq {ended.event.seq})",
        next="esper report RUN shows what came of it" if completed else _resume(view),
    )


def _stalled(view: RunView, heartbeat: Heartbeat | UnreadableStatus | None) -> Iterator[Diagnosis]:
    if view.ended is not None or not _is_alive(heartbeat):
        return
    status = heartbeat.status
    epoch_s = MIN_PROGRESS_S if status.median_epoch_s is None else max(status.median_epoch_s, MIN_PROGRESS_S)
    measured = {"heartbeat_age_s": heartbeat.age_s, "silence_epochs": (status.silence_s + heartbeat.age_s) / epoch_s}
    now = f"process {status.pid} is alive but makes no progress"
    for metric, value in measured.items():
        yield from _over_limit(RunCondition.STALLED, metric, value, view.last_seq, now)


def _broken_update(view: RunView) -> Iterator[Diagnosis]:
    last = view.last_update
    if last is None:
        return
    reason = "" if last.data.metrics["skip_reason"] is None else f": {last.data.metrics['skip_reason']}"
    # The detector decides what counts as not finite; its alarm follows the update and ends with the next good one.
    alarm = view.alarms.get(("num_nonfinite", None))
    if alarm is not None:
        yield replace(_from_alarm(RunCondition.BROKEN_UPDATE, alarm), now=f"the policy's update is not finite{reason}")
    now = f"the policy did not learn{reason}"
    yield from _over_limit(RunCondition.BROKEN_UPDATE, "skipped_updates", view.num_skipped_updates, last.event.seq, now)


def _unsafe(view: RunView) -> Iterator[Diagnosis]:
    recent = [cited for cited in view.rollbacks if _is_recent(view, cited.event.round)]
    num_episodes = _recent_episodes(view, len(recent))
    if recent and len(recent) >= MIN_ROLLBACK_SHARE * num_episodes:
        *_, rollback = recent
        data = rollback.data
        limit = "" if data.limit is None else f", limit {data.limit:g}"
        yield Diagnosis(
            state=RunCondition.UNSAFE,
            severity=Severity.ERROR,
            now=f"the governor rolled env {rollback.event.env} back in round {rollback.event.round}: {data.reason}",
            why=f"validation loss {data.value:g}{limit} (seq {rollback.event.seq}); {len(recent)} of {num_episodes} "
            f"recent episodes, limit {MIN_ROLLBACK_SHARE:g} of them; {view.num_rollbacks} in all",
            next="see what was planted before: esper query RUN 'from safety'",
        )
    for worker in view.workers.values():
        if worker.data.state == "abandoned":
            envs = ", ".join(map(str, worker.data.env_ids))
            yield Diagnosis(
                state=RunCondition.UNSAFE,
                severity=Severity.ERROR,
                now=f"worker {worker.data.worker_id} was abandoned, and with it envs {envs}",
                why=f"{worker.data.error} (seq {worker.event.seq})",
                next="look for memory or device errors of that worker; resume with fewer workers if it happens again",
            )


def _reward_hacking(view: RunView) -> Iterator[Diagnosis]:
    """A claim about the policy, so one suspicious episode is not enough: that is only among the newest warnings.

    A policy that is paid for damage repeats it; exploration does it now and then.
    """
    recent = [cited for cited in view.suspicions.values() if _is_recent(view, cited.event.round)]
    num_episodes = _recent_episodes(view, len(recent))
    if not recent or len(recent) < MIN_HOST_SHARE * num_episodes:
        return
    worst = max(recent, key=lambda cited: (cited.event.severity is Severity.CRITICAL, cited.event.seq))
    data = worst.data
    ratio = "" if data.ratio is None else f", ratio {data.ratio:.1f}"
    yield Diagnosis(
        state=RunCondition.REWARD_HACKING,
        severity=worst.event.severity,
        now=f"the reward may pay for damage: {data.pattern} in slot {data.slot_id} of env {worst.event.env}",
        why=f"contribution {data.contribution_pp:.2f} pp, improvement {data.improvement_pp:.2f} pp{ratio} "
        f"(seq {worst.event.seq}); suspected in {len(recent)} of {num_episodes} recent episodes, "
        f"limit {MIN_HOST_SHARE:g} of them",
        next="compare return and accuracy: esper query RUN 'from reward_calibration'",
    )


def _starting(view: RunView) -> Iterator[Diagnosis]:
    if view.ended is not None:
        return
    if view.last_round is None:
        yield Diagnosis(
            state=RunCondition.STARTING,
            severity=Severity.INFO,
            now="starting: no round is complete yet",
            why=f"{view.num_events} events, none of them ROUND_COMPLETED",
            next="wait for the first round",
        )
    elif view.last_update is not None and view.num_updates < WARMUP_UPDATES:
        yield Diagnosis(
            state=RunCondition.WARMING_UP,
            severity=Severity.INFO,
            now="warming up: too early to judge the policy",
            why=f"{view.num_updates} updates, limit {WARMUP_UPDATES} (seq {view.last_update.event.seq})",
            next="wait; most alarms are silent until then",
        )


def _unsaved(view: RunView) -> Iterator[Diagnosis]:
    if view.save_failure is not None:
        yield Diagnosis(
            state=RunCondition.ALARM,
            severity=Severity.ERROR,
            now="checkpoints cannot be saved: a crash now would lose the rounds since the last one",
            why=f"{view.save_failure.data.error} (seq {view.save_failure.event.seq})",
            next=ADVICE["disk_free_bytes"],
        )


def _alarms(view: RunView, state: RunCondition, *, critical: bool) -> Iterator[Diagnosis]:
    """Open alarms of one severity, with those about the machine, in the order of the table."""
    apart = (*_BROKEN, *_PASSIVE)
    alarms = (*(alarm for alarm in view.alarms.values() if alarm.event.env is None), *_common(view))
    found = [(alarm.data.kind, _from_alarm(state, alarm)) for alarm in alarms if alarm.data.kind not in apart]
    for metric, value, seq in _machine(view):
        found += [(metric, one) for one in _over_limit(state, metric, value, seq, THRESHOLDS[metric].what)]
    found.sort(key=lambda entry: _ORDER.get(entry[0], len(_ORDER)))
    yield from (one for _, one in found if (one.severity is Severity.CRITICAL) is critical)


def _common(view: RunView) -> Iterator[Cited[AnomalyDetected]]:
    """Alarms about hosts that so many of them share that the run is at fault; the worst of each kind."""
    by_kind: dict[str, list[Cited[AnomalyDetected]]] = {}
    for alarm in view.alarms.values():
        if alarm.event.env is not None:
            by_kind.setdefault(alarm.data.kind, []).append(alarm)
    for alarms in by_kind.values():
        hosts = {alarm.event.env for alarm in alarms}
        num_envs = len(hosts) if view.started is None else view.started.num_envs
        if len(hosts) >= MIN_HOST_SHARE * num_envs:
            yield max(alarms, key=lambda alarm: (alarm.event.severity is Severity.CRITICAL, alarm.event.seq))


def _from_alarm(state: RunCondition, alarm: Cited[AnomalyDetected]) -> Diagnosis:
    """A newer build may have logged an alarm that this one does not know; then its own text is shown."""
    data = alarm.data
    where = "" if alarm.event.env is None else f" in env {alarm.event.env} and others"
    reason = THRESHOLDS[data.kind].what if data.kind in THRESHOLDS else data.detail
    return Diagnosis(
        state=state,
        severity=alarm.event.severity,
        now=f"{reason}{where}",
        why=f"{data.metric} {data.value:g}, limit {data.limit:g} (seq {alarm.event.seq})",
        next=ADVICE.get(data.kind, "ask the Esper that wrote this log: this one does not know the alarm"),
    )


def _over_limit(state: RunCondition, metric: str, value: float, seq: int | None, now: str) -> Iterator[Diagnosis]:
    """One diagnosis if the value is beyond a limit of its row in the table, otherwise none."""
    severity = THRESHOLDS[metric].severity_of(value)
    if severity is not None:
        why = f"{metric} {value:g}, limit {THRESHOLDS[metric].limit_of(severity):g} (seq {seq})"
        yield Diagnosis(state=state, severity=severity, now=now, why=why, next=ADVICE[metric])


def _machine(view: RunView) -> Iterator[tuple[str, float, int]]:
    """(metric, value, seq) of the rows that depend on the machine; what was not measured is absent."""
    if view.profile is None:
        return
    seq, profile = view.profile.event.seq, view.profile.data
    for device in (profile.cuda or {}).values():
        if device.total_bytes > 0:
            yield "gpu_memory_share", device.reserved_bytes / device.total_bytes, seq
    if profile.disk_free_bytes is not None:
        yield "disk_free_bytes", profile.disk_free_bytes, seq
    wall_ms = sum(phase.wall_ms for phase in profile.phases.values())
    if profile.telemetry_cpu_ms is not None and wall_ms > 0:
        yield "telemetry_cpu_share", profile.telemetry_cpu_ms / wall_ms, seq


def _not_acting(view: RunView) -> Iterator[Diagnosis]:
    for alarm in view.alarms.values():
        if alarm.data.kind in _PASSIVE:
            yield _from_alarm(RunCondition.NOT_ACTING, alarm)


def _trend(view: RunView) -> Diagnosis:
    """Every round with a trend logs it, so only a trend of the newest round describes the present."""
    trend, last = view.trend, view.last_round
    if trend is None or (last is not None and known(trend.event.round) < known(last.event.round)):
        return Diagnosis(
            state=RunCondition.STEADY,
            severity=Severity.INFO,
            now="steady",
            why="no trend yet" if last is None else f"no trend in round {last.event.round} (seq {last.event.seq})",
            next="nothing to do",
        )
    states = {
        "improvement": RunCondition.IMPROVING,
        "plateau": RunCondition.PLATEAU,
        "degradation": RunCondition.DEGRADING,
    }
    state, data = states[trend.data.kind], trend.data
    return Diagnosis(
        state=state,
        severity=trend.event.severity,
        now=f"{state.value}: rolling accuracy {data.rolling_pct:.1f} %",
        why=f"{data.delta_pp:+.2f} pp in {data.window_rounds} rounds (seq {trend.event.seq})",
        next="look at the newest rounds" if state is RunCondition.DEGRADING else "nothing to do",
    )


def _is_alive(heartbeat: Heartbeat | UnreadableStatus | None) -> TypeGuard[Heartbeat]:
    return isinstance(heartbeat, Heartbeat) and heartbeat.process is ProcessState.ALIVE


def _is_recent(view: RunView, round_idx: int | None) -> bool:
    return view.round is not None and view.round - known(round_idx) < RECENT_ROUNDS


def _recent_episodes(view: RunView, known_of: int) -> int:
    """The recent rounds count as whole: early in a run a share of them is too small rather than too large."""
    return known_of if view.started is None else RECENT_ROUNDS * view.started.num_envs


def _resume(view: RunView) -> str:
    if view.saved is None:
        return "start again: no checkpoint was saved"
    return f"resume from {view.saved.data.path}: esper train --resume RUN"
