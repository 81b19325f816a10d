"""`esper query` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="queries need the extra `runs`")

from esper.scripts.cli import main
from tests.karn.logs import LogWriter, T, epoch_completed, write_run

EPOCH = {"round": 0, "episode": 0, "env": 0, "epoch": 0}


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", rounds=2, run="20260101-000000-aaaaaa")
    write_run(tmp_path / "b", rounds=1, run="20260101-000000-bbbbbb")
    main(["query", str(tmp_path), "select run, count(*) as rounds from rounds group by run order by run"])
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "rounds"]
    assert rows == [["20260101-000000-aaaaaa", "2"], ["20260101-000000-bbbbbb", "1"]]


def test_csv_for_spreadsheets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=2)
    main(["query", str(tmp_path), "select round, committed_accuracy_pct from rounds", "--format", "csv"])
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows == [["round", "committed_accuracy_pct"], ["0", "78.0"], ["1", "78.0"]]


def test_json_tells_not_measured_from_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(tmp_path)
    log.emit(T.EPOCH_COMPLETED, epoch_completed(val_loss=math.nan, train_loss=None), **EPOCH)
    main(["query", str(tmp_path), "select val_loss, train_loss, [val_loss] as l from epochs", "--format", "json"])
    assert json.loads(capsys.readouterr().out) == [{"val_loss": "nan", "train_loss": None, "l": ["nan"]}]


def test_cut_rows_are_told_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=3)
    main(["query", str(tmp_path), "select round from rounds", "--limit", "2", "--format", "csv"])
    told = capsys.readouterr()
    assert told.out == "round\n0\n1\n"
    assert "only the first 2 rows" in told.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["drop table lines"], "expected one SELECT, got DROP"),
        (["select * from nowhere"], "nowhere does not exist"),
        (["select 1", "--limit", "0"], "--limit must be at least 1"),
        (["select 1", "--timeout", "0"], "--timeout must be above 0"),
        (["select count(*) from range(1000000000000) a, range(1000000) b", "--timeout", "0.2"], "longer than 0.2 s"),
    ],
)
def test_mistakes_are_one_message_and_code_2(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, rounds=1)
    with pytest.raises(SystemExit) as stopped:
        main(["query", str(tmp_path), *args])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["query", str(tmp_path), "select 1"])
    assert "no runs in" in capsys.readouterr().err
