"""Every type of event really happens in a seeded run, says what happened there, and changes what somebody sees."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.karn.history import RunHistory, read_history
from esper.karn.integrity import check_run
from esper.karn.view import RunView
from esper.leyline import EVENTS, LoggedEvent, Severity, TelemetryEventType
from esper.leyline.rundir import EVENTS_DIR
from esper.simic.client import SimicClient
from esper.simic.run.checkpoint import load_checkpoint
from tests.telemetry.sessions import SCENARIOS, Played, of

Scenarios = Mapping[str, Played]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    runs = tmp_path_factory.mktemp("runs")
    return {scenario.__name__: scenario(runs) for scenario in SCENARIOS}


def test_every_type_happens(played: Scenarios) -> None:
    assert {event.type for one in played.values() for event in one.events} == set(EVENTS)


def test_every_scenario_leaves_a_sound_record(played: Scenarios) -> None:
    assert {name: check_run(one.run).problems for name, one in played.items()} == dict.fromkeys(played, ())


# ---- what the rare ones say


def test_a_spoiled_host_is_set_back_and_only_the_step_that_caused_it_pays(played: Scenarios) -> None:
    one = played["spoiled"]
    (changed,) = of(one.events, "GOVERNOR_STATE_CHANGED")
    assert (changed.env, changed.episode, changed.epoch) == (0, 0, 2)
    assert (changed.severity, changed.data.reason, changed.data.rolled_back) == (Severity.CRITICAL, "nonfinite", True)
    ends = [(event.env, event.data.end, event.data.num_epochs) for event in of(one.events, "EPISODE_COMPLETED")]
    assert ends == [(0, "rolled_back", 3), (1, "completed", 6)]
    (round_done,) = of(one.events, "ROUND_COMPLETED")
    assert round_done.data.num_rollbacks == 1
    actions = of(one.events, "ACTION_TAKEN")
    paying = [(act.env, act.epoch) for act in actions if act.data.components.get("rollback", 0.0) != 0.0]
    assert paying == [(0, 2)]
    (causing,) = [act for act in actions if (act.env, act.epoch) == (0, 2)]
    assert causing.data.components["rollback"] < 0.0

    client = one.session.trainer.client
    assert isinstance(client, SimicClient)
    buffer = client.buffer
    assert buffer is not None
    # The policy learns from exactly these rows: the penalty is in the third, which ends the episode.
    assert buffer.storage.valid_TN[:, 0].tolist() == [True] * 3 + [False] * 3
    assert buffer.storage.terminated_TN[:3, 0].tolist() == [False, False, True]
    paid = torch.zeros_like(buffer.storage.rewards_TN)
    for act in actions:
        paid[act.epoch, act.env] = act.data.reward_raw  # type: ignore[index]
    assert torch.allclose(buffer.storage.rewards_TN, paid / client.scale.scale, atol=1e-6)
    assert buffer.storage.rewards_TN[2, 0] == buffer.storage.rewards_TN.min()


def test_an_alarm_is_reported_when_it_begins_and_when_it_ends(played: Scenarios) -> None:
    reported = [
        (event.round, event.data.metric, event.data.state)
        for event in of(played["skipped_update"].events, "ANOMALY_DETECTED")
    ]
    assert (0, "skipped_updates", "entered") in reported
    assert (1, "skipped_updates", "cleared") in reported
    assert len(reported) == len(set(reported))


def test_a_suspicion_is_reported_once_it_has_lasted_and_not_again(played: Scenarios) -> None:
    one = played["suspected"]
    claims = {event.epoch: event.data.contribution_pp.get("r0c0") for event in of(one.events, "COALITION_MEASURED")}
    claiming = [epoch for epoch, claim in claims.items() if claim is not None and claim > 0.0]
    assert claiming[1] == claiming[0] + 1, "the run must show what the test is about"
    reported = of(one.events, "REWARD_HACKING_SUSPECTED")
    assert [event.data.pattern for event in reported] == ["attribution_ratio"]
    assert reported[0].epoch == claiming[1]
    assert reported[0].data.ratio > 0.0


def test_a_trend_is_reported_of_the_rolling_accuracy(played: Scenarios) -> None:
    one = played["long_wait"]
    rolling = {event.round: event.data.rolling_accuracy_pct for event in of(one.events, "ROUND_COMPLETED")}
    reported = of(one.events, "TREND_DETECTED")
    assert reported
    for trend in reported:
        assert trend.data.rolling_pct == rolling[trend.round]
        assert trend.data.delta_pp == pytest.approx(trend.data.rolling_pct - trend.data.previous_pct)


def test_a_killed_worker_is_lost_and_recovered(played: Scenarios) -> None:
    one = played["killed_worker"]
    lost, back = (event.data for event in of(one.events, "WORKER_STATE_CHANGED"))
    assert (lost.state, back.state) == ("lost", "recovered")
    assert (lost.exit_code, lost.env_ids, back.num_epochs_replayed) == (-9, (0, 1), 1)
    assert back.downtime_ms > 0.0
    assert {event.data.end for event in of(one.events, "EPISODE_COMPLETED")} == {"completed"}


def test_lost_events_are_counted_to_the_number(played: Scenarios) -> None:
    one = played["overflowing"]
    drops = [event.data for event in of(one.events, "EVENTS_DROPPED")]
    assert drops
    assert {drop.reason for drop in drops} == {"queue_full"}
    gone = sum(sum(drop.counts.values()) for drop in drops)
    assert gone == check_run(one.run).num_missing_seq
    # The end is told before the last losses are explained, so it may know of fewer.
    assert 0 < of(one.events, "RUN_ENDED")[-1].data.num_dropped_total <= gone
    assert all(not EVENTS[TelemetryEventType(kind)].must for drop in drops for kind in drop.counts)
    assert not one.session.log_complete


def test_checkpoints_and_ends_are_reported_as_they_are(played: Scenarios) -> None:
    one = played["learned"]
    loaded, saved = (event.data for event in of(one.events, "CHECKPOINT_RECORDED"))
    assert (loaded.action, loaded.path, loaded.round) == ("loaded", "checkpoints/ckpt-00000001", 1)
    assert (saved.action, saved.round) == ("saved", 2)
    folder = one.run / saved.path
    assert saved.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert saved.next_seq == load_checkpoint(folder).facts.next_seq
    (ended,) = of(one.events, "RUN_ENDED")
    assert one.events[-1] is ended
    assert (ended.data.status, ended.data.num_rounds_total) == ("completed", 2)
    assert ended.data.num_env_steps_total == one.session.trainer.num_env_steps
    assert ended.data.final_accuracy_pct == one.session.trainer.history[-1].accuracy_mean_pct


# ---- who is told


def test_every_type_changes_what_somebody_sees(played: Scenarios, tmp_path: Path) -> None:
    """In the view of the run, in the story that reports tell, or in a table for queries. A list of all events, or of
    all warnings, would show anything, and does not count."""
    left = set(EVENTS)
    for one in played.values():
        left -= _seen_in_views(one.events)
    for one in played.values():
        left -= {
            kind for kind in left if _reported(one.events) != _reported([e for e in one.events if e.type is not kind])
        }
    if left:
        pytest.importorskip("duckdb", reason="queries need the extra `runs`")
    for one in played.values():
        for kind in left & {event.type for event in one.events}:
            left -= {kind} if _tables(one.run, tmp_path) != _tables(one.run, tmp_path, without=kind) else set()
    assert left == set()


def _seen_in_views(events: list[LoggedEvent]) -> set[TelemetryEventType]:
    seen, view = set(), RunView()
    for event in events:
        before = _substance(view)
        # Without severity, so that the list of warnings does not take it.
        view.add(replace(event, severity=Severity.INFO))
        if _substance(view) != before:
            seen.add(event.type)
    return seen


def _substance(view: RunView) -> RunView:
    """A copy without the counts that every event moves."""
    every = ("run", "group", "attempt", "first_wall", "last_wall", "last_seq", "num_events", "num_missing")
    return replace(copy.deepcopy(view), **dict.fromkeys(every))


def _reported(events: list[LoggedEvent]) -> tuple[object, ...]:
    story: RunHistory = read_history(events)
    return story.starts, story.rounds, story.updates, story.episodes, story.seeds


def _tables(run: Path, scratch: Path, without: TelemetryEventType | None = None) -> dict[str, object]:
    from esper.karn.sql import RunDatabase
    from esper.karn.sql_views import VIEWS

    copy = shutil.copytree(run, scratch / "copy", dirs_exist_ok=True)
    for path in copy.glob(f"{EVENTS_DIR}/*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if without is None or json.loads(line)["type"] != without.value]
        path.write_bytes(b"".join(kept))
    with RunDatabase([copy]) as database:
        tables = {name: database.ask(f"select * from {name}", limit=10_000).rows for name in VIEWS if name != "events"}
    shutil.rmtree(copy)
    return {name: repr(rows) for name, rows in tables.items()}
