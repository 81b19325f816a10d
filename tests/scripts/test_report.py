"""`esper report` as a user meets it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="reports need the extra `runs`")
pytest.importorskip("jinja2", reason="reports need the extra `runs`")

from esper.leyline import files
from esper.scripts.cli import main
from tests.karn.logs import RUN_ID, write_run


def test_the_report_lands_in_the_run_directory_or_where_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", rounds=2)
    main(["report", str(tmp_path / "run")])
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert RUN_ID in page
    assert "report.html" in capsys.readouterr().out
    main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "mine.html")])
    assert RUN_ID in (tmp_path / "mine.html").read_text(encoding="utf-8")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", rounds=1)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "no" / "mine.html")])
    assert stopped.value.code == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", rounds=1)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / "run"), "--out", str(tmp_path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}: it is a folder; name a file" in line


def test_a_disk_that_is_full_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", rounds=1)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / "run"), "--out", "/dev/full"])
    assert stopped.value.code == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("esper: error: cannot write /dev/full: No space left on device")


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", rounds=1)
    (tmp_path / "mine.html").write_text("the old one")

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_all", half)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "mine.html")])
    assert stopped.value.code == 6
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "run"]
    assert (tmp_path / "mine.html").read_text() == "the old one"


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "[/x]:smile:"
    write_run(run, rounds=1)
    main(["report", str(run)])
    assert f"Wrote {run}/report.html" in capsys.readouterr().out
