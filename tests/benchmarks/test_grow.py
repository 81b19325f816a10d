"""What growing costs: every state of a model is timed beside the plain one, and promises can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.grow
from benchmarks.grow import AGAIN, BLENDED, LIMITS, TRAINING, over_limits
from esper.scripts.cli import main

ROWS = {
    AGAIN,
    "empty slots",
    "three training seeds",
    "three blended seeds",
    "leave-one-out, shared",
    "leave-one-out, separate",
}


def tiny() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(5)), nn.Flatten(), nn.Linear(64, 3)
    )


def test_every_state_is_timed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = torch.randn(8, 4, 4, 4), torch.randint(3, (8,))
    monkeypatch.setattr(benchmarks.grow, "_models", lambda: {"tiny": (tiny, batch)})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(benchmarks.grow, "LIMITS", dict.fromkeys(LIMITS, 1e9))
    main(["bench", "grow", "--repeats", "2", "--out", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]["tiny"]
    assert set(figures) == ROWS
    assert all(0.0 < row["low"] <= row["median"] <= row["high"] for row in figures.values())
    assert figures["three training seeds"]["macs"] == pytest.approx(1.0 + 3 * 144 * 16 / (5 * 144 * 16 + 64 * 3))
    assert "empty slots" in capsys.readouterr().out
    monkeypatch.setattr(benchmarks.grow, "LIMITS", dict.fromkeys(LIMITS, 1e-9))
    with pytest.raises(SystemExit) as caught:
        main(["bench", "grow", "--repeats", "2"])
    assert caught.value.code == 1
    assert "more than is promised: tiny, empty slots" in " ".join(capsys.readouterr().out.split())


def test_training_seeds_are_held_to_their_promise_where_they_are_small_enough() -> None:
    def rows(training: float, blended: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"model": {TRAINING: {"median": training}, BLENDED: {"median": blended}}}

    assert over_limits(rows(1.24, 1.20)) == []
    assert over_limits(rows(1.30, 1.20)) == ["model, three training seeds: 1.300"]
    assert over_limits(rows(1.60, 1.50)) == [], "as layers of the model they cost nearly as much"
    assert over_limits(rows(1.70, 1.50)) == ["model, three training seeds: 1.700"]


def test_one_turn_has_no_quartiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "grow", "--repeats", "1"])
    assert "--repeats must be at least 2, got 1" in capsys.readouterr().err
