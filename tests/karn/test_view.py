"""The view of a run: each event lands where the screens look for it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from esper.karn.replay import BadLine, replay
from esper.karn.view import NUM_WARNINGS, RunView
from esper.leyline import EVENTS, Severity, TelemetryEventType
from tests.karn.logs import (
    PAYLOADS,
    LogWriter,
    T,
    anomaly,
    checkpoint,
    ended,
    events_dropped,
    germinated,
    governor_changed,
    ids_of,
    ppo_update,
    read_view,
    seed_ended,
    started,
    worker_changed,
    write_run,
)


def view_of(folder: Path) -> RunView:
    return read_view(replay(folder))


COUNTS = {"run", "group", "attempt", "first_wall", "last_wall", "last_seq", "num_events", "num_missing"}
SUBSTANCE = {field.name for field in fields(RunView)} - COUNTS
# Shown only by queries and reports: a screen does not show single gates, coalitions or episodes.
NOT_ON_SCREEN = {T.EPISODE_COMPLETED, T.CHOICE_STATS, T.GATE_EVALUATED, T.COALITION_MEASURED, T.SEED_STAGE_CHANGED}


def test_every_type_that_a_screen_shows_changes_more_than_the_counts_of_the_log(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.EPOCH_COMPLETED, PAYLOADS[T.EPOCH_COMPLETED](), round=0, episode=0, env=0, epoch=1)
    for kind in TelemetryEventType:
        log.emit(kind, PAYLOADS[kind](), **ids_of(kind))
    first, *items = replay(tmp_path)
    silent = set()
    for item in items:
        assert not isinstance(item, BadLine)
        before, after = read_view([first]), read_view([first, item])
        if all(getattr(after, part) == getattr(before, part) for part in SUBSTANCE):
            silent.add(item.type)
    # The repeated epoch is equal but for its sequence number, which the view keeps.
    assert silent == NOT_ON_SCREEN
    assert set(EVENTS) >= silent


def test_progress_growth_and_policy_of_a_healthy_run(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=3)
    view = view_of(tmp_path)
    assert view.started == started()
    assert view.ended is not None
    assert view.round == 2
    assert len(view.accuracies_pct) == len(view.returns) == 3
    assert view.num_updates == 3
    assert view.epochs.keys() == {0, 1}
    assert view.epochs[1].data.val_accuracy_pct == 70 + 2 + 2 + 1
    assert view.actions.keys() == {0, 1}
    grown = view.blueprints["mlp.lora"]
    assert (grown.num_germinated, grown.num_fossilized, grown.num_pruned) == (6, 6, 0)
    assert grown.mean_contribution_pp == 1.25
    assert not view.warnings
    assert (view.num_missing, view.num_bad) == (0, 0)


def test_gaps_are_counted_and_drops_explain_them(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.seq += 4
    log.emit(T.EVENTS_DROPPED, events_dropped(counts={"EPOCH_COMPLETED": 3, "ACTION_TAKEN": 1}))
    view = view_of(tmp_path)
    assert (view.num_missing, view.num_dropped) == (4, 4)


def test_an_alarm_is_open_from_enter_to_clear_for_each_metric_and_env(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 0, "episode": 0, "epoch": 0}
    log.emit(T.ANOMALY_DETECTED, anomaly(kind="seed_grad_health", metric="seed_grad_health:r0c0"), env=0, **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(kind="seed_grad_health", metric="seed_grad_health:r0c0"), env=1, **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=0)
    log.emit(T.ANOMALY_DETECTED, anomaly(state="worsened", value=0.6), Severity.CRITICAL, round=1)
    view = view_of(tmp_path)
    assert view.alarms.keys() == {
        ("seed_grad_health:r0c0", 0),
        ("seed_grad_health:r0c0", 1),
        ("clip_fraction", None),
    }
    assert view.alarms["clip_fraction", None].event.severity is Severity.CRITICAL
    log.emit(
        T.ANOMALY_DETECTED,
        anomaly(kind="seed_grad_health", metric="seed_grad_health:r0c0", state="cleared"),
        env=0,
        **where,
    )
    assert view_of(tmp_path).alarms.keys() == {("seed_grad_health:r0c0", 1), ("clip_fraction", None)}


def test_only_rollbacks_count_as_rollbacks(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 0, "episode": 0, "env": 1, "epoch": 2}
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(rolled_back=False, to_state="suspect"), **where)
    assert view_of(tmp_path).rollbacks == []
    seq = log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, **where)
    view = view_of(tmp_path)
    assert view.num_rollbacks == 1
    (rollback,) = view.rollbacks
    assert (rollback.event.seq, rollback.event.env) == (seq, 1)
    assert [note.seq for note in view.warnings] == [seq]


def test_skipped_updates_are_counted_in_a_row(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    wanted = []
    for number, performed in enumerate([False, False, True, False]):
        log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(performed=performed), round=number)
        wanted.append(view_of(tmp_path).num_skipped_updates)
    assert wanted == [1, 2, 0, 1]
    assert view_of(tmp_path).num_updates == 1


def test_a_failed_save_is_open_until_one_succeeds(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.CHECKPOINT_RECORDED, checkpoint(action="save_failed", error="disk full"))
    assert view_of(tmp_path).save_failure is not None
    log.emit(T.CHECKPOINT_RECORDED, checkpoint())
    view = view_of(tmp_path)
    assert view.save_failure is None
    assert view.saved is not None


def test_a_resumed_run_has_no_end_and_fresh_workers(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.WORKER_STATE_CHANGED, worker_changed(state="abandoned"))
    log.emit(T.RUN_ENDED, ended(status="interrupted"))
    again = LogWriter(tmp_path, attempt=1, first_seq=log.seq)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    view = view_of(tmp_path)
    assert view.ended is None
    assert view.workers == {}
    assert view.attempt == 1


def test_prunes_and_unmeasured_fossils_have_no_share_in_the_mean(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 0, "episode": 0, "env": 0, "epoch": 0}
    for _ in range(3):
        log.emit(T.SEED_GERMINATED, germinated(), **where)
    log.emit(T.SEED_PRUNED, seed_ended(contribution_pp=-9.0), **where)
    log.emit(T.SEED_FOSSILIZED, seed_ended(contribution_pp=None), **where)
    log.emit(T.SEED_FOSSILIZED, seed_ended(contribution_pp=2.0), **where)
    grown = view_of(tmp_path).blueprints["mlp.lora"]
    assert (grown.num_germinated, grown.num_pruned, grown.num_fossilized) == (3, 1, 2)
    assert grown.mean_contribution_pp == 2.0


def test_warnings_keep_the_newest(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    seqs = [log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=n) for n in range(NUM_WARNINGS + 5)]
    assert [note.seq for note in view_of(tmp_path).warnings] == seqs[-NUM_WARNINGS:]
