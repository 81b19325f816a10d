"""A run whose workers are not all of one kind of machine goes on, says so, and is marked for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from esper.simic.run.checkpoint import newest_valid
from esper.simic.run.session import RunStart, start_again, start_new
from esper.simic.training.vectorized import open_session
from esper.tolaria import worker
from esper.tolaria.runtime import machine_facts
from tests.simic.training.runs import TINY


def trained(start: RunStart) -> bool:
    """Trains, and returns what the newest checkpoint says of its bits."""
    with open_session(start) as session:
        session.run()
    assert start.run is not None
    checkpoint, _, _ = newest_valid(start.run, lambda found: None)
    return checkpoint.facts.bitwise


def test_a_mixed_cluster_is_reported_and_marks_the_run_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = start_new(replace(TINY, rounds=1, checkpoint_s=0.0, console="off"), tmp_path, "run")
    with monkeypatch.context() as patch:
        there = {key: value for key, value in machine_facts().items() if key != "esper"}
        patch.setattr(worker, "machine_facts", lambda: there | {"cpu_capability": "ABACUS"})
        assert not trained(start)
    here = machine_facts()
    odd = f"esper unknown, here {here['esper']}; cpu_capability ABACUS, here {here['cpu_capability']}"
    assert f"machines of another kind ({odd})" in capsys.readouterr().err
    assert not trained(start_again(start.path, {"rounds": 2})), "what was learned there is still in the weights"
    assert capsys.readouterr().err == ""


def test_equal_machines_are_not_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(start_new(replace(TINY, rounds=1, checkpoint_s=0.0, console="off"), tmp_path, "run"))
    assert "machines" not in capsys.readouterr().err
