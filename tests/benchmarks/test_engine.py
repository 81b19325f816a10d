"""The benchmark measures what it says: both sides do the same work, and disturbed steps do not count."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.engine_figures import Phase, _check_same_work, _undisturbed, bench_task, compare, grow, show
from benchmarks.plain_loops import build_bench_worker
from esper.runtime.tasks import get_task_spec, load_task_data
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.env_factory import make_worker_spec
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.pool import EnginePool
from tests.tolaria.worlds import wait


def small_pool(name: str) -> EnginePool:
    task = replace(bench_task(name, 128, 4), val_samples=90, val_chunk_rows=64)
    return EnginePool(build_bench_worker, make_worker_spec(task, load_task_data(task)))


@pytest.mark.parametrize("name", ["digits_mlp", "digits_conv", "digits_blind"])
def test_plain_loops_and_the_waiting_engine_reach_the_same_losses(name: str) -> None:
    """`compare` checks it in every step; one changed number is enough to make it fail."""
    pool = small_pool(name)
    figures = compare(pool, 2, 3)
    assert figures["steps_quiet"] + figures["steps_disturbed"] == 3
    assert figures["throughput_cpu"]["median"] > 0
    state = observe_reset(pool, episode_seeds(0, 1, 1))
    plain = pool.ask_all("plain_epoch", 0)
    state = execute_actions(pool, [wait(0)])
    _check_same_work(plain, state)
    loss, accuracy = plain[0][0]
    with pytest.raises(RuntimeError, match="do not do the same work"):
        _check_same_work([{0: (loss * 1.001, accuracy)}], state)


def test_growth_reaches_three_live_seeds_and_their_coalitions() -> None:
    rows = grow(small_pool("digits_mlp"), 1, 2)
    assert [row["live_seeds"] for row in rows] == [0, 1, 2, 3]
    assert [row["coalitions"] for row in rows] == [1, 2, 4, 8]
    assert rows[-1]["params_ratio"] > 1


def phase(foreign: float | None) -> Phase:
    return Phase(wall_s=1.0, cpu_s=1.0, parent_s=0.1, busiest_s=0.9, foreign_share=foreign)


def test_disturbed_steps_are_left_out_unless_nothing_else_is_there() -> None:
    quiet, loud = (phase(0.01), phase(None)), (phase(0.01), phase(0.5))
    used, counts = _undisturbed([quiet] * 3 + [loud] * 2)
    assert used == [quiet] * 3
    assert counts == {"steps_quiet": 3, "steps_disturbed": 2, "disturbed": False}
    used, counts = _undisturbed([quiet] + [loud] * 4)
    assert len(used) == 5
    assert counts["disturbed"]


def test_the_host_of_digits_mlp_has_room_for_three_seeds() -> None:
    assert len(bench_task("digits_mlp", None, 4).slots) == 3
    assert bench_task("digits_conv", None, 4).host == get_task_spec("digits_conv").host


def test_the_table_shows_every_figure() -> None:
    spread = {"median": 1.0, "low": 0.9, "high": 1.1}
    both = dict.fromkeys(
        (
            *("plain_host_epochs_per_s", "engine_host_epochs_per_s", "throughput_wall", "throughput_cpu"),
            *("parent_ms_per_env_step", "waiting_share"),
        ),
        spread,
    )
    counts = {"steps_quiet": 1, "steps_disturbed": 4, "disturbed": True}
    row = {"live_seeds": 3, "coalitions": 8, "step_over_plain_host_cpu": spread, "passes_over_own_pass": spread}
    row["modules_over_flat_cpu"] = spread
    figures = {
        "task": "digits_conv",
        "envs": 8,
        "workers": 2,
        "side_by_side": {**both, **counts},
        "growth": [row],
        "throughput_by_envs": {"8": spread},
        "slot_cost": {"slots": 3, "step_over_one_slot_cpu": spread, **counts},
        "scaling": {
            **dict.fromkeys(("speed_up", "plain_speed_up", "cpu_all_over_one", "waiting_share"), spread),
            **counts,
            "steps_disturbed": 0,
        },
        "memory": {"pss_per_worker_bytes": 2.5e8, "pss_per_env_bytes": 3e5},
    }
    text = io.StringIO()
    show(Console(file=text, width=120), figures)
    assert "8 coalitions / one pass of the same net" in text.getvalue()
    assert "4 steps were disturbed by other processes: nearly all" in text.getvalue()
    assert "250 MB per worker, 0.30 MB per host" in text.getvalue()
    assert "plain loops in the same processes" in text.getvalue()
