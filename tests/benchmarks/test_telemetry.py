"""What the log costs: measured in a real run, compared with its budget, told by the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import telemetry
from benchmarks.telemetry import BYTES_PER_STEP, SHARE, measure, over_budget
from esper.scripts.cli import main
from tests.simic.training.runs import TINY

WITHIN = {
    "env_steps": 32,
    "events_per_step": 3.0,
    "bytes_per_step": 2000.0,
    "step_us": 20_000.0,
    "training_thread_us": 60.0,
    "writer_thread_us": 60.0,
    "share": 0.006,
}


def test_a_real_run_is_measured() -> None:
    found = measure(TINY, "normal")
    assert found["env_steps"] == TINY.rounds * TINY.envs * TINY.episode_length  # type: ignore[operator]
    assert found["events_per_step"] > 2.0
    assert found["bytes_per_step"] > 500.0
    assert 0.0 < found["training_thread_us"] < found["step_us"]
    assert found["share"] == pytest.approx((found["training_thread_us"] + found["writer_thread_us"]) / found["step_us"])


def test_minimal_writes_less_than_normal() -> None:
    assert measure(TINY, "minimal")["bytes_per_step"] < measure(TINY, "normal")["bytes_per_step"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"share": SHARE, "bytes_per_step": BYTES_PER_STEP["normal"]}, None),
        ({"share": 0.0101}, "1.01% of a step's time, at most 1%"),
        ({"bytes_per_step": 2501.0}, "2,501 bytes per step, at most 2,500"),
    ],
)
def test_the_exit_code_tells_what_is_over_budget(
    change: dict[str, Any],
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(telemetry, "measure", lambda config, level: {**WITHIN, **change})
    assert bool(over_budget({**WITHIN, **change})) == (words is not None)
    command = ["bench", "telemetry", "--out", str(tmp_path / "figures.json")]
    if words is None:
        main(command)
    else:
        with pytest.raises(SystemExit) as stopped:
            main(command)
        assert stopped.value.code == 1
        assert words in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "figures.json").read_text())["normal"]["share"] == {**WITHIN, **change}["share"]
