"""A log that ended in good order has a checksum, and what is changed afterwards is found, also once the run went on."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.karn.integrity import check_run
from esper.leyline.rundir import event_files
from esper.nissa.log_file import LogFile
from tests.nissa.events import ended, log_path, open_hub, trend


def written(run: Path, first_seq: int = 0) -> None:
    with open_hub(run, first_seq=first_seq) as hub:
        hub.emit(trend())
        hub.emit(ended())


def change_one_digit(path: Path) -> None:
    text = path.read_bytes()
    place = text.index(b'"delta_pp":') + len(b'"delta_pp":')
    path.write_bytes(text[:place] + (b"7" if text[place : place + 1] != b"7" else b"8") + text[place + 1 :])


@pytest.mark.parametrize("resumed", [False, True])
def test_a_changed_figure_is_found_also_after_a_resume(tmp_path: Path, resumed: bool) -> None:
    written(tmp_path)
    assert check_run(tmp_path).complete
    change_one_digit(log_path(tmp_path))
    if resumed:
        written(tmp_path, first_seq=2)
    (problem,) = check_run(tmp_path).problems
    assert problem.startswith("events/a000-s0.jsonl: sha256 mismatch (bit damage?)")


def test_a_resume_of_what_was_left_alone_is_sound(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, first_seq=2)
    assert check_run(tmp_path).complete


def test_while_a_log_is_written_it_has_no_checksum(tmp_path: Path) -> None:
    written(tmp_path)
    with open_hub(tmp_path, first_seq=2):
        old, new = event_files(tmp_path)
        assert (old.checksum_path.exists(), new.checksum_path.exists()) == (True, False)
        assert check_run(tmp_path).damage == ()


def test_a_checksum_that_cannot_be_written_at_the_end_is_reported(
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
    assert "its checksum cannot be (OSError: [Errno 28] No space left on device)" in capsys.readouterr().err
    (problem,) = check_run(tmp_path).problems
    assert "has no checksum" in problem
