"""The log of real runs: two events about the same thing agree, and fixed controllers are judged too."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from esper.leyline import THRESHOLDS, AnomalyDebug, Severity, TelemetryLevel
from esper.leyline.thresholds import MIN_RATE_EPISODES
from esper.nissa import Hub
from esper.runtime import tasks
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.simic.training.run_log import RunLog
from tests.fakes import world
from tests.nissa.samples import episode, profile
from tests.simic.telemetry.test_emitters import SUMMARY
from tests.simic.telemetry.updates import ListSink, metrics
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log, run_with

PLANTS = replace(TINY, task="digits_blind", controller="random", rounds=1, episode_length=12, minibatches=1)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_seeds_contribution_is_the_same_in_both_events(tmp_path, monkeypatch, metric):
    monkeypatch.setitem(tasks.TASKS, "digits_blind", replace(tasks.TASKS["digits_blind"], metric=metric))
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, PLANTS, TelemetryLevel.NORMAL)
    epochs = {(e["env"], e["epoch"]): e["data"]["slots"] for e in events_of(tmp_path, "EPOCH_COMPLETED")}
    told = 0
    for event in events_of(tmp_path, "COALITION_MEASURED"):
        slots = epochs[event["env"], event["epoch"]]
        for slot_id, worth in event["data"]["contribution_pp"].items():
            told += worth != 0.0
            assert slots[slot_id]["contribution_pp"] == pytest.approx(worth, abs=1e-4)
    assert told > 3


@pytest.mark.parametrize("budget", [195, None])
def test_a_fixed_controller_is_forced_where_only_waiting_is_legal(tmp_path, budget):
    with open_log(tmp_path, strict=True) as hub:
        run_with(hub, replace(PLANTS, param_budget=budget), TelemetryLevel.NORMAL)
    forced = [event["data"]["forced"] for event in events_of(tmp_path, "ACTION_TAKEN")]
    (ops,) = [e["data"] for e in events_of(tmp_path, "CHOICE_STATS") if e["data"]["head"] == "op"]
    assert sum(forced) == ops["num_forced"]
    assert all(forced) == (budget is not None)


class NoReads:
    """A policy that must not be looked at."""


def log_to(sink, *, num_rounds=9, **telemetry):
    outbox = SimpleNamespace(wanted=frozenset(), closer=frozenset())
    config = TelemetryConfig(**telemetry)
    return RunLog(sink, config, tasks.TASKS["digits_blind"], world().layout, num_rounds=num_rounds, outbox=outbox)


@pytest.mark.parametrize("learned", [None, metrics()], ids=["fixed controller", "policy"])
def test_rollbacks_are_judged_whoever_decides(learned):
    sink = ListSink()
    log = log_to(sink, escalate_on_anomaly=learned is None)  # no closer look at a policy that is none
    for number in range(3):
        log.round_begins(number, 1)
        rolled_back = MIN_RATE_EPISODES if number == 1 else 0
        summary = replace(SUMMARY, num_rollbacks=rolled_back, num_episodes_total=MIN_RATE_EPISODES * (number + 1))
        log.round_ends(number, summary, learned, (), profile(), NoReads())
    told = [(e.round, e.data.metric, e.data.limit) for e in sink.events if e.type.value == "ANOMALY_DETECTED"]
    limit = THRESHOLDS["rollbacks_per_100_episodes"].limit_of(Severity.CRITICAL)
    assert told == [(1, "rollbacks_per_100_episodes", limit)]


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
EPISODE = episode(return_raw=1.0)


@pytest.mark.parametrize("level", [TelemetryLevel.NORMAL, TelemetryLevel.DEBUG])
def test_an_alarm_brings_evidence_at_level_debug_when_it_is_raised(level):
    sink, looks = ListSink(), Looks()
    log = log_to(sink, level=level, escalate_on_anomaly=False)
    for number, update in enumerate((metrics(), SKIPPED, metrics())):
        log.round_begins(number, 1)
        log.round_ends(number, replace(SUMMARY, num_rollbacks=0), update, (), profile(), looks)
    evidence = Looks.evidence if level is TelemetryLevel.DEBUG else None
    alarms = [(alarm.kind, alarm.state, alarm.debug) for alarm in sink.of("ANOMALY_DETECTED")]
    assert alarms == [("skipped_updates", "entered", evidence), ("skipped_updates", "cleared", None)]
    assert looks.num_bundles == (level is TelemetryLevel.DEBUG)


def test_the_end_of_a_round_is_told_after_everything_else_of_it():
    sink = ListSink()
    log = log_to(sink, num_rounds=12)
    for number in range(12):
        last = number == 11
        log.round_begins(number, 1)
        summary = replace(SUMMARY, num_rollbacks=0, rolling_accuracy_pct=50.0 if last else 80.0)
        log.round_ends(number, summary, SKIPPED if last else metrics(), (EPISODE,), profile(), Looks())
    told = [event.type.value for event in sink.events if event.round == 11]
    assert told[-1] == "ROUND_COMPLETED"
    before = "EPISODE_COMPLETED PPO_UPDATE_COMPLETED ANOMALY_DETECTED CHOICE_STATS TREND_DETECTED PROFILE_MEASURED"
    assert set(told[:-1]) == set(before.split())


def test_a_log_that_goes_on_after_any_round_tells_what_an_unbroken_one_does():
    """Trends and the rate of rollbacks look back over the whole run."""
    whole, broken = ListSink(), ListSink()
    unbroken, log = log_to(whole, num_rounds=14), log_to(broken, num_rounds=14)
    for number in range(14):
        summary = replace(
            SUMMARY,
            num_rollbacks=3 if number == 1 else 0,
            num_episodes_total=8 * (number + 1),
            rolling_accuracy_pct=50.0 + 3.0 * number,
        )
        update = SKIPPED if number in (4, 5) else metrics()
        for each in (unbroken, log):
            each.round_begins(number, 1)
            each.round_ends(number, summary, update, (), profile(), Looks())
        saved, log = json.loads(json.dumps(log.state_dict(), allow_nan=False)), log_to(broken, num_rounds=14)
        log.load_state_dict(saved)
    assert broken.events == whole.events
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


@pytest.mark.parametrize(("level", "told"), [(TelemetryLevel.OFF, False), (TelemetryLevel.MINIMAL, True)])
def test_hosts_report_what_the_level_wants_and_no_more(level, told):
    hub = Told()
    run_with(hub, PLANTS, level)
    assert ({"SEED_GERMINATED", "SEED_STAGE_CHANGED"} <= hub.kinds) == told
    assert any(kind.startswith("SEED_") for kind in hub.kinds) == told
    assert "ROUND_COMPLETED" in hub.kinds
