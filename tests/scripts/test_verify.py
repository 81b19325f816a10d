"""`esper verify` on runs that the real hub wrote."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from esper.karn.replay import replay
from esper.leyline import Severity, make_event
from esper.leyline.rundir import event_files
from esper.nissa.heartbeat import HeartbeatWriter
from esper.scripts.cli import main
from tests.karn.logs import PAYLOADS, T, ended, ids_of, read_view, started
from tests.nissa.events import open_hub


def write_attempt(folder: Path, *, first_seq: int = 0, num_epochs: int = 20, finish: bool = True) -> None:
    """One attempt of a run through the hub."""
    with open_hub(folder, first_seq=first_seq, flush_interval_s=0.01, strict=True) as hub:
        hub.emit(make_event(T.RUN_STARTED, started()))
        for epoch in range(num_epochs):
            kind = T.EPOCH_COMPLETED
            hub.emit(make_event(kind, PAYLOADS[kind](), **{**ids_of(kind), "epoch": epoch}))
            if epoch % 5 == 0:
                assert hub.flush(5.0)
        if finish:
            hub.emit(make_event(T.RUN_ENDED, ended(), Severity.INFO))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_attempt(tmp_path, finish=False)
    write_attempt(tmp_path, first_seq=11)
    return tmp_path


def verify(*args: str) -> object:
    """The exit code."""
    try:
        main(["verify", *args])
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_a_run_of_two_attempts_written_by_the_hub_is_sound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(str(run)) == 0
    out = capsys.readouterr().out
    assert "sound" in out
    assert "10 of them written again by a later attempt" in out
    view = read_view(replay(run))
    assert (view.num_missing, view.num_bad, view.attempt) == (0, 0, 1)
    assert view.ended is not None


def test_one_flipped_bit_in_a_closed_file_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = event_files(run)[0].path
    flip(victim)
    assert verify(str(run)) == 1
    out = capsys.readouterr().out
    assert f"{victim.name}: sha256 mismatch" in out
    assert "NOT SOUND" in out


def test_a_lost_checksum_is_named_and_can_be_made_again_with_a_common_tool(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event_files(run)[0].checksum_path.unlink()
    assert verify(str(run)) == 1
    (problem,) = [line for line in capsys.readouterr().out.splitlines() if "has no checksum" in line]
    command = problem.partition("To accept it as it is: ")[2]
    subprocess.run(command, shell=True, cwd=run / "events", check=True)
    assert verify(str(run)) == 0


def flip(path: Path, word: bytes = b"digits_mlp") -> None:
    content = bytearray(path.read_bytes())
    content[content.index(word)] ^= 1
    path.write_bytes(content)


def test_a_run_that_goes_on_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(tmp_path, finish=False)
    pulse = HeartbeatWriter(tmp_path, run_id="a", attempt=0, every_s=0.0)
    pulse.beat(last_seq=20, dropped={}, num_held=0, error=None)
    assert verify(str(tmp_path)) == 1
    assert f"still running: process {os.getpid()}" in capsys.readouterr().out
    pulse.beat(last_seq=20, dropped={}, num_held=0, error=None, closed=True)
    assert verify(str(tmp_path)) == 1
    assert "still running" not in capsys.readouterr().out


def test_a_run_that_is_not_over_is_not_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(tmp_path, finish=False)
    assert verify(str(tmp_path)) == 1
    assert "no end marker" in capsys.readouterr().out


def test_a_log_that_does_not_reach_its_checkpoints_is_not_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--checkpoint-s", "0"]
    run = tmp_path / "a"
    main(["train", "ppo", *flags, "--rounds", "1", "--runs", str(tmp_path), "--run-id", "a"])
    main(["train", "--resume", str(run), "--rounds", "2", "--level", "off"])
    main(["train", "--resume", str(run), "--rounds", "3", "--level", "normal"])
    assert verify(str(run)) == 0, "a session without a log is none that lost it"
    last = event_files(run)[-1]
    last.path.unlink()
    last.checksum_path.unlink()
    capsys.readouterr()
    assert verify(str(run)) == 1
    reported = capsys.readouterr().out
    assert "ckpt-00000003 counts events up to seq" in reported
    assert "but the log of attempt 1 is missing or empty" in reported
    assert "ckpt-00000001" not in reported
    assert "ckpt-00000002" not in reported
    for path in (run / "events").iterdir():
        path.unlink()
    write_attempt(run)
    assert verify(str(run)) == 1
    assert "but all checkpoints are of a" in capsys.readouterr().out


def test_a_status_that_cannot_be_read_is_named_and_no_fault_of_the_record(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "status.json").write_text("{")
    assert verify(str(run)) == 0
    assert "status.json is not a heartbeat" in capsys.readouterr().out
