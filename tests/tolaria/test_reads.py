"""One read per step and device, whatever lives in the slots: counted on the CPU, and shown where nothing can be read.

Hosts on torch's "meta" device have shapes but no values: every way to look at one raises. A life on it, with all that a
step may do, is proof that nothing but the one read waits for a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import esper.kasmina.network as network_module
import esper.simic.training.env_factory as factory
from esper.leyline import ActionSpec, EpochReport, LifecycleOp, OptimSpec, SeedStage, TelemetryLevel, wait
from esper.simic.telemetry.telemetry_config import enabled
from esper.simic.training.native_executor import NativeExecutor
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from esper.tolaria import engine as engine_module
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import LossScaler, Placement
from tests.growing import ADAMW
from tests.tolaria.worlds import ALL_EVENTS, SGD, act, engine, tiny_task

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "equal", "__array__", "__bool__", "__float__", "__int__")
READS += ("__index__", "__contains__")
Engine = VectorizedEngine[ParallelEnvState]
BLENDS = ("linear_fast", "gated", "multiply")
SLOTS = ("r0c0", "r1c0", "r0c1")
HORIZON = 12
SHORT = tiny_task(horizon=HORIZON, batch_size=16, samples_per_epoch=32, val_samples=32, val_chunk_rows=32)


def choices(num_seeds: int, epoch: int, reports: Sequence[EpochReport]) -> list[ActionSpec]:
    """Plants up to `num_seeds` seeds, one a step, and takes each through all stages; the last is pruned."""
    return [_choice(num_seeds, epoch, report) for report in reports]


def _choice(num_seeds: int, epoch: int, report: EpochReport) -> ActionSpec:
    stages = {slot.slot_id: slot.stage for slot in report.slots}
    for position, slot_id in enumerate(SLOTS[:num_seeds]):
        if epoch == position:
            return act(report.env_id, "GERMINATE", slot_id, "cnn.conv", BLENDS[position])
        if epoch == HORIZON - 2 and position == num_seeds - 1 and stages[slot_id] is SeedStage.HOLDING:
            return act(report.env_id, "PRUNE", slot_id)
        if epoch >= num_seeds and stages[slot_id] is SeedStage.TRAINING:
            return act(report.env_id, "ADVANCE", slot_id)
        if epoch == HORIZON - 3 and position == 0 and stages[slot_id] is SeedStage.HOLDING:
            return act(report.env_id, "FOSSILIZE", slot_id)
    return wait(report.env_id)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """How often tensors were looked at. Probing a new seed does not count: it happens before the seed has a device."""
    found: Counter[str] = Counter()
    paused = []

    def counted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if not paused:
                found[name] += 1
            return read(*arguments, **options)

        return wrapped

    def aside(probe: Callable[..., None], *arguments: Any) -> None:
        paused.append(True)
        probe(*arguments)
        paused.clear()

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        patch.setattr(network_module, "_probe", partial(aside, network_module._probe))
        yield found


def native_engine() -> Engine:
    """Compiled code before torch."""
    worker = engine(SHORT)
    worker._ops = replace(worker._ops, executors=(NativeExecutor(), *worker._ops.executors))
    return worker


BACKENDS = {"torch": partial(engine, SHORT), "native": native_engine}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_envs", "num_seeds"), [(1, 0), (1, 1), (1, 2), (1, 3), (16, 0), (16, 1), (16, 2), (16, 3)]
)
def test_a_step_reads_once_whatever_lives_in_the_slots(num_envs: int, num_seeds: int, backend: str) -> None:
    """At another level of telemetry in each epoch, with a close look at every gradient at the highest."""
    worker, stages = BACKENDS[backend](), set()
    reports = list(worker.reset(episode_seeds(7, 3, num_envs)).reports.values())
    for epoch, level in zip(range(HORIZON), cycle(TelemetryLevel), strict=False):
        specs, detailed = choices(num_seeds, epoch, reports), level is max(TelemetryLevel)
        with counting() as found:
            result = worker.step(specs, enabled(level), frozenset(range(num_envs) if detailed else ()))
        if backend == "native":
            del found["numpy"]  # how compiled code gets at memory of the CPU: a view, for which nothing waits
        assert found == Counter(tolist=1), f"epoch {epoch}"
        reports = list(result.reports.values())
        assert all(bool(report.gradients) == detailed for report in reports)
        stages |= {slot.stage for report in reports for slot in report.slots}
    expected = {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED, SeedStage.EMBARGOED}
    assert num_seeds < 2 or stages >= expected, "all of a seed's life was looked at"
    assert (worker.envs[0].seat is not None) == (backend == "native"), "who ran it"


def test_the_counter_sees_a_read() -> None:
    with counting() as found:
        bool(torch.ones(()) > 0)
        float(torch.ones(()))
        torch.ones(2).tolist()
    assert found == Counter(__bool__=1, __float__=1, tolist=1)


# ---- where nothing can be read


META = torch.device("meta")


class Scaled(Placement):
    """Scales the loss as in FP16, in full precision."""

    def new_episode(self) -> None:
        self.scaler = LossScaler(self.device)


def unread(train_loss: float, envs: Sequence[ParallelEnvState]) -> list[list[float]]:
    return [[train_loss] + [0.25] * (len(env.numbers()) - 1) for env in envs]


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines on the meta device, whose one read finds a small number everywhere."""

    def build(optimizer: OptimSpec = ADAMW, placement: type[Placement] = Placement) -> Engine:
        monkeypatch.setattr(factory, "parse_devices", lambda names: (META,))
        monkeypatch.setattr(engine_module, "make_placement", lambda device, amp: placement(device))
        # These two kernels have no meta version. All that they are given are tensors of the device.
        monkeypatch.setattr(torch, "_fused_sgd_", lambda *lists, **options: None)
        monkeypatch.setattr(torch, "_amp_update_scale_", lambda *arguments: None)
        worker = engine(replace(SHORT, optimizer=optimizer))
        worker._read = partial(unread, 0.25)  # type: ignore[method-assign]
        return worker

    return build


@pytest.mark.parametrize(("optimizer", "placement"), [(ADAMW, Placement), (SGD, Scaled)], ids=["adamw", "scaled sgd"])
def test_a_whole_life_needs_no_other_read(
    unreadable: Callable[..., Engine], optimizer: OptimSpec, placement: type[Placement]
) -> None:
    worker = unreadable(optimizer, placement)
    reports = list(worker.reset(episode_seeds(7, 3, 1)).reports.values())
    ops: Counter[LifecycleOp] = Counter()
    for epoch in range(HORIZON):
        specs = choices(3, epoch, reports)
        result = worker.step(specs, ALL_EVENTS, frozenset({0}))
        reports = list(result.reports.values())
        ops.update(spec.op for spec in specs)
    assert set(ops) == set(LifecycleOp)
    assert reports[0].gradients
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        worker.envs[0].totals.tolist()


def test_a_rollback_needs_no_other_read(unreadable: Callable[..., Engine]) -> None:
    worker = unreadable()
    reports = list(worker.reset(episode_seeds(7, 3, 1)).reports.values())
    for epoch in range(6):
        reports = list(worker.step(choices(2, epoch, reports)).reports.values())
    worker._read = partial(unread, math.nan)  # type: ignore[method-assign]
    (report,) = worker.step([wait(0)]).reports.values()
    assert report.rollback_reason is not None
