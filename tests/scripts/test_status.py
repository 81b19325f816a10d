"""`esper status` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from esper.leyline import Severity
from esper.nissa.heartbeat import Heartbeat
from esper.scripts.cli import main
from tests.karn.logs import (
    LogWriter,
    T,
    anomaly,
    checkpoint,
    ended,
    epoch_completed,
    slot,
    started,
    write_round,
    write_run,
)


def test_a_finished_run_is_told_with_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "died"  # no end, no heartbeat, and long ago
    assert [finding["state"] for finding in told["findings"]] == ["died", "warning", "steady"]
    assert (told["round"], told["num_rounds"], told["accuracy_mean_pct"]) == (5, 20, 77.0)


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


def test_following_tells_each_change_once_until_the_end(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    pulse = Heartbeat(tmp_path, run_id=log.run, attempt=0, every_s=0.0)
    pulse.beat(last_seq=0, dropped={}, num_held=0, error=None)
    command = [sys.executable, "-m", "esper.scripts.cli", "status", "--follow", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        lines = [follower.stdout.readline()]
        write_round(log, 0)
        while "accuracy 72.0 %" not in lines[-1]:  # it may look while the round is being written
            lines.append(follower.stdout.readline())
        log.emit(T.RUN_ENDED, ended(num_rounds_total=1))
        lines += follower.stdout.readlines()
    assert follower.returncode == 0
    assert "round -" in lines[0]
    assert "completed after 1 rounds" in lines[-1]
    assert len(set(lines)) == len(lines)


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
    told = capsys.readouterr().err
    assert "schema version 99" in told
    assert f"{tmp_path}/events.jsonl at byte 0" in told


def test_seeds_are_shown_in_the_place_of_their_slot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started())
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={"r0c1": slot()}), round=0, episode=0, env=0, epoch=1)
    main(["status", str(tmp_path)])
    assert " ·t " in capsys.readouterr().out
