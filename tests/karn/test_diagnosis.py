"""One scenario per rule, the order of the rules, and where their limits come from."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import esper.karn
from esper.karn.diagnosis import ADVICE, Diagnosis, RunCondition, diagnose
from esper.karn.history import read_history
from esper.karn.process import Heartbeat, ProcessState, UnreadableStatus
from esper.karn.replay import replay
from esper.leyline import THRESHOLDS, CudaMemory, RunStatus, Severity
from esper.leyline.thresholds import MIN_HOST_SHARE, MIN_PROGRESS_S, MIN_ROLLBACK_SHARE, RECENT_ROUNDS, WARMUP_UPDATES
from esper.simic.telemetry.anomaly_detector import AnomalyDetector
from esper.simic.telemetry.readings import num_nonfinite
from tests.karn.logs import (
    RUN_ID,
    WALL,
    LogWriter,
    T,
    anomaly,
    checkpoint,
    ended,
    events_dropped,
    governor_changed,
    ppo_update,
    profile,
    read_view,
    round_completed,
    started,
    suspected,
    trend,
    worker_changed,
    write_round,
    write_run,
)
from tests.simic.telemetry.updates import inputs

LONG = WARMUP_UPDATES + 1
"""Rounds of a run that is past its warm-up."""
STALE = THRESHOLDS["heartbeat_age_s"].limit_of(Severity.CRITICAL)
ENV = {"episode": 0, "env": 1, "epoch": 0}


status = partial(
    RunStatus,
    run=RUN_ID,
    attempt=0,
    pid=4711,
    host="here",
    process_started_s=None,
    written_wall=WALL,
    closed=False,
    phase="train",
    round=5,
    epoch=1,
    last_seq=100,
    silence_s=0.1,
    median_epoch_s=30.0,
    num_dropped={},
    num_held=0,
    log_error=None,
    disk_free_bytes=None,
)


def heartbeat(process: ProcessState = ProcessState.ALIVE, age_s: float = 0.5, **fields: object) -> Heartbeat:
    return Heartbeat(status=status(**fields), age_s=age_s, process=process)


def judge_all(log: LogWriter, beat: Heartbeat | None = None) -> tuple[Diagnosis, ...]:
    if beat is None:
        beat = heartbeat()
    return diagnose(read_view(replay(log.folder)), beat, WALL)


def judge(log: LogWriter, beat: Heartbeat | None = None) -> Diagnosis:
    return judge_all(log, beat)[0]


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    """A run in good health, past its warm-up, not finished."""
    return write_run(tmp_path, rounds=LONG, finish=False)


def test_a_healthy_run_is_steady(log: LogWriter) -> None:
    found = judge(log)
    assert (found.state, found.severity, len(judge_all(log))) == (RunCondition.STEADY, Severity.INFO, 1)


def test_1_a_failed_run_names_its_error_and_how_to_resume(log: LogWriter) -> None:
    log.emit(T.CHECKPOINT_RECORDED, checkpoint(path="checkpoints/ckpt-00000005"))
    seq = log.emit(T.RUN_ENDED, ended(status="failed", error_type="OSError", error_message="no route"))
    found = judge(log, heartbeat(ProcessState.GONE, age_s=10 * STALE))
    assert (found.state, found.severity) == (RunCondition.FAILED, Severity.CRITICAL)
    assert "OSError: no route" in found.now
    assert f"seq {seq}" in found.why
    assert "ckpt-00000005" in found.next
    assert "--resume" in found.next


def test_2_a_run_without_end_whose_process_is_gone_died(log: LogWriter) -> None:
    for process in (ProcessState.GONE, ProcessState.ELSEWHERE):
        assert judge(log, heartbeat(process, age_s=STALE)).state is RunCondition.STEADY  # it may just be starting again
        found = judge(log, heartbeat(process, age_s=STALE + 1))
        assert found.state is RunCondition.DIED
        assert "no checkpoint" in found.next
        assert f"heartbeat_age_s {STALE + 1:.0f}, limit {STALE:g}" in found.why
        assert f"process 4711 is {process.value}" in found.why


def test_2_without_a_heartbeat_file_the_age_of_the_log_decides(log: LogWriter) -> None:
    view = read_view(replay(log.folder))
    assert view.last_wall is not None
    assert diagnose(view, None, view.last_wall + STALE)[0].state is RunCondition.STEADY
    assert diagnose(view, None, view.last_wall + STALE + 1)[0].state is RunCondition.DIED
    behind = diagnose(view, None, view.last_wall - 3600.0)[0]
    assert behind.state is RunCondition.DIED, "a clock that was set back makes no dead run live"


def test_a_heartbeat_that_cannot_be_read_is_said(log: LogWriter) -> None:
    view, beat = read_view(replay(log.folder)), UnreadableStatus(reason="status.json is not a heartbeat: a link")
    assert view.last_wall is not None
    reported, *_ = diagnose(view, beat, view.last_wall)
    assert (reported.state, reported.why) == (RunCondition.WARNING, beat.reason)
    died, reported, *_ = diagnose(view, beat, view.last_wall + STALE + 1)
    assert (died.state, reported.why) == (RunCondition.DIED, beat.reason)
    assert beat.reason in died.why
    log.emit(T.RUN_ENDED, ended())
    view = read_view(replay(log.folder))
    assert beat.reason not in {one.why for one in diagnose(view, beat, WALL)}, "it no longer matters"


def test_2_a_run_can_die_before_its_first_event(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.write(b"")
    assert judge(log, heartbeat(ProcessState.GONE, age_s=STALE + 1)).state is RunCondition.DIED
    assert diagnose(read_view(replay(tmp_path)), None, WALL)[0].state is RunCondition.STARTING


def damaged(log: LogWriter) -> None:
    log.write(b"{}\n")


def gap(log: LogWriter) -> None:
    log.seq += 3
    log.emit(T.TREND_DETECTED, trend(), round=LONG)


def write_failed(log: LogWriter) -> None:
    log.seq += 2
    log.emit(T.EVENTS_DROPPED, events_dropped(reason="write_failed", first_seq=log.seq - 2, last_seq=log.seq - 1))


@pytest.mark.parametrize(
    ("breaks", "words"), [(damaged, "damaged"), (gap, "without explanation"), (write_failed, "could not be written")]
)
def test_3_broken_evidence_outweighs_completion(
    breaks: Callable[[LogWriter], None], words: str, log: LogWriter
) -> None:
    breaks(log)
    assert judge(log).state is RunCondition.EVIDENCE_BROKEN
    log.emit(T.RUN_ENDED, ended())
    found = judge(log)
    assert found.state is RunCondition.EVIDENCE_BROKEN
    assert words in found.now
    assert RunCondition.COMPLETED in {finding.state for finding in judge_all(log)}


def test_3_a_log_that_cannot_be_written_now(log: LogWriter) -> None:
    found = judge(log, heartbeat(log_error="No space left on device", num_held=12))
    assert found.state is RunCondition.EVIDENCE_BROKEN
    assert "No space left on device; 12 events wait" in found.why


def test_3_an_explained_gap_is_no_broken_evidence(log: LogWriter) -> None:
    log.seq += 2
    log.emit(T.EVENTS_DROPPED, events_dropped(first_seq=log.seq - 2, last_seq=log.seq - 1))
    assert judge(log).state is RunCondition.STEADY


def test_a_completed_run_says_so_whatever_alarms_are_open(log: LogWriter) -> None:
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.CRITICAL, round=LONG)
    seq = log.emit(T.RUN_ENDED, ended())
    found = judge(log, heartbeat(ProcessState.GONE, age_s=10 * STALE))
    assert (found.state, found.severity) == (RunCondition.COMPLETED, Severity.INFO)
    assert f"seq {seq}" in found.why
    assert RunCondition.ALARM in {
        finding.state for finding in judge_all(log, heartbeat(ProcessState.GONE, age_s=10 * STALE))
    }


def test_an_interrupted_run_can_be_resumed(log: LogWriter) -> None:
    log.emit(T.CHECKPOINT_RECORDED, checkpoint())
    log.emit(T.RUN_ENDED, ended(status="interrupted"))
    found = judge(log)
    assert found.state is RunCondition.INTERRUPTED
    assert "--resume" in found.next


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.CRITICAL])
def test_4_silence_is_measured_in_epochs(severity: Severity, log: LogWriter) -> None:
    limit_s = THRESHOLDS["silence_epochs"].limit_of(severity) * 30.0
    quiet = heartbeat(silence_s=limit_s - 0.6, median_epoch_s=30.0)  # the heartbeat itself is 0.5 s old
    assert judge(log, quiet).severity is (Severity.INFO if severity is Severity.WARNING else Severity.WARNING)
    found = judge(log, heartbeat(silence_s=limit_s, median_epoch_s=30.0))
    assert (found.state, found.severity) == (RunCondition.STALLED, severity)
    assert "silence_epochs" in found.why


def test_4_short_epochs_do_not_make_a_stall(log: LogWriter) -> None:
    warn = THRESHOLDS["silence_epochs"].limit_of(Severity.WARNING)
    for median in (None, 0.01):
        assert (
            judge(log, heartbeat(silence_s=warn * MIN_PROGRESS_S - 1, median_epoch_s=median)).state
            is RunCondition.STEADY
        )
        assert (
            judge(log, heartbeat(silence_s=warn * MIN_PROGRESS_S, median_epoch_s=median)).state is RunCondition.STALLED
        )


def test_4_a_process_that_lives_but_no_longer_beats_is_stalled(log: LogWriter) -> None:
    assert judge(log, heartbeat(age_s=STALE + 1)).state is RunCondition.STALLED


NOT_FINITE = [
    {"gradient_stats__num_nonfinite": 1},
    {"lstm__num_nonfinite": 1},
    {"observations__num_nonfinite": 1},
    {"total_loss": math.nan},
    {"ratio_max": math.inf, "gradient_stats__num_nonfinite": 2},
]


@pytest.mark.parametrize("broken", NOT_FINITE, ids=lambda change: next(iter(change)))
def test_5_whatever_the_detector_finds_not_finite_is_a_broken_update(broken: dict[str, Any], log: LogWriter) -> None:
    """One count, told in the alarm: an update cannot be finite for one and not finite for the other."""
    detector = AnomalyDetector()
    for number, made in enumerate((inputs(**broken), inputs())):
        assert made.metrics is not None
        log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(), round=LONG + number)
        for reported, severity in detector.check_all(made, LONG + number).findings:
            seq = log.emit(T.ANOMALY_DETECTED, reported, severity, round=LONG + number)
            break  # the first is about numbers that are none; what else is wrong with them is no matter here
        found = judge(log)
        if number == 0:
            assert (found.state, found.severity) == (RunCondition.BROKEN_UPDATE, Severity.CRITICAL)
            assert found.why.startswith(f"num_nonfinite {num_nonfinite(made.metrics)}, limit 0 ")
            assert f"seq {seq}" in found.why
            assert [finding.state for finding in judge_all(log)] == [RunCondition.BROKEN_UPDATE, RunCondition.STEADY]
    assert found.state is RunCondition.STEADY


def test_5_a_skipped_update(log: LogWriter) -> None:
    seq = log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(performed=False, skip_reason="no finite minibatch"), round=LONG)
    found = judge(log)
    assert found.state is RunCondition.BROKEN_UPDATE
    assert "no finite minibatch" in found.now
    assert f"seq {seq}" in found.why
    log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(), round=LONG + 1)
    assert judge(log).state is RunCondition.STEADY


def test_5_skips_in_a_row_become_critical(log: LogWriter) -> None:
    severities = []
    for number in range(int(THRESHOLDS["skipped_updates"].limit_of(Severity.CRITICAL))):
        log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(performed=False, skip_reason="all bad"), round=LONG + number)
        severities.append(judge(log).severity)
    assert severities[0] is Severity.WARNING
    assert severities[-1] is Severity.CRITICAL


def test_6_a_rollback_is_news_for_some_rounds(log: LogWriter) -> None:
    seq = log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, round=LONG, **ENV)
    for number in range(RECENT_ROUNDS):
        log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG + number)
        found = judge(log)
        assert found.state is RunCondition.UNSAFE
        assert f"env 1 back in round {LONG}: divergence" in found.now
        assert f"seq {seq}" in found.why
    log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG + RECENT_ROUNDS)
    assert judge(log).state is RunCondition.STEADY


def test_6_a_single_rollback_of_many_episodes_is_not_unsafe(tmp_path: Path) -> None:
    num_envs = 10
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started(num_envs=num_envs))
    for number in range(LONG):
        write_round(log, number)
    states = []
    for env in range(math.ceil(MIN_ROLLBACK_SHARE * num_envs * RECENT_ROUNDS)):
        log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, round=LONG, **(ENV | {"env": env}))
        log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG)
        states.append(judge(log).state)
    assert states == [RunCondition.STEADY] * (len(states) - 1) + [RunCondition.UNSAFE]
    assert len(states) > 1


def test_6_a_worker_given_up(log: LogWriter) -> None:
    log.emit(T.WORKER_STATE_CHANGED, worker_changed(state="lost"))
    assert judge(log).state is RunCondition.STEADY
    log.emit(T.WORKER_STATE_CHANGED, worker_changed(state="abandoned"))
    found = judge(log)
    assert found.state is RunCondition.UNSAFE
    assert "worker 1 was abandoned, and with it envs 0, 1" in found.now
    log.emit(T.WORKER_STATE_CHANGED, worker_changed(state="recovered"))
    assert judge(log).state is RunCondition.STEADY


def test_7_reward_hacking(log: LogWriter) -> None:
    for env in (0, 1):
        log.emit(T.REWARD_HACKING_SUSPECTED, suspected(), Severity.WARNING, round=LONG, **(ENV | {"env": env}))
    log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG)
    found = judge(log)
    assert (found.state, found.severity) == (RunCondition.REWARD_HACKING, Severity.WARNING)
    assert "ransomware in slot r0c0 of env 1" in found.now
    log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG + RECENT_ROUNDS)
    assert judge(log).state is RunCondition.STEADY


def test_7_the_worst_suspicion_is_named_not_the_newest(log: LogWriter) -> None:
    mild = suspected(pattern="attribution_ratio", ratio=12.0)
    log.emit(T.REWARD_HACKING_SUSPECTED, mild, Severity.WARNING, round=LONG, **ENV)
    seq = log.emit(T.REWARD_HACKING_SUSPECTED, suspected(), Severity.CRITICAL, round=LONG, **ENV)
    for env in (0, 1):
        log.emit(T.REWARD_HACKING_SUSPECTED, mild, Severity.WARNING, round=LONG, **(ENV | {"env": env}))
    log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG)
    found = judge(log)
    assert (found.state, found.severity) == (RunCondition.REWARD_HACKING, Severity.CRITICAL)
    assert f"seq {seq}" in found.why
    assert f"suspected in 2 of {2 * RECENT_ROUNDS} recent episodes" in found.why


def test_7_a_single_host_of_many_does_not_make_a_run_suspect(tmp_path: Path) -> None:
    num_envs = 10
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started(num_envs=num_envs))
    for number in range(LONG):
        write_round(log, number)
    enough = math.ceil(MIN_HOST_SHARE * num_envs * RECENT_ROUNDS)
    states = []
    for env in range(enough):
        for _ in range(3):  # the same episode again and again is still one
            log.emit(T.REWARD_HACKING_SUSPECTED, suspected(), Severity.CRITICAL, round=LONG, **(ENV | {"env": env}))
        log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG)
        states.append(judge(log).state)
    assert states == [RunCondition.STEADY] * (enough - 1) + [RunCondition.REWARD_HACKING]
    assert len(read_history(replay(log.folder)).warnings) == 3 * enough  # the report still shows each of them


def test_8_starting_then_warming_up_then_judged(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    states = [judge(log).state]
    for number in range(WARMUP_UPDATES + 1):
        write_round(log, number)
        states.append(judge(log).state)
    assert (
        states == [RunCondition.STARTING] + [RunCondition.WARMING_UP] * (WARMUP_UPDATES - 1) + [RunCondition.STEADY] * 2
    )


def test_8_a_controller_that_does_not_learn_needs_no_warm_up(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started(controller="schedule"))
    log.emit(T.ROUND_COMPLETED, round_completed(update_performed=False), round=0)
    assert judge(log).state is RunCondition.STEADY


def test_8_an_empty_log_is_starting(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.write(b"")
    assert judge(log).state is RunCondition.STARTING


def test_9_critical_alarms_come_in_the_order_of_the_table(log: LogWriter) -> None:
    for kind in ("value_nrmse", "ratio_max", "entropy_share"):
        log.emit(T.ANOMALY_DETECTED, anomaly(kind=kind, metric=f"{kind}:op"), Severity.CRITICAL, round=LONG)
    found = judge(log)
    assert found.state is RunCondition.ALARM
    assert [f.why.split(":")[0] for f in judge_all(log)[:3]] == ["ratio_max", "entropy_share", "value_nrmse"]
    assert found.next == ADVICE["ratio_max"]


def test_9_checkpoints_that_fail(log: LogWriter) -> None:
    log.emit(T.CHECKPOINT_RECORDED, checkpoint(action="save_failed", error="No space left"), Severity.ERROR)
    found = judge(log)
    assert found.state is RunCondition.ALARM
    assert "No space left" in found.why


MACHINES = [
    ("disk_free_bytes", lambda value: profile(disk_free_bytes=int(value))),
    ("telemetry_cpu_share", lambda value: profile(telemetry_cpu_ms=value * 2010.0)),
    (
        "gpu_memory_share",
        lambda value: profile(
            cuda={
                "cuda:0": CudaMemory(
                    allocated_bytes=0, reserved_bytes=int(value * 1000), total_bytes=1000, num_retries=0
                )
            }
        ),
    ),
]


@pytest.mark.parametrize(("metric", "make"), MACHINES, ids=lambda part: part if isinstance(part, str) else "")
def test_9_and_11_limits_of_the_machine(metric: str, make: Callable[[float], object], log: LogWriter) -> None:
    row = THRESHOLDS[metric]
    for severity, state in ((Severity.WARNING, RunCondition.WARNING), (Severity.CRITICAL, RunCondition.ALARM)):
        limit = row.limit_of(severity)
        beyond = limit * (0.99 if row.direction == "below" else 1.01)
        log.emit(T.PROFILE_MEASURED, make(beyond), round=LONG)
        found = judge(log)
        assert (found.state, found.severity) == (state, severity)
        assert found.why.startswith(metric)
    harmless = row.limit_of(Severity.WARNING) * (1.01 if row.direction == "below" else 0.99)
    log.emit(T.PROFILE_MEASURED, make(harmless), round=LONG)
    assert judge(log).state is RunCondition.STEADY


@pytest.mark.parametrize("kind", ["decision_share", "wait_share"])
@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.CRITICAL])
def test_10_a_policy_that_does_not_act(kind: str, severity: Severity, log: LogWriter) -> None:
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=LONG)
    log.emit(T.ANOMALY_DETECTED, anomaly(kind=kind, metric=kind), severity, round=LONG)
    assert judge(log).state is RunCondition.NOT_ACTING


def test_11_open_warnings_cite_metric_value_limit_and_place(log: LogWriter) -> None:
    seq = log.emit(T.ANOMALY_DETECTED, anomaly(value=0.4, limit=0.3), Severity.WARNING, round=LONG)
    found = judge(log)
    assert (found.state, found.severity) == (RunCondition.WARNING, Severity.WARNING)
    assert found.why == f"clip_fraction 0.4, limit 0.3 (seq {seq})"
    log.emit(T.ANOMALY_DETECTED, anomaly(state="cleared"), round=LONG)
    assert judge(log).state is RunCondition.STEADY


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("improvement", RunCondition.IMPROVING),
        ("plateau", RunCondition.PLATEAU),
        ("degradation", RunCondition.DEGRADING),
    ],
)
def test_12_the_newest_trend(kind: str, state: RunCondition, log: LogWriter) -> None:
    log.emit(T.TREND_DETECTED, trend(), round=LONG)
    log.emit(T.TREND_DETECTED, trend(kind=kind), round=LONG + 1)
    assert judge(log).state is state
    log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG + 1)
    assert judge(log).state is state


def test_12_a_trend_that_is_over_is_not_reported_for_ever(log: LogWriter) -> None:
    log.emit(T.TREND_DETECTED, trend(), round=LONG)
    log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG)
    assert judge(log).state is RunCondition.IMPROVING
    seq = log.emit(T.ROUND_COMPLETED, round_completed(), round=LONG + 1)
    found = judge(log)
    assert found.state is RunCondition.STEADY
    assert found.why == f"no trend in round {LONG + 1} (seq {seq})"


def test_the_most_urgent_rule_wins_and_the_others_are_kept_in_order(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.ROUND_COMPLETED, round_completed(), round=0)
    log.emit(T.TREND_DETECTED, trend(), round=0)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=0)
    log.emit(T.ANOMALY_DETECTED, anomaly(kind="wait_share", metric="wait_share"), Severity.WARNING, round=0)
    log.emit(T.ANOMALY_DETECTED, anomaly(kind="ratio_max", metric="ratio_max"), Severity.CRITICAL, round=0)
    for env in (0, 1):
        log.emit(T.REWARD_HACKING_SUSPECTED, suspected(), Severity.WARNING, round=0, **(ENV | {"env": env}))
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, round=0, **ENV)
    log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(performed=False), round=0)
    damaged(log)
    found = judge(log, heartbeat(silence_s=1e6))
    order = [
        RunCondition.EVIDENCE_BROKEN,
        RunCondition.STALLED,
        RunCondition.BROKEN_UPDATE,
        RunCondition.UNSAFE,
        RunCondition.REWARD_HACKING,
        RunCondition.WARMING_UP,
        RunCondition.ALARM,
        RunCondition.NOT_ACTING,
        RunCondition.WARNING,
        RunCondition.IMPROVING,
    ]
    assert [finding.state for finding in judge_all(log, heartbeat(silence_s=1e6))] == order
    assert found.state is order[0]
    assert judge(log, heartbeat(ProcessState.GONE, age_s=1e6)).state is RunCondition.DIED


def test_every_alarm_that_can_reach_an_operator_has_advice() -> None:
    asked = {metric for metric, row in THRESHOLDS.items() if row.checked in ("update", "epoch", "machine")}
    assert set(ADVICE) == asked


def numbers_in(source: str) -> list[float]:
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
    ]


@pytest.mark.parametrize("module", ["diagnosis.py"])
def test_the_code_that_judges_has_no_limits_of_its_own(module: str) -> None:
    source = (Path(esper.karn.__file__).parent / module).read_text()
    assert set(numbers_in(source)) <= {0}  # zero is "none at all", not a limit


def test_that_check_would_see_a_limit() -> None:
    assert numbers_in("if age > 15 or x < -0.5: pass") == [15, 0.5]
