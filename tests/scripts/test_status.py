"""`esper status` as a user meets it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from esper.leyline import Severity
from esper.nissa.heartbeat import HeartbeatWriter
from esper.scripts import status
from esper.scripts.cli import main
from esper.scripts.status import FOLLOW_INTERVAL_S
from tests.karn.logs import (
    LogWriter,
    T,
    action_taken,
    anomaly,
    checkpoint,
    ended,
    epoch_completed,
    round_completed,
    slot,
    started,
    write_round,
    write_run,
)
from tests.scripts.screens import open_screen, read_more, seen, shown, start


def test_a_finished_run_is_reported_with_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=3)
    main(["status", str(tmp_path)])
    out = capsys.readouterr().out
    for words in (
        "completed after 3 rounds",
        "digits_mlp, ppo, seed 7",
        "74.0 % (75.0 to 85.0)",
        "mlp.lora",
        "3 updates",
    ):
        assert words in out, words


def test_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_run(tmp_path, rounds=6, finish=False)
    log.emit(T.CHECKPOINT_RECORDED, checkpoint())
    log.emit(T.ANOMALY_DETECTED, anomaly(), Severity.WARNING, round=5)
    main(["status", "--json", str(tmp_path)])
    reported = json.loads(capsys.readouterr().out)
    assert reported["state"] == "died"  # no end, no heartbeat, and long ago
    assert [finding["state"] for finding in reported["findings"]] == ["died", "warning", "steady"]
    assert (reported["round"], reported["num_rounds"], reported["accuracy_mean_pct"]) == (5, 20, 77.0)
    assert reported["num_rounds_done"] == 6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_is_valid_whatever_was_measured(value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.ROUND_COMPLETED, round_completed(return_mean=value), round=0)
    main(["status", "--json", str(tmp_path)])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    reported = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert reported["return_mean"] == str(value)


def test_a_failed_run_shows_its_error_and_not_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_run(tmp_path, rounds=1, finish=False)
    tail = "Traceback (most recent call last):\n  File x\nOops: it broke"
    failed = ended(status="failed", error_type="Oops", error_message="it broke", traceback_tail=tail)
    log.emit(T.RUN_ENDED, failed, Severity.ERROR)
    main(["status", str(tmp_path)])
    out = capsys.readouterr().out
    assert "RUN_ENDED: failed after 20 rounds: Oops: it broke" in out
    assert "Traceback" not in out


def test_warnings_are_listed_and_control_characters_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_run(tmp_path, rounds=6, finish=False)
    log.emit(T.ANOMALY_DETECTED, anomaly(detail="\x1b[31mred\x07"), Severity.WARNING, round=5)
    log.emit(T.RUN_ENDED, ended(status="failed", error_type="Oops", error_message="\x1b]0;title\x07gone"))
    main(["status", str(tmp_path)])
    out = capsys.readouterr().out
    assert "Newest warnings" in out
    assert "ANOMALY_DETECTED round 5" in out
    assert "failed: Oops:" in out
    assert "\x1b" not in out
    assert "\x07" not in out


def test_a_terminal_that_lacks_characters_gets_their_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=3)
    done = subprocess.run(
        [sys.executable, "-m", "esper.scripts.cli", "status", str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u258" in done.stdout  # the bars of the curves


def follow(log: LogWriter) -> subprocess.Popen[str]:
    """A process that follows a run which has just begun."""
    log.emit(T.RUN_STARTED, started())
    pulse = HeartbeatWriter(log.folder, run_id=log.run, attempt=0, every_s=0.0)
    pulse.beat(last_seq=0, dropped={}, num_held=0, error=None)
    command = [sys.executable, "-m", "esper.scripts.cli", "status", "--follow", str(log.folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_following_tells_each_change_once_until_the_end(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    with follow(log) as follower:
        assert follower.stdout is not None
        lines = [follower.stdout.readline()]
        write_round(log, 0)
        while "accuracy 72.0 %" not in lines[-1]:  # it may look while the round is being written
            lines.append(follower.stdout.readline())
        log.emit(T.RUN_ENDED, ended(num_rounds_total=1))
        lines += follower.stdout.readlines()
    assert follower.returncode == 0
    assert lines[0].startswith("0 of 20 rounds  starting: no round is complete yet [")
    assert lines[-1].startswith("1 of 20 rounds  accuracy 72.0 %  completed after 1 rounds")
    assert len(set(lines)) == len(lines)


def test_following_in_a_pipe_does_not_tell_that_events_came(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    with follow(log) as follower:
        assert follower.stdout is not None
        lines = [follower.stdout.readline()]
        for epoch in range(3):
            log.emit(T.EPOCH_COMPLETED, epoch_completed(), round=0, episode=0, env=0, epoch=epoch)
            time.sleep(1.5 * FOLLOW_INTERVAL_S)
        log.emit(T.RUN_ENDED, ended(status="interrupted", num_rounds_total=0))
        lines += follower.stdout.readlines()
    assert [line.split("  ")[1][:11] for line in lines] == ["starting: n", "interrupted"]


@pytest.mark.parametrize("content", [None, b"", b"damage\n"])
def test_following_a_folder_that_nobody_writes_says_so_and_ends(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PATIENCE_S", 0.2)
    monkeypatch.setattr(status, "FOLLOW_INTERVAL_S", 0.05)
    (tmp_path / "events").mkdir()
    if content is not None:
        LogWriter(tmp_path).path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["status", "--follow", str(tmp_path)])
    assert stopped.value.code == 2
    first, last = capsys.readouterr().err.splitlines()
    missing = f"{tmp_path} has no event (events/) and no heartbeat (status.json)"
    assert first == f"esper: {missing} yet; waiting 0.2 s for a process to write them"
    assert last == f"esper: error: {missing} after 0.2 s: nobody writes this run. Start or resume it first"


def test_following_waits_for_a_process_that_shows_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PATIENCE_S", 0.2)
    (tmp_path / "events").mkdir()
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        """Time in which the process comes to life, and then writes its log."""
        sleeps.append(seconds)
        if len(sleeps) == 1:
            HeartbeatWriter(tmp_path, run_id="a", attempt=0, every_s=0.0).beat(
                last_seq=-1, dropped={}, num_held=0, error=None
            )
            monkeypatch.setattr(status.time, "monotonic", lambda: 1e9)  # longer than any patience
        elif len(sleeps) == 3:
            write_run(tmp_path, rounds=1)

    monkeypatch.setattr(status.time, "sleep", sleep)
    main(["status", "--follow", str(tmp_path)])
    assert "completed after 1 rounds" in capsys.readouterr().out


# ---- on a terminal of 80 columns


@pytest.fixture
def long_run(tmp_path: Path) -> LogWriter:
    """A run with much to say: long names, many envs, alarms."""
    log = LogWriter(tmp_path, run="20260101-000000-abc123")
    slots = tuple(f"r{row}c{column}" for row in range(3) for column in range(4))
    log.emit(T.RUN_STARTED, started(num_envs=20, slot_ids=slots, task="digits_saturated"))
    write_round(log, 0, envs=20)
    where = {"round": 0, "episode": 0, "env": 3, "epoch": 2}
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={"r2c3": slot()}, params_total=123_456_789), **where)
    log.emit(T.ACTION_TAKEN, action_taken(slot_id="r2c3", blueprint="cnn.a_blueprint_with_a_very_long_name"), **where)
    log.emit(T.ANOMALY_DETECTED, anomaly(detail="far beyond " * 9), Severity.WARNING, round=0)
    return log


def test_status_fits_a_terminal_of_80_columns_and_loses_no_figure(long_run: LogWriter) -> None:
    reported = seen(["status", long_run.folder])
    lines = reported.splitlines()
    assert max(map(cell_len, lines)) <= 80
    joined = " ".join(reported.split())
    for words in (
        "the process is gone and left no end marker",
        "also warning: steps too large",
        "clip_fraction 0.4, limit 0.3",
        "1 of 20 rounds",
        "72.0 % (75.0 to 85.0), committed 78.0 %",
        "123,456,789",
        "·" * 11 + "t",
        "ANOMALY_DETECTED round 0: entered: clip_fraction 0.4, limit 0.3; far beyond",
        "far beyond " * 9,
    ):
        assert " ".join(words.split()) in joined, words
    rows = [line.split() for line in lines[lines.index(next(line for line in lines if line.startswith("env "))) :]]
    assert [row[0] for row in rows[1:17]] == [str(env) for env in range(16)]
    assert rows[17] == ["+4"]


def test_advice_names_the_run_that_was_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "my run", rounds=1)
    monkeypatch.chdir(tmp_path)
    main(["status", "--json", "my run"])
    assert json.loads(capsys.readouterr().out)["next"] == "esper report 'my run' shows what came of it"


def test_following_on_a_terminal_redraws_until_the_run_is_over(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    pulse = HeartbeatWriter(tmp_path, run_id=log.run, attempt=0, every_s=0.0)
    pulse.beat(last_seq=0, dropped={}, num_held=0, error=None)
    ours, theirs = open_screen(80, rows=50)
    running = start(["status", "--follow", tmp_path], theirs)
    raw = ""
    while "starting: no round is complete yet" not in shown(raw):
        raw += read_more(ours)
    before = len(raw)
    write_round(log, 0)
    while "1 of 20 rounds" not in shown(raw):
        raw += read_more(ours)
    assert "\x1b[1A" in raw[before:]  # it moves up and draws over what was there
    log.emit(T.RUN_ENDED, ended(num_rounds_total=1))
    while more := read_more(ours):
        raw += more
    os.close(ours)
    assert running.wait(timeout=30) == 0
    last = shown(raw)[shown(raw).rindex("now  ") :]
    assert last.startswith("now  completed after 1 rounds")
    assert max(cell_len(line) for line in last.splitlines()) <= 80
    assert "log  " in last  # the whole screen, to its end


def test_following_ends_with_the_process_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=6, finish=False)  # no end marker, no heartbeat, and long ago
    main(["status", "--follow", str(tmp_path)])
    assert "the process is gone" in capsys.readouterr().out


def test_a_path_that_is_no_run_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one")
    with pytest.raises(SystemExit) as stopped:
        main(["status", str(tmp_path)])
    assert stopped.value.code == 2
    assert "Runs inside it:" in capsys.readouterr().err


def test_a_log_of_a_newer_version_is_refused_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(tmp_path)
    line = json.loads(log.line(T.RUN_STARTED, started()))
    log.write(json.dumps({**line, "v": 99}).encode() + b"\n")
    with pytest.raises(SystemExit) as stopped:
        main(["status", str(tmp_path)])
    assert stopped.value.code == 2
    reported = capsys.readouterr().err
    assert "schema version 99" in reported
    assert f"{tmp_path}/events/a000-s0.jsonl at byte 0" in reported


def test_seeds_are_shown_in_the_place_of_their_slot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={"r0c1": slot()}), round=0, episode=0, env=0, epoch=1)
    main(["status", str(tmp_path)])
    assert " ·t " in capsys.readouterr().out
