"""The fold: pure, bounded, and each event lands where the screens look for it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from esper.karn.fold import MAX_NOTES, fold, fold_all
from esper.karn.replay import BadLine, replay
from esper.karn.view import EMPTY, MAX_POINTS, History, RunView
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
    seed_ended,
    started,
    worker_changed,
    write_run,
)


def view_of(folder: Path) -> RunView:
    return fold_all(replay(folder))


def test_the_same_events_give_the_same_view_in_one_go_or_piece_by_piece(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=4)
    items = list(replay(tmp_path))
    whole = fold_all(items)
    for cut in (1, 7, len(items) // 2):
        assert fold_all(items[cut:], fold_all(items[:cut])) == whole
    assert fold_all(items) == whole


def test_a_fold_leaves_the_view_before_it_alone(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    for kind in TelemetryEventType:
        log.emit(kind, PAYLOADS[kind](), **ids_of(kind))
    view, before = EMPTY, repr(EMPTY)
    for item in replay(tmp_path):
        after = fold(view, item)
        assert repr(view) == before
        view, before = after, repr(after)


# Told only to queries and reports: a screen does not show single gates, coalitions or episodes.
NOT_ON_SCREEN = {T.EPISODE_COMPLETED, T.GATE_EVALUATED, T.COALITION_MEASURED, T.SEED_STAGE_CHANGED}


def test_every_type_that_a_screen_shows_changes_more_than_the_books_of_the_log(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.EPOCH_COMPLETED, PAYLOADS[T.EPOCH_COMPLETED](), round=0, episode=0, env=0, epoch=1)
    for kind in TelemetryEventType:
        log.emit(kind, PAYLOADS[kind](), **ids_of(kind))
    first, *items = replay(tmp_path)
    base = fold(EMPTY, first)
    silent = set()
    for item in items:
        assert not isinstance(item, BadLine)
        after = fold(base, item)
        same_log = after.log.num_dropped == base.log.num_dropped
        if same_log and all(getattr(after, part) == getattr(base, part) for part in after.__struct_fields__[1:]):
            silent.add(item.type)
    # The repeated epoch is equal but for its sequence number, which the view keeps.
    assert silent == NOT_ON_SCREEN
    assert set(EVENTS) >= silent


def test_progress_growth_and_policy_of_a_healthy_run(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=3)
    view = view_of(tmp_path)
    assert view.progress.started == started()
    assert view.progress.ended is not None
    assert view.progress.round == 2
    assert [number for number, _ in view.progress.rounds.points] == [0, 1, 2]
    assert view.policy.num_updates == 3
    assert view.growth.envs.keys() == {0, 1}
    assert view.growth.envs[1].state.val_accuracy_pct == 70 + 2 + 2 + 1
    assert view.growth.envs[1].last_action is not None
    grown = view.growth.blueprints["mlp.lora"]
    assert (grown.num_germinated, grown.num_fossilized, grown.num_pruned) == (6, 6, 0)
    assert grown.sum_contribution_pp / grown.num_measured == 1.25
    assert view.safety.notes == ()
    assert (view.log.num_missing, view.log.num_bad) == (0, 0)


def test_gaps_are_counted_and_drops_explain_them(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.seq += 4
    log.emit(T.EVENTS_DROPPED, events_dropped(counts={"EPOCH_COMPLETED": 3, "ACTION_TAKEN": 1}))
    view = view_of(tmp_path)
    assert (view.log.num_missing, view.log.num_dropped) == (4, 4)


def test_an_alarm_is_open_from_enter_to_clear_for_each_metric_and_env(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 0, "episode": 0, "epoch": 0}
    log.emit(T.ANOMALY_DETECTED, anomaly(kind="seed_grad_health", metric="seed_grad_health:r0c0"), env=0, **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(kind="seed_grad_health", metric="seed_grad_health:r0c0"), env=1, **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=0)
    log.emit(T.ANOMALY_DETECTED, anomaly(state="worsened", value=0.6), Severity.CRITICAL, round=1)
    view = view_of(tmp_path)
    assert view.safety.alarms.keys() == {
        ("seed_grad_health:r0c0", 0),
        ("seed_grad_health:r0c0", 1),
        ("clip_share", None),
    }
    assert view.safety.alarms["clip_share", None].severity is Severity.CRITICAL
    log.emit(
        T.ANOMALY_DETECTED,
        anomaly(kind="seed_grad_health", metric="seed_grad_health:r0c0", state="cleared"),
        env=0,
        **where,
    )
    assert view_of(tmp_path).safety.alarms.keys() == {("seed_grad_health:r0c0", 1), ("clip_share", None)}


def test_only_rollbacks_count_as_rollbacks(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 0, "episode": 0, "env": 1, "epoch": 2}
    log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(rolled_back=False, to_state="suspect"), **where)
    assert view_of(tmp_path).safety.last_rollback is None
    seq = log.emit(T.GOVERNOR_STATE_CHANGED, governor_changed(), Severity.CRITICAL, **where)
    view = view_of(tmp_path)
    assert view.safety.num_rollbacks == 1
    assert view.safety.last_rollback is not None
    assert (view.safety.last_rollback.seq, view.safety.last_rollback.env) == (seq, 1)
    assert [note.seq for note in view.safety.notes] == [seq]


def test_skipped_updates_are_counted_in_a_row(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    wanted = []
    for number, performed in enumerate([False, False, True, False]):
        log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(performed=performed), round=number)
        wanted.append(view_of(tmp_path).policy.num_skipped)
    assert wanted == [1, 2, 0, 1]
    assert view_of(tmp_path).policy.num_updates == 1


def test_a_failed_save_is_open_until_one_succeeds(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.CHECKPOINT_RECORDED, checkpoint(action="save_failed", error="disk full"))
    assert view_of(tmp_path).machine.save_failure is not None
    log.emit(T.CHECKPOINT_RECORDED, checkpoint())
    machine = view_of(tmp_path).machine
    assert machine.save_failure is None
    assert machine.saved is not None


def test_a_resumed_run_has_no_end_and_fresh_workers(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.WORKER_STATE_CHANGED, worker_changed(state="abandoned"))
    log.emit(T.RUN_ENDED, ended(status="interrupted"))
    log.rotate()
    again = LogWriter(tmp_path, attempt=1, first_seq=log.seq)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    view = view_of(tmp_path)
    assert view.progress.ended is None
    assert view.safety.workers == {}
    assert view.log.attempt == 1


def test_prunes_and_unmeasured_fossils_have_no_share_in_the_mean(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    where = {"round": 0, "episode": 0, "env": 0, "epoch": 0}
    for _ in range(3):
        log.emit(T.SEED_GERMINATED, germinated(), **where)
    log.emit(T.SEED_PRUNED, seed_ended(contribution_pp=-9.0), **where)
    log.emit(T.SEED_FOSSILIZED, seed_ended(contribution_pp=None), **where)
    log.emit(T.SEED_FOSSILIZED, seed_ended(contribution_pp=2.0), **where)
    grown = view_of(tmp_path).growth.blueprints["mlp.lora"]
    assert (grown.num_germinated, grown.num_pruned, grown.num_fossilized) == (3, 1, 2)
    assert (grown.sum_contribution_pp, grown.num_measured) == (2.0, 1)


def test_notes_keep_the_newest(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    seqs = [log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=n) for n in range(MAX_NOTES + 5)]
    assert [note.seq for note in view_of(tmp_path).safety.notes] == seqs[-MAX_NOTES:]


@given(num=st.integers(min_value=0, max_value=5 * MAX_POINTS))
def test_a_history_is_bounded_evenly_spaced_and_keeps_its_beginning(num: int) -> None:
    history: History[int] = History(points=(), stride=1, num_seen=0)
    for value in range(num):
        history = history.add(value)
    assert history.num_seen == num
    assert len(history.points) <= MAX_POINTS
    assert history.points == tuple(range(0, num, history.stride))
    assert history.stride == 1 or len(history.points) > MAX_POINTS // 2 - 1
