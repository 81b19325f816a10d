"""`esper verify` on runs that the real hub wrote."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.karn.replay import replay
from esper.leyline import Severity, make_event
from esper.nissa import TelemetryHub, begin_attempt
from esper.nissa.heartbeat import Heartbeat
from esper.scripts.cli import main
from esper.simic.run.run_dir import RunDir
from tests.karn.logs import PAYLOADS, T, ended, ids_of, read_view, started


def write_attempt(folder: Path, *, first_seq: int = 0, num_epochs: int = 20, finish: bool = True) -> None:
    """One start of a run through the hub, with small files so that several are closed."""
    manifest = begin_attempt(folder, first_seq=first_seq)
    attempt = manifest.attempts[-1].attempt
    with TelemetryHub(
        folder,
        run_id=manifest.run,
        attempt=attempt,
        first_seq=first_seq,
        rotate_bytes=8_000,
        flush_interval_s=0.01,
        strict=True,
    ) as hub:
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
    assert len(list((run / "segments").glob("*.jsonl"))) >= 3
    assert verify(str(run)) == 0
    out = capsys.readouterr().out
    assert "sound" in out
    assert "10 of them written again by a later attempt" in out
    view = read_view(replay(run))
    assert (view.num_missing, view.num_bad, view.attempt) == (0, 0, 1)
    assert view.ended is not None


def test_one_flipped_bit_in_a_closed_file_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = sorted((run / "segments").glob("*.jsonl"))[0]
    flip(victim)
    assert verify(str(run)) == 1
    out = capsys.readouterr().out
    assert f"{victim.name}: sha256 mismatch" in out
    assert "NOT SOUND" in out


def test_a_lost_manifest_can_be_made_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "manifest.json").unlink()
    assert verify(str(run)) == 1
    assert "make it again with --rebuild" in capsys.readouterr().out
    assert verify(str(run), "--rebuild") == 0
    assert verify(str(run)) == 0


def flip(path: Path, word: bytes = b"digits_mlp") -> None:
    content = bytearray(path.read_bytes())
    content[content.index(word)] ^= 1
    path.write_bytes(content)


def test_a_rebuild_does_not_vouch_for_damage_that_the_manifest_knows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = sorted((run / "segments").glob("*.jsonl"))[0]
    before, sound = (run / "manifest.json").read_bytes(), victim.read_bytes()
    flip(victim)
    assert verify(str(run), "--rebuild") == 2
    told = capsys.readouterr()
    assert "rebuilt" not in told.out
    (line,) = told.err.splitlines()
    for words in (
        f"segments/{victim.name}: sha256 mismatch",
        f"expected {hashlib.sha256(sound).hexdigest()}, got {hashlib.sha256(victim.read_bytes()).hexdigest()}",
        "Restore what is damaged",
        "delete manifest.json",
    ):
        assert words in line
    assert (run / "manifest.json").read_bytes() == before
    assert verify(str(run)) == 1
    victim.write_bytes(sound)
    assert verify(str(run), "--rebuild") == 0


def test_a_rebuild_does_not_vouch_for_a_changed_active_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "events.jsonl", b"RUN_ENDED")
    assert verify(str(run), "--rebuild") == 2
    assert "events.jsonl: sha256 mismatch" in capsys.readouterr().err


def test_a_rebuilt_manifest_vouches_for_the_active_file_of_a_run_that_is_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = json.loads((run / "manifest.json").read_text())["active"]
    (run / "manifest.json").unlink()
    assert verify(str(run), "--rebuild") == 0
    assert json.loads((run / "manifest.json").read_text())["active"] == sealed
    flip(run / "events.jsonl", b"0.6")
    assert verify(str(run)) == 1
    assert "events.jsonl: sha256 mismatch" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_a_rebuild_is_refused_while_a_listed_file_is_missing_or_short(
    damage: Callable[[Path], object], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = sorted((run / "segments").glob("*.jsonl"))[0]
    damage(victim)
    assert verify(str(run), "--rebuild") == 2
    assert f"segments/{victim.name}" in capsys.readouterr().err


def test_files_are_accepted_as_they_are_once_the_manifest_is_deleted(run: Path) -> None:
    flip(sorted((run / "segments").glob("*.jsonl"))[0])
    (run / "manifest.json").unlink()
    assert verify(str(run), "--rebuild") == 0


def test_a_manifest_of_a_newer_esper_is_not_replaced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "manifest.json"
    path.write_text(path.read_text().replace('"v": 1', '"v": 2'))
    assert verify(str(run), "--rebuild") == 2
    assert "has version 2, this Esper writes 1" in capsys.readouterr().err
    assert '"v": 2' in path.read_text()


def test_a_run_that_somebody_holds_is_not_rebuilt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints").mkdir()
    (run / "manifest.json").unlink()
    with RunDir(path=run).lock():
        assert verify(str(run), "--rebuild") == 2
        assert "is in use by process" in capsys.readouterr().err
        assert not (run / "manifest.json").exists()
    assert verify(str(run), "--rebuild") == 0


def test_a_run_that_goes_on_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_attempt(tmp_path, finish=False)
    pulse = Heartbeat(tmp_path, run_id="a", attempt=0, every_s=0.0)
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


def test_an_empty_run_cannot_be_rebuilt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "segments").mkdir()
    assert verify(str(tmp_path), "--rebuild") == 2
    assert "no readable event" in capsys.readouterr().err
