"""`esper query` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="queries need the extra `runs`")

from esper.karn.sql import RunDatabase
from esper.scripts.cli import main
from tests.karn.logs import RUN_ID, LogWriter, T, epoch_completed, seal, started, write_run
from tests.scripts.screens import seen

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


@pytest.mark.parametrize(("format", "reported"), [("csv", "a,a_1\n1,2\n"), ("table", "a  a_1\n1    2\n")])
def test_columns_of_one_name_are_numbered(
    format: str, reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, rounds=1)
    main(["query", str(tmp_path), "select 1 a, 2 a", "--format", format])
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == reported.splitlines()
    main(["query", str(tmp_path), "select 1 a, 2 a", "--format", "json"])
    assert json.loads(capsys.readouterr().out) == [{"a": 1, "a_1": 2}]


def test_cut_rows_are_reported_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=3)
    main(["query", str(tmp_path), "select round from rounds", "--limit", "2", "--format", "csv"])
    reported = capsys.readouterr()
    assert reported.out == "round\n0\n1\n"
    assert "only the first 2 rows" in reported.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["drop table lines"], "expected one SELECT, got DROP"),
        (["select * from nowhere"], "nowhere does not exist"),
        (["select 1", "--limit", "0"], "--limit must be from 1 to 1000000000, got 0"),
        (["select 1", "--limit", "99999999999999999999"], "--limit must be from 1 to 1000000000"),
        *(
            (["select 1", "--timeout", given], f"--timeout must be above 0 and at most 86400 seconds, got {reported}")
            for given, reported in (("0", "0"), ("-1", "-1"), ("inf", "inf"), ("nan", "nan"), ("1e12", "1e+12"))
        ),
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


def test_a_table_that_fits_the_terminal_is_one(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=2)
    head, *rows = seen(["query", tmp_path, "select round, wall, accuracy_mean_pct from rounds"]).splitlines()[:3]
    assert head.split() == ["round", "wall", "accuracy_mean_pct"]
    assert [row.split() for row in rows] == [["0", "1767225624.00", "72"], ["1", "1767225648.00", "73"]]


def test_a_table_wider_than_the_terminal_is_printed_row_by_row_and_whole(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=2)
    reported = seen(["query", tmp_path, "select * from rounds"]).splitlines()
    first, second = reported.index("row 1"), reported.index("row 2")
    pairs = [line.split() for line in reported[first + 1 : second]]
    with RunDatabase([tmp_path]) as database:
        assert [pair[0] for pair in pairs] == [*database.ask("from rounds", limit=1).columns]
    assert ["run", RUN_ID] in pairs
    assert ["num_env_steps_total", "6"] in pairs
    assert not any("…" in line for line in reported)


def test_a_single_value_wider_than_the_terminal_is_not_cut(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=1)
    reported = seen(["query", tmp_path, "select repeat('abcde', 60) as long"])
    assert "abcde" * 60 in reported.replace("\n", "")


def test_no_rows_and_many_columns_are_said_to_be_so(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=1)
    reported = seen(["query", tmp_path, "select * from rounds where round > 9"])
    assert "no rows; columns: run, group, seq, wall" in reported


def test_a_pipe_has_no_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=1)
    main(["query", str(tmp_path), "select repeat('x', 20000) as a, repeat('y', 20000) as b"])
    assert capsys.readouterr().out.split() == ["a", "b", "x" * 20000, "y" * 20000]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("1794866603.3004", "1794866603.30"),
        ("0.1 + 0.2", "0.3"),
        ("1e0 / 3", "0.3333333"),
        ("12345.678", "12345.68"),
        ("-123456789.125::double", "-123456789.12"),
        ("1.25e18::double", "1.25e+18"),
        ("1234567890123456789::double", "1.2345678901234568e+18"),
        ("5e-9::double", "5e-09"),
        ("'nan'::double", "nan"),
        ("'-inf'::double", "-inf"),
    ],
)
def test_numbers_have_digits_enough(
    number: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, rounds=1)
    main(["query", str(tmp_path), f"select ({number})::double as x"])
    assert capsys.readouterr().out.split() == ["x", words]


def test_brackets_and_colons_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=1)
    main(["query", str(tmp_path), """select '[red]:smile:[/nope]' as "[/x]" """])
    assert capsys.readouterr().out.split() == ["[/x]", "[red]:smile:[/nope]"]


def test_an_answer_from_a_run_that_is_not_whole_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_run(tmp_path / "a b", rounds=1)
    seal(tmp_path / "a b")
    main(["query", str(tmp_path), "select 1"])
    assert capsys.readouterr().err == ""
    log.write(b"damage\n")
    main(["query", str(tmp_path), "select 1"])  # and no other exit code
    reported = f"run {RUN_ID} is not whole: see the table integrity, or esper verify '{tmp_path}/a b'"
    assert capsys.readouterr().err == f"esper: {reported}\n"
    write_run(tmp_path / "c", rounds=1, run="c", finish=False)
    main(["query", str(tmp_path), "select 1"])
    reported = f"2 runs are not whole ({RUN_ID}, c): see the table integrity, or esper verify RUN"
    assert capsys.readouterr().err == f"esper: {reported}\n"


EVIL = "run\x1b]0;owned\x07\u202e"


def test_what_a_log_holds_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        LogWriter(tmp_path / name, run=EVIL).emit(T.RUN_STARTED, started(task=EVIL))
    main(["query", str(tmp_path / "one"), "select task from runs"])
    with pytest.raises(SystemExit):
        main(["query", str(tmp_path), "select 1"])
    reported = capsys.readouterr()
    assert "run ]0;owned" in reported.out
    assert reported.err.count("run ]0;owned") == 2
    assert not {"\x1b", "\x07", "\u202e"} & {*reported.out, *reported.err}


def test_csv_is_exact_in_a_file_and_harmless_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=1)
    args = ["query", str(tmp_path), "select chr(27) || '[31m' as word", "--format", "csv"]
    main(args)
    assert capsys.readouterr().out == "word\n\x1b[31m\n"
    assert seen([*args]).startswith("word\n [31m\n")


def test_two_folders_with_one_run_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", rounds=1)
    write_run(tmp_path / "copy", rounds=1)
    with pytest.raises(SystemExit) as stopped:
        main(["query", str(tmp_path), "select 1"])
    assert stopped.value.code == 2
    assert f"{tmp_path / 'a'} and {tmp_path / 'copy'} both hold run {RUN_ID}" in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["query", str(tmp_path), "select 1"])
    assert "no runs in" in capsys.readouterr().err
