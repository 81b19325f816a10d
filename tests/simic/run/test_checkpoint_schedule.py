"""What stays on disk, when to save, and where the bits came from."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

import esper
from esper.leyline.rundir import MANIFEST_FILE
from esper.simic.run.checkpoint_schedule import CheckpointSchedule, kept_indices, remove_old_checkpoints
from esper.simic.run.environment import Identity, identity, identity_differences
from tests.simic.run.saving import names, newest, run_with, save

SCORES = st.lists(st.none() | st.integers(-3, 3).map(float), min_size=1, max_size=130)

# ---- retention


@given(scores=SCORES, resumed=st.none() | st.integers(0, 40), first=st.integers(0, 60))
def test_a_run_keeps_the_last_three_the_best_every_fiftieth_and_its_origin(
    scores: list[float | None], resumed: int | None, first: int
) -> None:
    there: dict[int, float | None] = {} if resumed is None else {resumed: None}
    start = first if resumed is None else resumed + 1
    for index, score in enumerate(scores, start):
        there[index] = score
        kept = kept_indices(there, last=3, resumed_from=resumed)
        there = {index: score for index, score in there.items() if index in kept}
        lived = range(start, index + 1)
        expected = {*lived[-3:], *(i for i in lived if i % 50 == 0)} | ({resumed} - {None})
        past = [score for score in scores[: len(lived)] if score is not None]
        if past:
            best = [i for i in lived if scores[i - start] == max(past)]
            expected.add(best[-1])
        assert set(there) == expected


@given(scores=st.dictionaries(st.integers(0, 300), st.none() | st.floats(-5, 5), max_size=30), last=st.integers(1, 5))
def test_each_rule_keeps_as_many_as_it_says(scores: dict[int, float | None], last: int) -> None:
    kept = kept_indices(scores, last=last, resumed_from=None)
    assert kept <= set(scores)
    assert set(sorted(scores)[-last:]) <= kept
    measured = sorted((score, index) for index, score in scores.items() if score is not None)
    others = set(sorted(scores)[:-last]) - {index for index in scores if index % 50 == 0}
    assert others & kept == others & {index for _, index in measured[-1:]}


def test_only_what_no_rule_keeps_is_removed_from_disk(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    for index, score in ((49, 2.0), (50, 1.0), (51, 9.0), (52, None), (53, 3.0), (54, 4.0), (55, 5.0)):
        save(run, index, score=score)
    assert remove_old_checkpoints(run, last=3, resumed_from=49) == ()
    assert names(run) == [f"ckpt-000000{index}" for index in (49, 50, 51, 53, 54, 55)]
    assert remove_old_checkpoints(run, last=2, resumed_from=None) == ()
    assert names(run) == [f"ckpt-000000{index}" for index in (50, 51, 54, 55)]
    assert newest(run)[0].facts.index == 55


def test_a_damaged_manifest_is_never_the_best(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    for index, score in ((1, 5.0), (2, 9.0), (3, 1.0)):
        save(run, index, score=score)
    (run.checkpoints / "ckpt-00000002" / MANIFEST_FILE).write_bytes(b"{")
    remove_old_checkpoints(run, last=1, resumed_from=None)
    assert names(run) == ["ckpt-00000001", "ckpt-00000003"]


def test_what_a_killed_clearing_left_goes_with_the_next_and_strangers_stay(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1, 2, 3)
    (run.checkpoints / "ckpt-00000001" / MANIFEST_FILE).unlink()
    (run.checkpoints / "rejected-ckpt-00000001-0").mkdir()
    (run.checkpoints / "notes.txt").touch()
    assert remove_old_checkpoints(run, last=3, resumed_from=None) == ()
    assert names(run) == ["ckpt-00000002", "ckpt-00000003", "notes.txt", "rejected-ckpt-00000001-0"]


# ---- schedule

DURATIONS = st.lists(st.tuples(st.floats(0.01, 60), st.floats(0.001, 2)), min_size=1, max_size=60)


@given(rounds=DURATIONS, offset=st.floats(0, 1e6))
def test_saves_are_neither_too_close_nor_too_costly(rounds: list[tuple[float, float]], offset: float) -> None:
    schedule, now, spent, took = CheckpointSchedule(started_s=offset, saved_index=None), offset, 0.0, 0.0
    ends: list[float] = []
    for index, (round_s, save_s) in enumerate(rounds):
        now += round_s
        due = schedule.due(index, now, final=False)
        allowed = not ends or (now - ends[-1] >= 10.0 and spent + took <= 0.01 * (now - offset))
        assert due == allowed
        if due:
            now, took = now + save_s, save_s
            spent += save_s
            ends.append(now)
            schedule.saved(index, now, save_s)
    assert ends, "the first boundary is always saved"


def test_long_rounds_are_all_saved_and_short_ones_every_ten_seconds() -> None:
    for round_s, expected in ((30.0, 100), (1.0, 10)):
        schedule, now, saves = CheckpointSchedule(started_s=0.0, saved_index=None), 0.0, 0
        for index in range(100):
            now += round_s
            if schedule.due(index, now, final=False):
                schedule.saved(index, now, 0.03)
                saves += 1
        assert saves == expected


def test_the_end_is_saved_unless_it_is_on_disk() -> None:
    schedule = CheckpointSchedule(started_s=0.0, saved_index=7)
    assert not schedule.due(7, 1.0, final=True)
    schedule.saved(8, 1.0, 5.0)
    assert not schedule.due(9, 2.0, final=False)
    assert schedule.due(9, 2.0, final=True)
    assert not schedule.due(8, 1e9, final=True)


def test_failures_in_a_row_are_counted_and_wait_like_saves() -> None:
    schedule = CheckpointSchedule(started_s=0.0, saved_index=None)
    schedule.failed(1.0, 0.01)
    assert not schedule.due(0, 10.9, final=False)
    assert schedule.due(0, 11.0, final=False)
    schedule.failed(11.0, 0.01)
    assert schedule.failures == 2
    assert schedule.due(0, 11.5, final=True), "what failed is not on disk"
    schedule.saved(0, 12.0, 0.01)
    assert schedule.failures == 0


def test_a_save_that_the_log_did_not_allow_leaves_the_next_boundary_due() -> None:
    schedule = CheckpointSchedule(started_s=0.0, saved_index=None)
    schedule.saved(0, 30.0, 0.1)
    assert schedule.due(1, 60.0, final=False)
    schedule.withheld(60.0, 0.0)
    assert schedule.due(2, 61.0, final=False), "a log that refuses at once costs nothing"
    schedule.withheld(71.0, 10.0)
    assert schedule.due(3, 72.0, final=True)
    assert not schedule.due(3, 80.9, final=False), "a log that lets the run wait is not asked all the time"
    assert schedule.due(3, 81.0, final=False)
    assert schedule.failures == 0
    schedule.saved(3, 81.1, 0.1)
    assert not schedule.due(4, 91.0, final=False)
    assert schedule.due(4, 91.1, final=False), "what the log cost is no cost of saving"


# ---- identity


def test_identity_is_what_the_bits_depend_on() -> None:
    here = identity()
    assert here["torch"] == torch.__version__
    assert here["esper"] == esper.__version__
    assert set(here) == {"esper", "torch", "python", "platform", "cpu_capability", "threads", "native"}
    assert identity_differences(here, identity()) == ()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert identity_differences(here, identity()) == (f"threads {before} -> {before + 1}",)
    finally:
        torch.set_num_threads(before)


def test_every_difference_is_reported_also_one_sided_ones() -> None:
    stored: Identity = {"torch": "2.12.0", "threads": 1, "amp": False}
    present: Identity = {"torch": "2.13.0", "threads": 1, "device": "cpu"}
    assert identity_differences(stored, present) == (
        "amp False -> unknown",
        "device unknown -> cpu",
        "torch 2.12.0 -> 2.13.0",
    )


def test_an_identity_survives_a_checkpoint(tmp_path: Path) -> None:
    run = run_with(tmp_path, 1)
    assert identity_differences(newest(run)[0].facts.identity, {"python": "3.11"}) == ()
