"""`esper export`: a run for other tools, equal to what the log says."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.scripts.cli import main
from tests.karn.logs import LogWriter, T, started, write_round, write_run


def resumed_run(folder: Path) -> None:
    """Rounds 0, 1 and 2, of which the last was done twice."""
    log = LogWriter(folder)
    log.emit(T.RUN_STARTED, started())
    write_round(log, 0)
    write_round(log, 1)
    resume_at = log.seq
    write_round(log, 2)
    log.rotate()
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

    resumed_run(tmp_path / "it's a run")
    main(["export", str(tmp_path / "it's a run"), "parquet", "--out", str(tmp_path / "it's out")])
    files = sorted((tmp_path / "it's out").glob("*.parquet"))
    assert {path.stem for path in files} >= {"rounds", "epochs", "slots", "seeds", "events", "integrity", "runs"}
    with RunDatabase([tmp_path / "it's a run"]) as database:
        for path in files:
            answer = database.ask(f"select * from {path.stem}", limit=10_000, timeout_s=30.0)
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
