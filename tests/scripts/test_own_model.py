"""`esper grow` and `esper compare` with a model and data of the user's own."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from esper.scripts.cli import main

MINE = """
import torch
from torch import nn
from esper.runtime.datasets import load_dataset


def make_model(width=1.0):
    channels = round(6 * width)
    return nn.Sequential(
        nn.Conv2d(1, channels, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10)
    )


def make_data():
    digits = load_dataset("digits")
    return (digits.train.inputs[:320], digits.train.targets[:320]), (digits.val.inputs, digits.val.targets)


def twice(factor):
    return make_model(2 * factor)


def nothing():
    return None
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "esper_user_mine", raising=False)
    Path("mine.py").write_text(MINE)
    return "mine.py"


def run(*args: str, mine: str, model: str = "make_model") -> None:
    flag = [] if args[0] == "compare" else ["--model"]
    main([args[0], *flag, f"{mine}:{model}", "--data", f"{mine}:make_data", *args[1:]])


def test_sites_are_listed_and_nothing_is_trained(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("grow", "--list-sites", mine=mine)
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("* ")][:3] == ["1", "2", "3"]
    assert not Path("runs").exists()


def test_a_model_of_ones_own_is_grown_into_a_folder(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("grow", "--epochs", "8", "--sites", "1", "--lr", "0.01", "--budget", "3000", mine=mine)
    shown = capsys.readouterr()
    assert "cnn.conv" in shown.out
    assert "parameters: 982 before, " in shown.out
    assert "planted cnn.conv" in shown.err
    files = sorted(file.name for file in Path("runs/grow-mine").iterdir())
    assert files == ["growth.png", "history.csv", "model.safetensors", "network.pt2", "report.html"]
    network = torch.export.load("runs/grow-mine/network.pt2").module()
    assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_comparison_says_whether_growing_pays(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("compare", "--epochs", "8", "--sites", "1", "--lr", "0.01", "--seeds", "1", "--out", "table.txt", mine=mine)
    shown = capsys.readouterr()
    for words in ("grown", "left alone", "the grown network from the start", "a wider model", "Growing pays here"):
        assert words in shown.out
    assert "seed 1 of 1" in shown.err
    assert Path("table.txt").read_text().strip() == shown.out.strip()


OWN = ["--model", "mine.py:make_model", "--data", "mine.py:make_data"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["grow", *OWN[:2]], "--model needs --data FILE.py:FUNCTION"),
        (["grow", "--model", "mine.py:make", *OWN[2:]], "mine.py has no function 'make'; it has"),
        (["grow", "--model", "mine.py:nothing", *OWN[2:]], "must return a torch.nn.Module, got None"),
        (["grow", *OWN[:2], "--data", "mine.py:nothing"], "must return (train, validation)"),
        (["grow", "--model", "yours.py:make", *OWN[2:]], "there is no such file"),
        (["grow", "--model", "mine", *OWN[2:]], "expected FILE.py:FUNCTION or package.module:FUNCTION, got 'mine'"),
        (["grow", *OWN, "--task", "digits_mlp"], "are for bundled tasks; leave them out with --model"),
        (["grow", *OWN, "--blueprint", "cnn.convv"], "unknown blueprint 'cnn.convv'. Known: mlp.norm"),
        (["grow", "--list-sites"], "are for your own model; give --model"),
        (["grow", *OWN, "--controller", "runs/none"], "expected wait_only, random, schedule, largest"),
        (["grow", *OWN, "--budget", "5"], "budget=5 leaves no room"),
        (["compare", *OWN[1:], "--seeds", "0"], "seeds must be at least 1"),
    ],
)
def test_what_cannot_work_is_one_line(
    args: list[str], message: str, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_warning_is_one_line_without_the_code_that_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    main(["--version"])
    shown = warnings.formatwarning("it is outside\x1b what it knows", UserWarning, "controllers.py", 64)
    assert shown == "esper: it is outside  what it knows\n"


def test_a_trained_policy_decides(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a model of its own kind, and on a task; elsewhere it says so and a rule decides."""
    short = ["--rounds", "1", "--envs", "2", "--episode-length", "4", "--calibration-runs", "0"]
    main(["train", "ppo", "--preset", "digits_blind", *short, "--run-id", "tiny"])
    capsys.readouterr()
    run("grow", "--epochs", "6", "--sites", "1", "--controller", "runs/tiny", mine=mine)
    assert "decided by: runs/tiny" in capsys.readouterr().out
    with pytest.warns(UserWarning, match=r"has learned on cnn hosts and this model is mlp.*'schedule' decides"):
        run("grow", "--epochs", "6", "--sites", "3", "--controller", "runs/tiny", "--out", "other", mine=mine)
    main(["grow", "--task", "digits_blind", "--epochs", "4", "--controller", "runs/tiny", "--out", "task"])
    assert Path("task/network.pt2").exists()
