"""Both backends beside plain loops: the same work on all sides, and figures for every state of growth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backends import STATES, _check_same_work, backends_table, compare_backends
from benchmarks.engine_figures import bench_task
from benchmarks.rounds import difference, measure_rounds, summarise
from esper.runtime.tasks import load_task_data
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_factory import make_worker_spec


def test_every_state_is_measured_on_equal_work() -> None:
    """`compare_backends` stops if the losses of the three sides differ."""
    task = replace(bench_task("digits_mlp", 64, 2), val_samples=40)
    rows = compare_backends(make_worker_spec(task, load_task_data(task)), 1, 1)
    assert [row["state"] for row in rows] == list(STATES)
    assert all(row["gemm_limit_ms"]["median"] > 0 for row in rows)
    assert rows[0]["gemm_limit_ms"]["median"] < rows[1]["gemm_limit_ms"]["median"], "seeds are more products"
    assert backends_table(task.name, rows).row_count == len(STATES)
    with pytest.raises(RuntimeError, match=r"losses of plain and torch differ by 50.0%"):
        _check_same_work("empty", {"torch": [1.0], "native": [1.001], "plain": [1.5]})


def test_rounds_of_both_backends_are_timed_but_for_the_first() -> None:
    config = TrainingConfig(
        rounds=2, envs=2, episode_length=2, calibration_runs=0, worker_kind="inline", console="off", level="off"
    )
    said: list[str] = []
    run = measure_rounds(config, said.append)
    assert [text.split(":")[0] for text in said[:2]] == ["seed 0 round 1/2 torch", "seed 0 round 1/2 native"]
    assert len(said) == 4
    assert {name: len(values) for name, values in run["seconds"].items()} == {"torch": 1, "native": 1}
    figures = summarise(config, [run, run])
    assert figures["seeds"] == 2
    assert [len(curve) for curve in figures["accuracy_pct"]["native"]] == [2, 2]
    assert figures["native_minus_torch_pp"] is not None
    assert summarise(config, [run])["native_minus_torch_pp"] is None


def test_the_difference_of_backends_has_students_interval() -> None:
    found = difference([1.0, 2.0, 3.0])
    assert found == pytest.approx({"mean": 2.0, "low": 2.0 - 4.3027 / 3**0.5, "high": 2.0 + 4.3027 / 3**0.5}, abs=1e-3)
    assert difference([1.0]) is None
