"""Arguments that do not fit, and how they are answered: one line, never a box or a traceback."""

import os
import subprocess
import sys

import pytest

from esper.scripts import cli


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert stopped.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("esper: error: ")
    assert "<class" not in line
    assert line.count("--help") == 1
    return line


@pytest.mark.parametrize(
    ("args", "words", "place"),
    [
        # Unknown flags
        (["train", "--foo", "3"], ["--foo"], "esper train"),
        (["train", "--rond", "3"], ["--rond", "Perhaps you meant: --rounds INT."], "esper train"),
        (["grow", "--epoch", "3"], ["--epoch", "Perhaps you meant: --epochs"], "esper grow"),
        (["evaluate", "--seed", "3"], ["--seed", "Perhaps you meant: --seeds INT."], "esper evaluate"),
        (["train", "--roun", "3", "--envz", "4"], ["--roun:", "--rounds", "--envz:", "--envs"], "esper train"),
        (["bench", "telemetry", "--round", "3"], ["--round,", "--rounds INT"], "esper bench telemetry"),
        (["tasks", "x" * 200], ["x" * 200], "esper tasks"),
        # Unknown commands
        (["trainn"], ["'trainn'", "Perhaps you meant: train.", "grow", "bench"], "esper"),
        (["evaluat", "--seeds", "3"], ["'evaluat'", "Perhaps you meant: evaluate."], "esper"),
        (["bench", "pppo"], ["'pppo'", "Perhaps you meant: ppo.", "telemetry"], "esper bench"),
        (["--foo", "train"], ["'--foo'", "Known: grow, train"], "esper"),
        # Missing arguments
        ([], ["got nothing", "Known: grow, train"], "esper"),
        (["bench"], ["got nothing", "Known: engine"], "esper bench"),
        (["query"], ["PATH: A run directory", "STR: One SELECT"], "esper query"),
        (["verify"], ["PATH: The run directory"], "esper verify"),
        (["evaluate", "--from"], ["'--from'"], "esper evaluate"),
        # Values of the wrong type
        (["train", "--rounds", "abc"], ["wrong value for --rounds", "'abc'", "Expected: --rounds INT"], "esper train"),
        (["query", "a", "b", "--limit", "3.5"], ["--limit", "'3.5'", "Expected: --limit INT"], "esper query"),
        (["query", "a", "b", "--format", "jsn"], ["--format", "'jsn'", "csv, json, table"], "esper query"),
        (["export", "a", "parket"], ["'parket'", "parquet, tensorboard"], "esper export"),
        (["bench", "ppo", "--seeds", "x"], ["--seeds", "'x'", "INT"], "esper bench ppo"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(
    args: list[str], words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(args, capsys)
    assert [word for word in words if word not in line] == []
    assert line.endswith(f". See '{place} --help'.")


def test_flags_of_other_commands_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Perhaps" not in refused(["evaluate", "--run-idd", "a"], capsys)
    assert "--run-id" in refused(["train", "--run-idd", "a"], capsys).partition("Perhaps")[2]


@pytest.mark.parametrize("columns", [None, "30"])
def test_the_width_of_the_terminal_changes_nothing_and_stays(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = refused(["query"], capsys)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert refused(["query"], capsys) == usual
    assert os.environ.get("COLUMNS") == columns


def test_a_command_writes_to_the_real_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = sys.stderr

    def command(loud: bool = False) -> None:
        assert sys.stderr is real
        sys.stderr.write(f"loud: {loud}\n")
        raise SystemExit(2)

    monkeypatch.setitem(cli.COMMANDS, "tasks", command)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tasks", "--loud"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "loud: True\n", "what a command says before it exits with 2 is its own"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], [*cli.COMMANDS, "bench", "Esper grows neural networks"]),
        (["bench", "--help"], [*cli.find_benchmarks()]),
        (["train", "--help"], ["usage: esper train", "--rounds INT", "[TRAIN OPTIONS]"]),
        (["--tyro-print-completion", "bash"], ["--rounds", "telemetry"]),
    ],
)
def test_help_and_completion_are_what_tyro_prints(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert not stopped.value.code
    told = capsys.readouterr()
    assert [word for word in words if word not in told.out] == []
    assert told.err == ""


def test_a_warning_while_parsing_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = cli._commands

    def warns() -> object:
        sys.stderr.write("careful\n")
        return commands()

    monkeypatch.setattr(cli, "_commands", warns)
    monkeypatch.setitem(cli.COMMANDS, "tasks", lambda: None)
    cli.main(["tasks"])
    assert capsys.readouterr().err == "careful\n"


def test_a_warning_is_not_lost_when_parsing_itself_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks() -> object:
        sys.stderr.write("careful\n")
        raise RuntimeError("a defect")

    monkeypatch.setattr(cli, "_commands", breaks)
    with pytest.raises(RuntimeError):
        cli.main(["tasks"])
    assert capsys.readouterr().err == "careful\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--exporters", "foo"], "Expected one of tensorboard, trackio, wandb."),
        (["train", "--rounds", "x"], "wrong value for --rounds: got 'x'. Expected: --rounds INT"),
        (["sandbox", "--seeds", "q"], "wrong value for --seeds: got 'q'. Expected: --seeds INT"),
    ],
)
def test_words_are_about_the_command_and_not_about_python(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(args)
    assert words in capsys.readouterr().err


def test_the_program_answers_without_a_frame() -> None:
    command = [sys.executable, "-m", "esper.scripts.cli", "verify"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert (done.returncode, done.stdout) == (2, "")
    wrong = "missing from esper verify: PATH: The run directory. (required)"
    assert done.stderr == f"esper: error: {wrong}. See 'esper verify --help'.\n"
