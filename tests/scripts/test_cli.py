"""Arguments that do not fit: exit code 2 and tyro's own words on stderr; nothing runs."""

import os
import subprocess
import sys

import pytest

from esper.scripts import cli


@pytest.mark.parametrize(
    ("args", "words"),
    [
        # Unknown flags
        (["train", "--foo", "3"], ["--foo"]),
        (["train", "--rond", "3"], ["--rond", "Perhaps you meant", "--rounds INT", "esper train --help"]),
        (["evaluate", "--seed", "3"], ["--seed", "Perhaps you meant", "--seeds INT"]),
        (["tasks", "x" * 20], ["x" * 20]),
        # Unknown commands
        (["trainn"], ["trainn", "Available subcommands: grow, train"]),
        (["bench", "pppo"], ["pppo"]),
        (["--foo", "train"], ["--foo"]),
        # Missing arguments
        ([], ["Missing subcommand", "grow, train"]),
        (["bench"], ["Missing subcommand", "engine"]),
        (["query"], ["PATH", "A run directory", "STR", "One SELECT", "esper query --help"]),
        (["verify"], ["PATH", "The run directory", "esper verify --help"]),
        (["evaluate", "--from"], ["--from"]),
        # Values of the wrong type
        (["train", "--rounds", "abc"], ["--rounds", "'abc'", "--rounds INT"]),
        (["query", "a", "b", "--limit", "3.5"], ["--limit", "'3.5'", "--limit INT"]),
        (["query", "a", "b", "--format", "jsn"], ["--format", "'jsn'", "'csv'", "'json'"]),
        (["export", "a", "parket"], ["'parket'", "'parquet'"]),
        (["bench", "ppo", "--seeds", "x"], ["--seeds", "'x'", "INT"]),
    ],
)
def test_arguments_that_do_not_fit_are_exit_code_2(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [word for word in words if word not in shown.err] == []


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
    shown = capsys.readouterr()
    assert [word for word in words if word not in shown.out] == []
    assert shown.err == ""


def test_the_list_of_commands_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert len(capsys.readouterr().out.splitlines()) < 40, "one line or two a command, not its whole story"


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "evaluate"])  # takes a record of its own
def test_help_shows_no_default_that_means_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert "{None}" not in shown
    assert "(default: None)" not in shown
    assert "(default: )" not in shown


def test_the_program_itself_answers_so() -> None:
    command = [sys.executable, "-m", "esper.scripts.cli", "verify"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "The run directory. (required)" in done.stderr
