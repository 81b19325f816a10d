"""The engine on a real GPU: streams, mixed precision, one read per step. Skipped, visibly, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.leyline import wait
from esper.runtime.tasks import load_task_data
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.engine import VectorizedEngine
from tests.tolaria import worlds
from tests.tolaria.worlds import HORIZON, NUM_ENVS, tiny_task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def gpu_engine(amp: str = "off") -> VectorizedEngine[ParallelEnvState]:
    task = tiny_task()
    return build_worker(make_worker_spec(task, load_task_data(task), devices="cuda:0", amp=amp), lambda e, b: None)


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_a_round_with_growth_runs_and_learns(amp: str) -> None:
    worker = gpu_engine(amp)
    start = worker.reset(episode_seeds(7, 3, NUM_ENVS))
    for epoch in range(HORIZON):
        result = worker.step(worlds.specs_at(epoch))
    assert result.reports[3].val_loss < start.reports[3].val_loss
    assert all(report.rollback_reason is None for report in result.reports.values())
    streams = {env.placement.stream for env in worker.envs.values()}
    assert len(streams) == NUM_ENVS


def test_full_precision_stays_close_to_the_cpu() -> None:
    cpu, gpu = worlds.engine(), gpu_engine()
    seeds = episode_seeds(7, 3, 1)
    assert gpu.reset(seeds).reports[0].val_loss == pytest.approx(cpu.reset(seeds).reports[0].val_loss, rel=1e-4)
    expected, seen = cpu.step([wait(0)]).reports[0], gpu.step([wait(0)]).reports[0]
    assert seen.val_loss == pytest.approx(expected.val_loss, rel=1e-2)


def test_a_snapshot_continues_on_the_gpu() -> None:
    worker = gpu_engine()
    worker.reset(episode_seeds(7, 3, 2))
    worker.step(worlds.specs_at(0, range(2)))
    other = gpu_engine()
    other.restore(worker.snapshot())
    expected = worker.step(worlds.specs_at(1, range(2)))
    assert other.step(worlds.specs_at(1, range(2))).reports[0].val_loss == pytest.approx(
        expected.reports[0].val_loss, rel=1e-3
    )


@pytest.mark.parametrize("num_envs", [1, 8])
def test_all_envs_share_one_read(num_envs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, ...]] = []
    original = Tensor.tolist

    def counting(tensor: Tensor) -> object:
        reads.append(tuple(tensor.shape))
        return original(tensor)  # type: ignore[no-untyped-call]

    worker = gpu_engine()
    worker.reset(episode_seeds(7, 3, num_envs))
    monkeypatch.setattr(Tensor, "tolist", counting)
    for epoch in range(2):
        reads.clear()
        worker.step(worlds.specs_at(epoch, range(num_envs)))
        assert len(reads) == 1
