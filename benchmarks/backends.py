"""Both backends of the engine and plain PyTorch, in one process and in turns: CPU time of the same host epochs.

Plain loops train the same networks wired by hand. They know no seeds in training and no coalitions, which cost the
engine time on both backends, so the comparison favours them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.engine_figures import spread
from benchmarks.plain_loops import PlainLoop
from esper.kasmina import export_module
from esper.leyline import Cause, EpisodeSeed, SeedStage, wait
from esper.simic.training.env_factory import WorkerSpec, build_worker, make_batches
from esper.simic.training.epoch_metrics import plan_coalitions
from esper.simic.training.native_executor import NativeExecutor
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executor import ops as o
from esper.tolaria.runtime import one_thread

STATES = ("empty", "three kept seeds", "mix of stages")
LIFE = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)
WARM_UP = 1
GEMM_SIZE = 512
CLOSE = 0.02
"""Largest relative difference of losses after the first epoch; later ones grow apart by rounding."""

Engine = VectorizedEngine[ParallelEnvState]


def compare_backends(spec: WorkerSpec, envs: int, steps: int) -> list[dict[str, Any]]:
    """One row per state of growth."""
    return [_compare(spec, state, envs, steps) for state in STATES]


def _compare(spec: WorkerSpec, state: str, envs: int, steps: int) -> dict[str, Any]:
    seeds = episode_seeds(0, STATES.index(state), envs)
    engines = {name: _grown_engine(replace(spec, backend=name), state, seeds) for name in ("torch", "native")}
    task = spec.only.task
    rows = make_batches(task, spec.only.open())
    plain = [PlainLoop(task, seed, *rows, network) for seed, network in zip(seeds, _wired(engines), strict=True)]
    sides: dict[str, Callable[[int], list[float]]] = {
        "plain": lambda epoch: [loop.epoch(epoch)[0] for loop in plain],
        "torch": lambda epoch: _losses(engines["torch"]),
        "native": lambda epoch: _losses(engines["native"]),
        "gemm": lambda epoch: [_gemm_seconds()],
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    limits = []
    with one_thread():
        for epoch in range(steps + WARM_UP):
            found = {}
            for name in sides if epoch % 2 else reversed(sides):
                started = time.process_time()
                found[name] = sides[name](epoch)
                seconds[name].append(time.process_time() - started)
            limits.append(found["gemm"][0] * _multiply_adds(engines["native"]))
            if epoch == 0:
                _check_same_work(state, found)
    return _row(state, envs, {name: values[WARM_UP:] for name, values in seconds.items()}, limits[WARM_UP:])


def _row(state: str, envs: int, seconds: dict[str, list[float]], limits: list[float]) -> dict[str, Any]:
    def over(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
        return spread([a / b for a, b in zip(numerators, denominators, strict=True)])

    native = seconds["native"]
    return {
        "state": state,
        **{f"{side}_ms": spread([1e3 * s / envs for s in seconds[side]]) for side in ("plain", "torch", "native")},
        "gemm_limit_ms": spread([1e3 * s / envs for s in limits]),
        "plain_over_native": over(seconds["plain"], native),
        "torch_over_native": over(seconds["torch"], native),
        "native_over_gemm_limit": over(native, limits),
    }


def _check_same_work(state: str, losses: dict[str, list[float]]) -> None:
    """All sides reach about the same losses in the first epoch, or the comparison means nothing."""
    sides = ("torch", "native") if state == "mix of stages" else ("torch", "native", "plain")
    for side in sides[1:]:
        far = np.abs(np.array(losses[side]) / np.array(losses["torch"]) - 1.0).max()
        if not far <= CLOSE:
            raise RuntimeError(f"{state}: losses of {side} and torch differ by {far:.1%}; they do not do the same work")


# ---- networks in a state of growth


def _grown_engine(spec: WorkerSpec, state: str, seeds: Sequence[EpisodeSeed]) -> Engine:
    engine = build_worker(spec, lambda epoch, batch: None)
    engine.reset(seeds)
    for env in engine.envs.values():
        draw = random.Random(env.env_id)
        kept = state == "three kept seeds"
        places = () if state == "empty" else env.model.all_slots()[: 3 if kept else None]
        for slot in places:
            stage = SeedStage.FOSSILIZED if kept else draw.choice((None, *LIFE))
            fitting = [
                key for key in spec.only.task.blueprint_keys if env.model.layout.card(slot.spec.slot_id, key).fits
            ]
            if stage is not None:
                _plant(env, slot.spec.slot_id, draw.choice(fitting), stage)
        env.plan = plan_coalitions(env.model)
    return engine


def _plant(env: ParallelEnvState, slot_id: str, blueprint: str, stage: SeedStage) -> None:
    """A seed on its way through life, the same in both engines."""
    env.model.germinate(slot_id, blueprint, "linear_fast", env.env_id)
    slot = env.model.slot(slot_id)
    for target in LIFE[: LIFE.index(stage) + 1]:
        slot.transition(target, Cause.AUTO)
        while target is SeedStage.HOLDING and not slot.ramp_complete:
            slot.ramp()


def _wired(engines: dict[str, Engine]) -> list[torch.nn.Sequential]:
    return [export_module(env.model, include_live=True) for env in engines["torch"].envs.values()]


def _losses(engine: Engine) -> list[float]:
    reports = engine.step([wait(env_id) for env_id in engine.envs]).reports
    return [report.val_loss for report in reports.values()]


# ---- the limit


def _multiply_adds(engine: Engine) -> int:
    """Of all matrix products in one step of all envs: forward, gradients, and validation of all coalitions."""
    executor = next(found for found in engine._ops.executors if isinstance(found, NativeExecutor))
    total = 0
    for env in engine.envs.values():
        train, val = executor.programs(env)
        total += env.train_rows * _per_row(train.op_list, training=True)
        total += env.val_rows * _per_row(val.op_list, training=False)
    return total


def _per_row(op_list: NDArray[np.int64], *, training: bool) -> int:
    convs = op_list[op_list[:, o.KIND] == o.CONV]
    macs = (
        convs[:, o.OUT] * convs[:, o.HO] * convs[:, o.WO] * (convs[:, o.IN] // convs[:, o.GROUPS]) * convs[:, o.K] ** 2
    )
    passes = 1 + convs[:, o.BACK] + convs[:, o.NEED_X] if training else np.ones_like(macs)
    return int((macs * passes).sum())


def _gemm_seconds() -> float:
    """Seconds per multiply-add in a large product of float32 matrices."""
    a = torch.ones(GEMM_SIZE, GEMM_SIZE)
    best = min(_timed(a) for _ in range(5))
    return best / GEMM_SIZE**3


def _timed(a: torch.Tensor) -> float:
    started = time.process_time()
    torch.mm(a, a)
    return time.process_time() - started


# ---- display


def backends_table(task: str, rows: Sequence[dict[str, Any]]) -> Table:
    """CPU milliseconds per host epoch, and how much less native needs."""
    table = Table(title=f"{task}: CPU ms per host epoch with validation, by backend", title_justify="left")
    for column in (
        "seeds",
        "plain loop",
        "torch",
        "native",
        "plain / native",
        "torch / native",
        "limit",
        "native / limit",
    ):
        table.add_column(column, justify="left" if column == "seeds" else "right")
    for row in rows:
        keys = ("plain_ms", "torch_ms", "native_ms", "plain_over_native", "torch_over_native", "gemm_limit_ms")
        cells = [f"{row[key]['median']:.3g}" for key in (*keys, "native_over_gemm_limit")]
        gain = row["plain_over_native"]
        cells[3] += f" ({gain['low']:.3g}-{gain['high']:.3g})"
        table.add_row(row["state"], *cells)
    table.caption = "limit: the matrix products of the native programs at the speed of one of 512 x 512 x 512"
    return table
