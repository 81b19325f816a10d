"""The measurements behind `esper bench cluster`."""

from __future__ import annotations

import math
import pickle
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engine_figures import WaitOnly, bench_task
from benchmarks.plain_loops import BenchWorker, Usage
from esper.leyline import derive_seed, record
from esper.runtime.tasks import load_task_data
from esper.simic.training.action_execution import execute_actions, observe_reset
from esper.simic.training.backend import choose_backend
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_factory import WorkerSpec, make_worker_spec
from esper.simic.training.rollout import episode_seeds
from esper.simic.training.simulated import open_simulated
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria.engine import Beat
from esper.tolaria.handles import Handle, InlineHandle
from esper.tolaria.kinds import WORKER_KINDS, WorkerKind, register_worker_kind
from esper.tolaria.pool import EnginePool
from esper.tolaria.worker import Request

CALLS = 200
WARM_UP = 2
PAYLOAD = 50_000
"""Bytes of a large message: the reports of some thirty hosts."""
KIND = "sleeping"


class EchoWorker(BenchWorker):
    """Also returns what it is sent."""

    def echo(self, payload: bytes) -> bytes:
        return payload


def build_echo_worker(spec: WorkerSpec, beat: Beat) -> EchoWorker:
    """A worker whose messages can be measured."""
    return EchoWorker(spec, beat)


# ---- real workers


def measure_transports(
    task: str, envs: int, workers: int, steps: int, backend: str, address: str | None
) -> dict[str, Any]:
    """Start, calls and steps of processes and of a cluster; their steps are taken in turns."""
    chosen = bench_task(task, None, steps)
    data = load_task_data(chosen)
    backend = choose_backend(backend, chosen, data).name
    spec, pools, kinds = make_worker_spec(chosen, data, backend=backend), {}, {}
    try:
        for kind in ("process", "ray"):
            started = time.perf_counter()
            options = {"address": address} if kind == "ray" else {}
            pools[kind] = EnginePool(build_echo_worker, spec, kind=kind, workers=workers, options=options)
            kinds[kind] = {"start_s": time.perf_counter() - started}
        for kind, pool in pools.items():
            kinds[kind] |= _calls(pool)
        for kind, rows in _steps(pools, envs, steps).items():
            wall_s, _, work_s = (statistics.median(column) for column in zip(*rows, strict=True))
            kinds[kind] |= {
                "step_s": wall_s,
                "work_s": work_s,
                "transport_share": kinds[kind]["large_call_ms"] / 1e3 / work_s,
                "outside_share": statistics.median(1.0 - busiest / wall for wall, busiest, _ in rows),
            }
    finally:
        for pool in pools.values():
            pool.close()
    host_epoch_s = kinds["process"]["work_s"] / math.ceil(envs / workers)
    return {
        "task": task,
        "envs": envs,
        "workers": workers,
        "backend": backend,
        "host_epoch_s": host_epoch_s,
        "kinds": kinds,
    }


def _calls(pool: EnginePool) -> dict[str, float]:
    """Milliseconds of one call to one worker, small and large, and what of it is this process's own CPU time."""
    observe_reset(pool, episode_seeds(0, 0, 1))
    found = {}
    for name, payload in (("call", b""), ("large_call", bytes(PAYLOAD))):
        times, cpu = [], time.thread_time()
        for _ in range(CALLS):
            started = time.perf_counter()
            pool.ask_all("echo", payload)
            times.append(time.perf_counter() - started)
        found[f"{name}_ms"] = 1e3 * statistics.median(times)
        found[f"{name}_cpu_ms"] = 1e3 * (time.thread_time() - cpu) / CALLS
    return found


def _steps(pools: Mapping[str, EnginePool], envs: int, steps: int) -> dict[str, list[tuple[float, float, float]]]:
    """(wall, wall inside the slowest worker, most CPU of a worker) of every step, in seconds."""
    states = {kind: observe_reset(pool, episode_seeds(0, 1, envs)) for kind, pool in pools.items()}
    rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in pools}
    for step in range(steps + WARM_UP):
        for kind, pool in pools.items():
            before: tuple[Usage, ...] = pool.ask_all("usage")
            started = time.perf_counter()
            states[kind] = execute_actions(pool, WaitOnly().act(states[kind]))
            wall = time.perf_counter() - started
            after: tuple[Usage, ...] = pool.ask_all("usage")
            work = max(new.cpu_s - old.cpu_s for new, old in zip(after, before, strict=True))
            if step >= WARM_UP:
                rows[kind].append((wall, max(usage.step_s for usage in after), work))
    return rows


# ---- simulated clusters


