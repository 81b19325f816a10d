"""A log that ended in good order has a hash, and what is changed afterwards is found, also once the run went on."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.karn.integrity import check_run
from esper.leyline.rundir import EVENTS_FILE
from esper.nissa import begin_attempt, read_manifest
from esper.nissa.jsonl import LogFile
from tests.nissa.events import ended, open_hub, trend


def written(run: Path, **options: int) -> None:
    with open_hub(run, **options) as hub:
        hub.emit(trend())
        hub.emit(ended())


def change_one_digit(path: Path) -> None:
    text = path.read_bytes()
    place = text.index(b'"delta_pp":') + len(b'"delta_pp":')
    path.write_bytes(text[:place] + (b"7" if text[place : place + 1] != b"7" else b"8") + text[place + 1 :])


def test_a_changed_figure_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    assert check_run(tmp_path).complete
    change_one_digit(tmp_path / EVENTS_FILE)
    (problem,) = check_run(tmp_path).problems
    assert problem.startswith(f"{EVENTS_FILE}: sha256 mismatch (bit damage?)")


def test_a_figure_changed_before_a_resume_is_found_after_it(tmp_path: Path) -> None:
    written(tmp_path)
    change_one_digit(tmp_path / EVENTS_FILE)
    written(tmp_path, first_seq=2)
    (problem,) = check_run(tmp_path).problems
    assert problem.startswith("segments/a000-p0000.jsonl: sha256 mismatch (bit damage?)")


def test_a_resume_of_what_was_left_alone_is_sound(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, first_seq=2)
    assert check_run(tmp_path).complete


def test_while_a_log_is_written_it_has_no_seal(tmp_path: Path) -> None:
    written(tmp_path)
    manifest = begin_attempt(tmp_path, run_id=None, first_seq=2)
    assert manifest.active is None
    assert manifest.segments[-1].num_lines == 2


def test_a_manifest_that_cannot_be_written_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: LogFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LogFile, "seal", fail)
    hub = open_hub(tmp_path)
    hub.emit(ended())
    report = hub.close()
    assert not report.complete
    assert report.num_unwritten == 0
    assert "its manifest cannot be (OSError: [Errno 28] No space left on device)" in capsys.readouterr().err
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.active is None
