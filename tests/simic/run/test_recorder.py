"""The recorder: events of real runs that agree, alarms, trends, and the cost of telemetry itself."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from esper.leyline import EVENTS, THRESHOLDS, AnomalyDebug, Severity, TelemetryLevel
from esper.leyline.thresholds import MIN_RATE_EPISODES
from esper.nissa import Hub
from esper.runtime import tasks
from esper.simic.run import recorder
from tests.karn.logs import episode_completed
from tests.simic.run.recording import NO_TIME, recorder_to
from tests.simic.telemetry.test_emitters import SUMMARY
from tests.simic.telemetry.updates import ListSink, metrics
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log, run_with

PLANTS = replace(TINY, task="digits_blind", controller="random", rounds=1, episode_length=12, minibatches=1)
RUN = replace(TINY, controller="wait_only", rounds=3, envs=1, minibatches=1, episode_length=2)


class Meter(Hub):
    """A hub whose writer has worked and waited as long as it is reported, by the end of each round."""

    writer_cpu_ms = (100.0, 250.0, 450.0)
    high_water = (3, 9, 9)

    def __init__(self):
        super().__init__()
        self.events = []
        self.moves = []

    def emit(self, event):
        self.events.append(event)

    def progress(self, phase, *, round=None, epoch=None):
        self.moves.append((phase, round, epoch))

    def of(self, kind):
        return [event.data for event in self.events if event.type.value == kind]

    def health(self):
        done = len(self.of("ROUND_COMPLETED"))
        return replace(super().health(), writer_cpu_ms=self.writer_cpu_ms[done], queue_high_water=self.high_water[done])


def test_a_profile_has_the_cost_of_telemetry_in_its_own_round(monkeypatch):
    """On a clock that is a second later at every look: telling takes one for the end of the round before, one for the
    beginning and one per step."""
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(recorder, "time", SimpleNamespace(thread_time=lambda: float(next(ticks))))
    hub = Meter()
    run_with(hub, RUN, TelemetryLevel.NORMAL)
    reported_s = (0 + 1 + 2, 1 + 1 + 2, 1 + 1 + 2)
    written_ms = (100.0, 150.0, 200.0)
    expected = [1e3 * reported + written for reported, written in zip(reported_s, written_ms, strict=True)]
    assert [profile.telemetry_cpu_ms for profile in hub.of("PROFILE_MEASURED")] == expected


def test_a_profile_has_the_fullest_the_queue_has_been():
    hub = Meter()
    run_with(hub, RUN, TelemetryLevel.NORMAL)
    assert [profile.queue_high_water for profile in hub.of("PROFILE_MEASURED")] == [3, 9, 9]


def test_every_step_is_progress():
    hub = Meter()
    run_with(hub, RUN, TelemetryLevel.NORMAL)
    played = [("play", number, epoch) for number in range(RUN.rounds) for epoch in range(RUN.episode_length + 1)]
    assert [move for move in hub.moves if move[0] == "play"] == played


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_seeds_contribution_is_the_same_in_both_events(tmp_path, monkeypatch, metric):
    monkeypatch.setitem(tasks.TASKS, "digits_blind", replace(tasks.TASKS["digits_blind"], metric=metric))
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, PLANTS, TelemetryLevel.NORMAL)
    epochs = {(e["env"], e["epoch"]): e["data"]["slots"] for e in events_of(tmp_path, "EPOCH_COMPLETED")}
    reported = 0
    for event in events_of(tmp_path, "COALITION_MEASURED"):
        slots = epochs[event["env"], event["epoch"]]
        for slot_id, worth in event["data"]["contribution_pp"].items():
            reported += worth != 0.0
            assert slots[slot_id]["contribution_pp"] == pytest.approx(worth, abs=1e-4)
    assert reported > 3


@pytest.mark.parametrize("budget", [195, None])
def test_a_fixed_controller_is_forced_where_only_waiting_is_legal(tmp_path, budget):
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, replace(PLANTS, param_budget=budget), TelemetryLevel.NORMAL)
    forced = [event["data"]["forced"] for event in events_of(tmp_path, "ACTION_TAKEN")]
    (ops,) = [e["data"] for e in events_of(tmp_path, "CHOICE_STATS") if e["data"]["head"] == "op"]
    assert sum(forced) == ops["num_forced"]
    assert all(forced) == (budget is not None)


@pytest.mark.parametrize("learned", [None, metrics()], ids=["fixed controller", "policy"])
def test_rollbacks_are_judged_whoever_decides(learned):
    sink = ListSink()
    log = recorder_to(sink, escalation_epochs=5 if learned is None else 0)  # no closer look at a policy that is none
    for number in range(3):
        log.round_begins(number)
        rolled_back = MIN_RATE_EPISODES if number == 1 else 0
        summary = replace(SUMMARY, num_rollbacks=rolled_back, num_episodes_total=MIN_RATE_EPISODES * (number + 1))
        log.round_ends(number, summary, learned, (), NO_TIME)
    reported = [(e.round, e.data.metric, e.data.limit) for e in sink.events if e.type.value == "ANOMALY_DETECTED"]
    limit = THRESHOLDS["rollbacks_per_100_episodes"].limit_of(Severity.CRITICAL)
    assert reported == [(1, "rollbacks_per_100_episodes", limit)]


class Looks:
    """A policy whose looks are counted."""

    evidence = AnomalyDebug(layers=None, stability=None, ratios=(9.0,), num_ratios_out_of_range=1)

    def __init__(self):
        self.num_bundles = 0

    def layers(self):
        return None

    def bundle(self):
        self.num_bundles += 1
        return self.evidence


SKIPPED = metrics(performed=False, skip_reason="nonfinite")
EPISODE = episode_completed()


@pytest.mark.parametrize("level", [TelemetryLevel.NORMAL, TelemetryLevel.DEBUG])
def test_an_alarm_brings_evidence_at_level_debug_when_it_is_raised(level):
    sink, looks = ListSink(), Looks()
    log = recorder_to(sink, level=level, escalation_epochs=0, reads=looks)
    for number, update in enumerate((metrics(), SKIPPED, metrics())):
        log.round_begins(number)
        log.round_ends(number, replace(SUMMARY, num_rollbacks=0), update, (), NO_TIME)
    evidence = Looks.evidence if level is TelemetryLevel.DEBUG else None
    alarms = [(alarm.kind, alarm.state, alarm.debug) for alarm in sink.of("ANOMALY_DETECTED")]
    assert alarms == [("skipped_updates", "entered", evidence), ("skipped_updates", "cleared", None)]
    assert looks.num_bundles == (level is TelemetryLevel.DEBUG)


def test_the_end_of_a_round_is_reported_after_everything_else_of_it():
    sink = ListSink()
    log = recorder_to(sink, num_rounds=12, reads=Looks())
    for number in range(12):
        last = number == 11
        log.round_begins(number)
        summary = replace(SUMMARY, num_rollbacks=0, rolling_accuracy_pct=50.0 if last else 80.0)
        log.round_ends(number, summary, SKIPPED if last else metrics(), (EPISODE,), NO_TIME)
    reported = [event.type.value for event in sink.events if event.round == 11]
    assert reported[-1] == "ROUND_COMPLETED"
    before = "EPISODE_COMPLETED PPO_UPDATE_COMPLETED ANOMALY_DETECTED CHOICE_STATS TREND_DETECTED PROFILE_MEASURED"
    assert set(reported[:-1]) == set(before.split())


def facts_of(sink):
    return [event for event in sink.events if EVENTS[event.type].training_fact]


def test_a_log_that_goes_on_after_any_round_tells_what_an_unbroken_one_does():
    """Trends and the rate of rollbacks look back over the whole run."""
    whole, broken = ListSink(), ListSink()
    unbroken, log = (recorder_to(sink, num_rounds=14, reads=Looks()) for sink in (whole, broken))
    for number in range(14):
        summary = replace(
            SUMMARY,
            num_rollbacks=3 if number == 1 else 0,
            num_episodes_total=8 * (number + 1),
            rolling_accuracy_pct=50.0 + 3.0 * number,
        )
        update = SKIPPED if number in (4, 5) else metrics()
        for each in (unbroken, log):
            each.round_begins(number)
            each.round_ends(number, summary, update, (), NO_TIME)
        saved = json.loads(json.dumps(log.state_dict(), allow_nan=False))
        log = recorder_to(broken, num_rounds=14, reads=Looks())
        log.load_state_dict(saved)
    assert facts_of(broken) == facts_of(whole)
    kinds = {alarm.kind for alarm in whole.of("ANOMALY_DETECTED")}
    assert {"rollbacks_per_100_episodes", "skipped_updates"} <= kinds
    assert whole.of("TREND_DETECTED")


class Told(Hub):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.kinds = set()

    def emit(self, event):
        self.kinds.add(event.type.value)


@pytest.mark.parametrize(("level", "reported"), [(TelemetryLevel.OFF, False), (TelemetryLevel.MINIMAL, True)])
def test_hosts_report_what_the_level_wants_and_no_more(level, reported):
    hub = Told()
    run_with(hub, PLANTS, level)
    assert ({"SEED_GERMINATED", "SEED_STAGE_CHANGED"} <= hub.kinds) == reported
    assert any(kind.startswith("SEED_") for kind in hub.kinds) == reported
    assert "ROUND_COMPLETED" in hub.kinds
