"""Whatever happened to a log, readers say so and go on: no damage makes them crash."""

from __future__ import annotations

import math
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.karn.codec import NewerSchema
from esper.karn.console import render_status
from esper.karn.diagnosis import diagnose
from esper.karn.history import read_history
from esper.karn.integrity import check_run
from esper.karn.replay import Follower, replay
from esper.leyline import LoggedEvent, Severity
from tests.karn.logs import (
    WALL,
    LogWriter,
    T,
    anomaly,
    epoch_completed,
    every_type,
    ppo_update,
    read_view,
    round_completed,
    started,
    write_round,
)


def read_in_every_way(folder: Path) -> None:
    view = read_view(replay(folder))
    assert repr(read_view(Follower(folder).poll().items)) == repr(view)  # repr, because nan is not equal to itself
    render_status(view, diagnose(view, None, WALL))
    read_history(replay(folder))
    check_run(folder)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    log = every_type(folder)
    write_round(log, 1)
    return log.path.read_bytes()


def test_a_damaged_attempt_number_inside_a_file_starts_no_attempt(content: bytes, tmp_path: Path) -> None:
    lines = content.splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"attempt": 0', b'"attempt": 7', 1)
    LogWriter(tmp_path).path.write_bytes(b"".join(lines))
    read_in_every_way(tmp_path)
    assert len(Follower(tmp_path).poll().items) == len(lines)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_bytes_changed_lost_or_doubled_anywhere(seed: int, content: bytes, tmp_path: Path) -> None:
    rng = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 20)):
        place = rng.randrange(len(damaged))
        match rng.randrange(4):
            case 0:
                damaged[place] = rng.randrange(256)
            case 1:
                del damaged[place : place + rng.randint(1, 300)]
            case 2:
                damaged[place:place] = damaged[place : place + rng.randint(1, 300)]
            case 3:
                damaged[place] = rng.choice(b'0123456789.-\n"{}[],')
    LogWriter(tmp_path).path.write_bytes(damaged)
    with suppress(NewerSchema):  # a changed digit can make the version a newer one
        read_in_every_way(tmp_path)


def test_the_end_of_a_log_may_be_anywhere(content: bytes, tmp_path: Path) -> None:
    whole = list(replay_of(content, tmp_path))
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    rng = random.Random(0)
    for cut in sorted(rng.sample(range(len(content)), 60)):
        kept = list(replay_of(content[:cut], tmp_path))
        assert kept == whole[: sum(end <= cut for end in ends)]
        assert check_run(tmp_path).num_malformed == 0


def replay_of(content: bytes, folder: Path) -> list[object]:
    LogWriter(folder).path.write_bytes(content)
    return list(replay(folder))


def test_an_alarm_of_another_build_is_shown_in_the_words_of_its_log(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.ROUND_COMPLETED, round_completed(), round=0)
    strange = anomaly(kind="moon_phase", metric="moon_phase:op", detail="the tide is high")
    log.emit(T.ANOMALY_DETECTED, strange, Severity.CRITICAL, round=0)
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.CRITICAL, round=0)
    known, unknown, _ = diagnose(read_view(replay(tmp_path)), None, WALL)
    assert known.why.startswith("clip_fraction")
    assert unknown.now == "the tide is high"
    assert "does not know the alarm" in unknown.next


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_runs_whose_figures_are_not_finite_have_screens_and_reports(value: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="reports need the extra `runs`")
    from esper.karn.report import make_report

    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    for number in range(3):
        write_round(log, number)
        where = {"round": number, "episode": number, "env": 0, "epoch": 0}
        log.emit(T.EPOCH_COMPLETED, epoch_completed(val_loss=value, val_accuracy_pct=value), **where)
        bad = round_completed(accuracy_mean_pct=value, return_mean=value, return_std=value, params_ratio_mean=value)
        log.emit(T.ROUND_COMPLETED, bad, round=number)
        log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(learning_rate=value, target_kl=value), round=number)
    read_in_every_way(tmp_path)
    assert "<html" in make_report(tmp_path, WALL)


def test_a_sequence_number_beyond_reason_is_a_gap_and_no_crash(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.RUN_STARTED, started())
    log.path.write_bytes(log.path.read_bytes().replace(b'"seq": 1', b'"seq": %d' % (2**63 - 1)))
    found = check_run(tmp_path)
    assert found.num_missing_seq == 2**63 - 2
    assert not found.complete
    assert all(isinstance(item, LoggedEvent) for item in replay(tmp_path))


DAMAGED_LINES: list[tuple[bytes, bytes, str]] = [
    (rb'"data": {', b'"data": {"x": ' + b"[" * 4000 + b"]" * 4000 + b", ", "nested too deeply"),
    (rb"7777", b"%d" % 2**64, "needs more than 64 bits"),
    (rb'"seq": 1', b'"seq": %d' % 2**63, "needs more than 64 bits"),
    (rb'"data": {', b'"x": "\xff", "data": {', "can't decode byte"),
    (rb'"wall": [0-9.]+', b'"wall": 9e11', "wall must be from 0"),
]


@pytest.mark.parametrize(("old", "new", "reason"), DAMAGED_LINES, ids=[row[2] for row in DAMAGED_LINES])
def test_a_line_that_no_reader_can_hold_is_damage_like_any_other(
    old: bytes, new: bytes, reason: str, tmp_path: Path
) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.ROUND_COMPLETED, round_completed(num_rollbacks=7777), round=0)
    first, second = log.path.read_bytes().splitlines(keepends=True)
    line = re.sub(old, lambda _: new, second)
    assert line not in (first, second)
    log.path.write_bytes(first + line + second)
    found = check_run(tmp_path)
    assert (found.num_lines, found.num_malformed) == (3, 1)
    assert reason in found.problems[0]
    read_in_every_way(tmp_path)


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    monkeypatch.setattr("esper.karn.replay.MAX_LINE_BYTES", 20_000)
    with log.path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\n")
    log.emit(T.RUN_STARTED, started())
    items = list(replay(tmp_path))
    assert [type(item).__name__ for item in items][-2:] == ["BadLine", "LoggedEvent"]


@pytest.mark.parametrize("name", ["a999999999-s0.jsonl", "a99999999999999999999-s0.jsonl"])
def test_a_file_of_an_attempt_that_cannot_be_does_not_hang(name: str, tmp_path: Path) -> None:
    LogWriter(tmp_path).emit(T.RUN_STARTED, started())
    (tmp_path / "events" / name).touch()
    assert not check_run(tmp_path).complete