class Clock:
    """CPU seconds of this thread, plus sleep that is counted and not waited for, minus what does not count."""

    def __init__(self) -> None:
        self._offset = 0.0
        self.slept_s = 0.0

    def now(self) -> float:
        return time.thread_time() + self._offset

    def sleep_until(self, moment: float) -> None:
        self.slept_s += max(0.0, moment - self.now())
        self._offset += max(0.0, moment - self.now())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens in the block would happen on other machines."""
        started = time.thread_time()
        yield
        self._offset -= time.thread_time() - started


@record
class Costs:
    """Seconds."""

    parent_s: float
    """CPU of the parent per call."""
    latency_s: float
    """Of a call, beyond that."""
    host_epoch_s: float
    spread: float


class SleepingHandle(InlineHandle):
    """A simulated worker that answers as late as a real one on another machine would."""

    def __init__(self, inner: InlineHandle, clock: Clock, costs: Costs) -> None:
        super().__init__(inner.worker_id, inner._build, inner._spec)
        self._clock, self._costs = clock, costs
        self._ready_s = 0.0
        self.busy_s = self.last_s = 0.0

    def send(self, request: Request) -> None:
        packed = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        self._clock.sleep_until(self._clock.now() + self._costs.parent_s)
        with self._clock.stopped():
            super().send(pickle.loads(packed))
            self._answer = pickle.dumps(super().receive(request), protocol=pickle.HIGHEST_PROTOCOL)
        work_s = self._costs.host_epoch_s * len(request.arguments[0]) * self._luck(request.request_id)
        self.busy_s += work_s
        self._ready_s = self._clock.now() + self._costs.latency_s + work_s

    def receive(self, request: Request) -> Any:
        self._clock.sleep_until(self._ready_s)
        self.last_s = self._clock.now()
        return pickle.loads(self._answer)

    def _luck(self, request_id: int) -> float:
        """How much longer or shorter than usual it takes this worker this time; 1 on average."""
        rng = random.Random(derive_seed(0, self.worker_id, request_id, None, "straggler"))
        return math.exp(rng.gauss(0.0, self._costs.spread) - self._costs.spread**2 / 2)


def rehearse(figures: Mapping[str, Any], workers: int, hosts: int, epochs: int, spread: float) -> dict[str, float]:
    """One round of training on so many workers, with the messages of the measured cluster."""
    ray = figures["kinds"]["ray"]
    parent_s = ray["call_cpu_ms"] / 1e3
    costs = Costs(
        parent_s=parent_s,
        latency_s=max(0.0, ray["call_ms"] / 1e3 - parent_s),
        host_epoch_s=figures["host_epoch_s"],
        spread=spread,
    )
    clock, handles = Clock(), list[SleepingHandle]()

    @contextmanager
    def open_sleeping(build: Any, spec: Any, count: int | None) -> Iterator[Sequence[Handle]]:
        with open_simulated(build, spec, count) as inner:
            handles.extend(SleepingHandle(one, clock, costs) for one in inner if isinstance(one, InlineHandle))
            yield handles

    WORKER_KINDS.pop(KIND, None)
    register_worker_kind(WorkerKind(name=KIND, description="for this benchmark", open=open_sleeping))
    config = TrainingConfig(
        task=figures["task"], rounds=1, envs=hosts, episode_length=epochs, calibration_runs=0, worker_kind=KIND,
        workers=workers, backend="torch",
    )  # fmt: skip
    started = clock.now()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some workers have one host more
        train_ppo_vectorized(config)
    round_s, update_s = clock.now() - started, clock.now() - max(handle.last_s for handle in handles)
    busy_s = sum(handle.busy_s for handle in handles)
    messages_s = workers * (epochs + 1) * costs.parent_s
    return {
        "workers": workers,
        "hosts": hosts,
        "epochs": epochs,
        "spread": spread,
        "round_s": round_s,
        "host_epochs_per_s": hosts * epochs / round_s,
        "idle_share": 1.0 - busy_s / (workers * round_s),
        "update_share": update_s / round_s,
        "messages_share": messages_s / round_s,
        "parent_share": 1.0 - clock.slept_s / round_s + messages_s / round_s,
    }


# ---- display


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """Both tables."""
    table = Table(
        title=f"{figures['task']}, {figures['backend']}: {figures['envs']} hosts on {figures['workers']} workers",
        title_justify="left",
    )
    for name in (
        "kind",
        "start s",
        "call ms",
        f"with {PAYLOAD // 1000} kB",
        "step ms",
        "its CPU ms",
        "call / step",
        "outside",
    ):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, found in figures["kinds"].items():
        table.add_row(
            kind,
            f"{found['start_s']:.1f}",
            f"{found['call_ms']:.2f}",
            f"{found['large_call_ms']:.2f}",
            f"{1e3 * found['step_s']:.3g}",
            f"{1e3 * found['work_s']:.3g}",
            f"{found['transport_share']:.2%}",
            f"{found['outside_share']:.1%}",
        )
    console.print(table)
    if not figures["rehearsals"]:
        return
    first = figures["rehearsals"][0]
    table = Table(
        title=f"Rehearsed: rounds of {first['hosts']:,} hosts x {first['epochs']} epochs, {first['spread']:g} spread, "
        f"{1e3 * figures['host_epoch_s']:.3g} ms per host epoch",
        title_justify="left",
    )
    for name in ("workers", "round s", "host epochs/s", "speed-up", "idle", "parent", "of it update"):
        table.add_column(name, justify="right")
    for row in figures["rehearsals"]:
        table.add_row(
            f"{row['workers']:,}",
            f"{row['round_s']:.1f}",
            f"{row['host_epochs_per_s']:,.0f}",
            f"{first['round_s'] / row['round_s'] * first['workers']:.1f}",
            f"{row['idle_share']:.0%}",
            f"{row['parent_share']:.0%}",
            f"{row['update_share']:.0%}",
        )
    console.print(table)
