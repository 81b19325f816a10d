"""A monitor reads a run of any length in steps, leaves out only what screens do not show, and says so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from esper.karn import monitor as monitor_module
from esper.karn.codec import decode_line
from esper.karn.history import RunHistory, read_history
from esper.karn.monitor import RunMonitor
from esper.karn.replay import Follower, PassedOver, replay
from esper.leyline import LoggedEvent, Severity
from esper.nissa import encode
from tests.karn.logs import (
    LogWriter,
    T,
    action_taken,
    anomaly,
    coalition,
    epoch_completed,
    started,
    write_round,
    write_run,
)


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """A run of 30 rounds, in the bytes that a trainer writes."""
    write_run(tmp_path, rounds=30)
    as_written(tmp_path)
    return tmp_path


def as_written(folder: Path) -> None:
    for path in (folder / "events").glob("*.jsonl"):
        path.write_bytes(b"".join(encode(decode_line(line)) for line in path.read_bytes().splitlines(keepends=True)))


def history_of(items: Iterable[object]) -> RunHistory:
    return read_history(items)  # type: ignore[arg-type]


def test_old_steps_are_counted_and_everything_else_is_read(long_run: Path) -> None:
    whole = read_history(replay(long_run))
    items = Follower(long_run, recent_bytes=20_000).poll().items
    passed = {seq for item in items if isinstance(item, PassedOver) for seq in range(item.seq, item.last_seq + 1)}
    assert len(passed) > 200
    kinds = {event.type for event in replay(long_run) if isinstance(event, LoggedEvent) and event.seq in passed}
    assert kinds == {T.EPOCH_COMPLETED, T.ACTION_TAKEN, T.SEED_STAGE_CHANGED}
    skimmed = history_of(items)
    assert skimmed.view.num_passed_over == len(passed)
    for name in ("rounds", "updates", "episodes", "warnings", "starts"):
        assert getattr(skimmed, name) == getattr(whole, name), name
    assert skimmed.seeds
    assert skimmed.seeds == whole.seeds[-len(skimmed.seeds) :]  # of the recent past, and these whole
    for name in ("num_events", "num_missing", "last_seq", "num_bad", "epochs", "actions", "blueprints", "ended"):
        assert getattr(skimmed.view, name) == getattr(whole.view, name), name


@pytest.mark.parametrize("max_bytes", [1, 3_000])
def test_it_does_not_matter_how_much_is_read_at_once(long_run: Path, max_bytes: int) -> None:
    at_once = history_of(Follower(long_run, recent_bytes=20_000).poll().items)
    follower, steps, num_steps = Follower(long_run, recent_bytes=20_000), RunHistory(), 0
    behind = True
    while behind:
        batch = follower.poll(max_bytes)
        behind, num_steps = batch.behind, num_steps + 1
        for item in batch.items:
            steps.add(item)
    assert num_steps > 20
    assert steps == at_once


def test_a_missing_line_is_noticed_among_the_ones_passed_over(long_run: Path) -> None:
    (path,) = (long_run / "events").glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[5]
    path.write_bytes(b"".join(lines))
    view = history_of(Follower(long_run, recent_bytes=0).poll().items).view
    assert view.num_passed_over > 0
    assert view.num_missing == 1


def test_warnings_about_steps_are_never_passed_over(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    here = {"round": 0, "episode": 0, "env": 0, "epoch": 0}
    log.emit(T.ACTION_TAKEN, action_taken(), Severity.WARNING, **here)
    log.emit(T.ACTION_TAKEN, action_taken(), **here)
    as_written(tmp_path)
    kinds = [type(item) for item in Follower(tmp_path, recent_bytes=0).poll().items]
    assert kinds == [LoggedEvent, LoggedEvent, PassedOver]


def test_a_resumed_run_is_skimmed_as_it_finally_happened(long_run: Path) -> None:
    at = 300
    again = LogWriter(long_run, attempt=1, first_seq=at)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt"))
    write_round(again, 20)
    as_written(long_run)
    view = history_of(Follower(long_run, recent_bytes=0).poll().items).view
    assert view.num_events == again.seq
    assert view.num_missing == 0


def test_a_long_log_is_read_in_steps_that_say_how_far_they_are(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "STEP_BYTES", 30_000)
    watched = RunMonitor(long_run)
    seen = []
    while watched.behind:
        watched.poll(budget_s=0.0)
        seen.append(watched.view.num_events)
        words = watched.reading()
        assert (words is not None and words.startswith("reading the log: 0 of ")) or not watched.behind
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert watched.reading() is None
    assert watched.view.num_events == read_history(replay(long_run)).view.num_events
    assert watched.passed_over() is None
    assert not watched.poll(), "there is nothing new"


def test_what_was_passed_over_is_reported(long_run: Path) -> None:
    watched = RunMonitor(long_run, recent_bytes=0)
    watched.poll(budget_s=10.0)
    words = watched.passed_over()
    assert words is not None
    assert words.startswith(f"{watched.view.num_passed_over:,} events about single steps")


def test_a_host_is_shown_in_the_episode_it_is_in(tmp_path: Path) -> None:
    log = write_run(tmp_path, rounds=2, finish=False)
    watched = RunMonitor(tmp_path)
    watched.poll()
    assert watched.hosts[0].episode == 1
    assert [cited.event.epoch for cited in watched.hosts[0].epochs] == [0, 1, 2]
    assert len(watched.hosts[0].actions) == 3
    here = {"round": 2, "episode": 2, "env": 0, "epoch": 0}
    log.emit(T.EPOCH_COMPLETED, epoch_completed(), **here)
    log.emit(T.COALITION_MEASURED, coalition(), **here)
    log.emit(T.COALITION_MEASURED, coalition(rows=(), unavailable="a rollback"), **here)
    assert watched.poll()
    assert watched.hosts[0].episode == 2
    assert len(watched.hosts[0].epochs) == 1
    assert not watched.hosts[0].actions
    assert watched.hosts[0].coalition is not None
    assert watched.hosts[0].coalition.data.rows
    assert watched.hosts[1].episode == 1


def test_steps_cannot_push_other_events_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "NUM_SEEDS", 3)
    monkeypatch.setattr(monitor_module, "NUM_WARNINGS", 3)
    log = write_run(tmp_path, rounds=1, finish=False)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=0)
    for epoch in range(300):
        log.emit(T.EPOCH_COMPLETED, epoch_completed(), round=1, episode=1, env=0, epoch=epoch)
    watched = RunMonitor(tmp_path)
    watched.poll(budget_s=10.0)
    assert watched.events[-1].type is T.ANOMALY_DETECTED
    assert len(watched.step_events) == monitor_module.NUM_STEP_EVENTS
    for number in range(2, 12):
        write_round(log, number)
        log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=number)
        watched.poll(budget_s=10.0)
    assert 3 <= len(watched.history.seeds) <= 6
    assert 3 <= len(watched.history.warnings) <= 6


def test_a_new_attempt_starts_the_screens_afresh(tmp_path: Path) -> None:
    log = write_run(tmp_path, rounds=1, finish=False)
    saved = log.seq
    write_round(log, 1)
    watched = RunMonitor(tmp_path)
    watched.poll()
    assert len(watched.history.rounds) == 2
    before = watched.round_version
    LogWriter(tmp_path, attempt=1, first_seq=saved).emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    watched.poll()
    assert len(watched.history.rounds) == 1
    assert watched.round_version > before
