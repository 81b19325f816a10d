"""Random lives of hosts with flat passes and with modules: the same to the bit, in all that is trained and measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper.leyline import ActionExecutionResult, ActionSpec, OptimSpec
from esper.simic.training import parallel_env_state
from esper.simic.training.env_factory import build_worker
from esper.simic.training.rollout import StepObserver, episode_seeds, run_episodes
from esper.tamiyo.controller import Setting
from esper.tamiyo.random_controllers import RandomController
from esper.tolaria.pool import EnginePool
from tests.growing import ADAMW
from tests.tolaria.worlds import SGD, digest, tiny_task, without_times, worker_spec

HORIZON = 16
ENVS = 2


class Diary(StepObserver):
    """Everything that was done and reported."""

    def __init__(self) -> None:
        self.pages: list[object] = []

    def executed(self, specs: list[ActionSpec], after: ActionExecutionResult) -> None:
        self.pages.append((specs, [without_times(report) for report in after.reports]))


def live(name: str, optimizer: OptimSpec, run_seed: int) -> tuple[list[object], dict[int, str]]:
    task = tiny_task(name, optimizer=optimizer, horizon=HORIZON, batch_size=16, samples_per_epoch=48, val_samples=32)
    diary = Diary()
    with EnginePool(build_worker, worker_spec(task, ends=False)) as pool:
        controller = RandomController(
            Setting(layout=pool.context.layout, lifecycle=pool.context.lifecycle, run_seed=run_seed)
        )
        run_episodes(pool, controller, episode_seeds(run_seed, 0, ENVS), HORIZON, [diary])
        return diary.pages, digest(pool)


@pytest.mark.parametrize(
    ("task", "optimizer", "run_seed"),
    [("digits_mlp", SGD, 0), ("digits_mlp", ADAMW, 1), ("digits_blind", ADAMW, 2), ("digits_conv", SGD, 3)],
    ids=["mlp", "mlp, adamw", "blind, adamw", "conv"],
)
def test_flat_passes_change_no_bit_of_a_life(
    task: str, optimizer: OptimSpec, run_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = live(task, replace(optimizer, lr=1e-2), run_seed)
    monkeypatch.setattr(parallel_env_state, "flat_stations", lambda model: None)
    assert live(task, replace(optimizer, lr=1e-2), run_seed) == flat
