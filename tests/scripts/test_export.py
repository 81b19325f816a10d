"""`esper export`: a run for other tools, equal to what the log says."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.leyline import ExitCode
from esper.scripts.cli import main
from tests.karn.logs import RUN_ID, LogWriter, T, seal, started, write_round, write_run


def resumed_run(folder: Path) -> None:
    """Rounds 0, 1 and 2, of which the last was done twice."""
    log = LogWriter(folder)
    log.emit(T.RUN_STARTED, started())
    write_round(log, 0)
    write_round(log, 1)
    resume_at = log.seq
    write_round(log, 2)
    again = LogWriter(folder, attempt=1, first_seq=resume_at)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000002"))
    write_round(again, 2)


def points_of(folder: Path, wanted: str) -> Iterator[tuple[int, float]]:
    """(step, value) of one curve, read from the files with nothing but their format."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs the extra `metrics`")
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        place = 0
        while place < len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + size])
            place += 12 + size + 4  # length and its check sum, then the data and its check sum
            for value in event.summary.value:
                if value.tag == wanted:
                    yield event.step, value.simple_value


def test_curves_have_one_point_per_round_however_often_it_was_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboardX", reason="needs the extra `metrics`")
    resumed_run(tmp_path / "run")
    main(["export", str(tmp_path / "run"), "tensorboard"])
    assert "3 rounds" in capsys.readouterr().out
    points = list(points_of(tmp_path / "run" / "metrics", "host/accuracy_mean_pct"))
    assert points == [(6, 72.0), (12, 73.0), (18, 74.0)]
    (first, *_) = points_of(tmp_path / "run" / "metrics", "rollout/ep_rew_mean")
    assert first == (6, pytest.approx((1.0 + 1.01) / 2))


def test_tables_hold_what_queries_answer(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs the extra `runs`")
    from esper.karn.sql import RunDatabase
    from esper.karn.sql_views import VIEWS

    resumed_run(tmp_path / "it's a run")
    main(["export", str(tmp_path / "it's a run"), "parquet", "--out", str(tmp_path / "it's out")])
    files = sorted((tmp_path / "it's out").glob("*.parquet"))
    assert {path.stem for path in files} == {*VIEWS, "integrity"}  # also those in which nothing happened
    with RunDatabase([tmp_path / "it's a run"]) as database:
        for path in files:
            answer = database.ask(f"select * from {path.stem}", limit=10_000)
            back = duckdb.read_parquet(str(path))
            assert tuple(back.columns) == answer.columns
            assert tuple(back.fetchall()) == answer.rows


@pytest.mark.parametrize("form", ["tensorboard", "parquet"])
def test_a_folder_with_something_in_it_is_left_alone(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", rounds=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(tmp_path / "run"), form, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("form", ["tensorboard", "parquet"])
def test_names_with_brackets_are_printed_as_they_are(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "[/x]:smile:"
    write_run(run, rounds=1)
    main(["export", str(run), form])
    assert f" to {run}/" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["tensorboard", "parquet"])
def test_a_run_that_is_not_whole_is_exported_with_a_word_of_warning(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_run(tmp_path / "run", rounds=1)
    seal(tmp_path / "run")
    main(["export", str(tmp_path / "run"), form, "--out", str(tmp_path / "one")])
    assert capsys.readouterr().err == ""
    log.write(b"damage\n")
    main(["export", str(tmp_path / "run"), form, "--out", str(tmp_path / "two")])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"esper: run {RUN_ID} is not whole: ")


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))


@pytest.mark.parametrize("form", ["tensorboard", "parquet"])
def test_a_disk_that_takes_no_more_is_one_line_and_code_6(form: str, tmp_path: Path) -> None:
    """The library that writes TensorBoard files would wait for its dead thread for ever."""
    write_run(tmp_path / "run", rounds=3)
    command = [sys.executable, "-m", "esper.scripts.cli", "export", "run", form]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, preexec_fn=limit_files)
    assert done.returncode == ExitCode.STORAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith("esper: error: ")
    assert "run/" in line
    assert "File too large" in line


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", rounds=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(tmp_path / "run"), "parquet", "--out", str(tmp_path / "file" / "out")])
    assert stopped.value.code == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/file" in line
    assert "a part of the path is a file" in line


@pytest.mark.parametrize("form", ["parquet", "tensorboard"])
def test_an_export_that_was_stopped_leaves_nothing_and_can_be_made_again(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb", reason="tables need the extra `runs`")
    pytest.importorskip("tensorboardX", reason="needs the extra `metrics`")
    write_run(tmp_path / "run", rounds=2)

    def half(run: Path, folder: Path) -> None:
        (folder / "rounds.parquet").touch()
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("esper.karn.sql.write_parquet", half)
        patched.setattr("esper.nissa.exporters.TensorBoardBackend.close", stop)
        with pytest.raises(SystemExit):
            main(["export", str(tmp_path / "run"), form])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["events"]
    main(["export", str(tmp_path / "run"), form])
    assert "Wrote" in capsys.readouterr().out
