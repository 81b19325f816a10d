"""Two real runs that learned well, told again by today's code: their verdict must say so.

`healthy_runs.json.gz` holds what was measured in policy runs on `digits_blind` (20 rounds of 12 envs) and
`digits_saturated` (60 rounds of 16 envs), to four digits: by round the metrics of the update, the rolling accuracy,
what each term paid, and every sign of reward hacking under limits looser than today's. Alarms, suspicions and trends
are not in it: they are made here, so a limit that does not fit a healthy run is seen.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.alarms import watch_log
from esper.karn.diagnosis import Diagnosis, RunCondition, diagnose
from esper.karn.replay import replay
from esper.karn.view import RunView
from esper.leyline import (
    EpisodeCompleted,
    HeadUpdate,
    LoggedEvent,
    LSTMHealth,
    ObservationHealth,
    RewardHackingSuspected,
    Severity,
)
from esper.leyline.thresholds import TREND_WINDOW_ROUNDS, WARMUP_UPDATES
from esper.simic.rewards.suspicion import over_attribution, ransomware
from esper.simic.telemetry.readings import EnvContext
from esper.simic.telemetry.report_events import SuspicionWatch
from tests.karn.logs import LogWriter, T, started
from tests.simic.run.recording import NO_TIME, recorder_to
from tests.simic.telemetry.test_emitters import SUMMARY
from tests.simic.telemetry.updates import ListSink

RUNS: dict[str, Any] = json.loads(gzip.decompress((Path(__file__).parent / "healthy_runs.json.gz").read_bytes()))
TRENDS = {"digits_blind": RunCondition.IMPROVING, "digits_saturated": RunCondition.PLATEAU}
"""Where each of them was at its end."""
HORIZON = 20


def paid(amounts: dict[str, float]) -> EpisodeCompleted:
    """An episode of which only the pay is known."""
    return EpisodeCompleted(
        end="completed",
        num_epochs=HORIZON,
        final_accuracy_pct=0.0,
        best_accuracy_pct=0.0,
        committed_accuracy_pct=None,
        final_loss=0.0,
        params_added=0,
        params_ratio=1.0,
        num_germinated=0,
        num_fossilized=0,
        num_pruned=0,
        num_alive=0,
        num_contributing_fossils=0,
        return_raw=0.0,
        components_sum=amounts,
        num_ops={},
    )


def signs_of(stored: list[list[Any]]) -> dict[tuple[int, int], list[RewardHackingSuspected]]:
    """By env and epoch, what today's limits see in what was measured."""
    found = defaultdict(list)
    for env, epoch, pattern, slot_id, claimed, improvement_pp in stored:
        judge = ransomware if pattern == "ransomware" else over_attribution
        found[env, epoch] += judge({slot_id: claimed}, improvement_pp)
    return found


class NothingLeft:
    """Stands for a closer look at a policy that is no longer there."""

    def layers(self) -> tuple[()]:
        return ()

    def bundle(self) -> None:
        """Nothing is left to look at."""


def metrics_of(stored: dict[str, Any]) -> Any:
    """Metrics of an update in today's shape. Clipped rewards and the smallest gradient norm were not measured then."""
    grad = dict(stored["gradient_stats"])
    norms = {"grad_norm": grad.pop("norm_mean"), "max_grad": grad.pop("norm_max"), "min_grad": None}
    return {
        "num_rewards_clipped": None,
        **stored,
        "gradient_stats": norms | grad,
        "heads": {head: HeadUpdate(**stats) for head, stats in stored["heads"].items()},
        "lstm": LSTMHealth(**stored["lstm"]),
        "observations": ObservationHealth(**stored["observations"]),
    }


def reported_again(run: dict[str, Any], folder: Path) -> LogWriter:
    """The log that today's code would have written, as far as rounds, alarms and suspicions go."""
    sink, log = ListSink(), LogWriter(folder)
    log.emit(T.RUN_STARTED, started(num_envs=run["num_envs"], num_rounds=len(run["rounds"])))
    rounds = recorder_to(sink, num_rounds=len(run["rounds"]), num_envs=run["num_envs"], reads=NothingLeft())
    watch = SuspicionWatch()
    for number, facts in enumerate(run["rounds"]):
        rounds.round_begins(number)
        signs = signs_of(facts.get("signs", []))
        for epoch in range(HORIZON):
            for env in range(run["num_envs"]):
                watch.emit(sink, EnvContext(round=number, episode=number, env=env, epoch=epoch), signs[env, epoch])
        known = ("rolling_accuracy_pct", "num_rollbacks", "num_episodes_total")
        summary = replace(SUMMARY, **{name: facts[name] for name in known})
        rounds.round_ends(number, summary, metrics_of(facts["metrics"]), (paid(facts["paid"]),), NO_TIME)
    for event in sink.events:
        ids = {"round": event.round, "episode": event.episode, "env": event.env, "epoch": event.epoch}
        log.emit(event.type, event.data, event.severity, **ids)
    return log


def verdicts(log: LogWriter) -> tuple[list[Diagnosis], RunView]:
    """The verdict after each round, and the view at the end."""
    found, view = [], RunView()
    for item in replay(log.folder):
        view.add(item)
        if isinstance(item, LoggedEvent) and item.type is T.ROUND_COMPLETED:
            found.append(diagnose(view, None, item.wall)[0])
    return found, view


@pytest.mark.parametrize("task", RUNS)
def test_a_healthy_run_gets_past_warming_up_and_is_not_accused(task: str, tmp_path: Path) -> None:
    found, view = verdicts(reported_again(RUNS[task], tmp_path))
    states = [each.state for each in found]
    assert len(states) == len(RUNS[task]["rounds"])
    assert states[: WARMUP_UPDATES - 1] == [RunCondition.WARMING_UP] * (WARMUP_UPDATES - 1)
    judged = Counter(states[WARMUP_UPDATES - 1 :])
    assert not {
        RunCondition.REWARD_HACKING,
        RunCondition.ALARM,
        RunCondition.BROKEN_UPDATE,
        RunCondition.NOT_ACTING,
    } & set(judged)
    assert judged[RunCondition.WARNING] <= 0.1 * len(states)
    assert states[-1] is TRENDS[task]
    assert TRENDS[task] in states[TREND_WINDOW_ROUNDS:-1]
    assert not view.alarms


@pytest.mark.parametrize("task", RUNS)
def test_few_episodes_of_a_healthy_run_are_suspected(task: str, tmp_path: Path) -> None:
    run = RUNS[task]
    events = [item for item in replay(reported_again(run, tmp_path).folder) if isinstance(item, LoggedEvent)]
    reported = [event for event in events if event.type is T.REWARD_HACKING_SUSPECTED]
    assert len({(event.round, event.env) for event in reported}) <= 0.02 * run["num_envs"] * len(run["rounds"])
    assert sum(event.severity is Severity.CRITICAL for event in reported) <= 0.2 * len(run["rounds"])
    assert sum(len(facts.get("signs", [])) for facts in run["rounds"]) > 20 * len(reported), "signs are plenty"


@pytest.mark.parametrize("task", RUNS)
def test_the_console_of_a_healthy_run_is_quiet(task: str, tmp_path: Path) -> None:
    """A round of the demo takes some fifteen seconds, so a line in ten rounds is less than one in two minutes."""
    shown = watch_log(reported_again(RUNS[task], tmp_path).folder, task, 0)
    assert shown.num_rounds == len(RUNS[task]["rounds"])
    assert len(shown.lines) <= 0.1 * shown.num_rounds, shown.lines
    assert sum(shown.events.values()) > len(shown.lines), "the log has more"
