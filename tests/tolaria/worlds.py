"""A small world for tests of the engine: digits in a few batches, a script of ops, and faults on demand.

Workers are built by name in other processes, so everything here is importable and plain.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esper.leyline import (
    DEFAULT_LIFECYCLE,
    ActionSpec,
    EpochReport,
    LifecycleOp,
    OptimSpec,
    StepResult,
    TelemetryEventType,
    record,
    wait,
)
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data
from esper.simic.training.env_factory import WorkerSpec, build_worker, make_worker_spec
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.engine import Batches, Beat, Executor, VectorizedEngine
from esper.tolaria.handles import InlineHandle, open_reply
from esper.tolaria.pool import EnginePool
from esper.tolaria.torch_executor import TorchExecutor
from esper.tolaria.worker import BuildWorker, Hello, Request, answer

ALL_EVENTS = frozenset(TelemetryEventType)
HORIZON = 8
NUM_ENVS = 4
SGD = OptimSpec(kind="sgd", lr=0.05, weight_decay=5e-4, momentum=0.9, schedule="cosine")
# Few batches train badly, so the gates that ask for quality are left open.
OPEN_GATES = replace(
    DEFAULT_LIFECYCLE, harm_tolerance=1e6, max_residual_ratio=1e6, min_live_fraction=0.0, min_contribution=-100.0
)


class PickledHandle(InlineHandle):
    """An inline worker whose messages go through pickle, as through the pipe of a process."""

    def __init__(self, worker_id: int, build: BuildWorker, spec: Any) -> None:
        super().__init__(worker_id, build, pickled(spec))

    def greet(self) -> Hello:
        return pickled(super().greet())

    def send(self, request: Request) -> None:
        super().send(pickled(request))

    def receive(self, request: Request) -> Any:
        assert self._request is not None
        return open_reply(self.worker_id, request, pickled(answer(self._worker, self._request)))


def pickled(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def tiny_task(name: str = "digits_blind", **changes: object) -> TaskSpec:
    """Two batches of training and two chunks of validation per epoch."""
    small = {"samples_per_epoch": 128, "batch_size": 64, "val_samples": 90, "val_chunk_rows": 64, "horizon": HORIZON}
    return replace(get_task_spec(name), lifecycle=OPEN_GATES, **{**small, **changes})  # type: ignore[arg-type]


def worker_spec(task: TaskSpec | None = None, scratch: Path | None = None, *, ends: bool = True) -> WorkerSpec:
    task = tiny_task() if task is None else task
    return make_worker_spec(task, load_task_data(task), scratch=scratch, rollback_ends_episode=ends)


def engine(task: TaskSpec | None = None, *, ends: bool = True) -> VectorizedEngine[ParallelEnvState]:
    return build_worker(worker_spec(task, ends=ends), lambda epoch, batch: None)


def torch_executor(worker: VectorizedEngine[ParallelEnvState]) -> TorchExecutor[ParallelEnvState]:
    """What runs the batches of a worker, for tests that reach into them."""
    executor = worker._ops.executors[-1]
    assert isinstance(executor, TorchExecutor)
    return executor


def around_training(
    worker: VectorizedEngine[ParallelEnvState],
    *,
    before: Callable[[ParallelEnvState], None] = lambda env: None,
    after: Callable[[ParallelEnvState], None] = lambda env: None,
) -> None:
    """Lets tests look at every env before and after its epoch of training, whatever runs it."""
    worker._ops = replace(worker._ops, executors=[_Around(it, before, after) for it in worker._ops.executors])


class _Around:
    def __init__(
        self,
        executor: Executor[ParallelEnvState],
        before: Callable[[ParallelEnvState], None],
        after: Callable[[ParallelEnvState], None],
    ) -> None:
        self._inner, self._before, self._after = executor, before, after
        self.supports, self.validate = executor.supports, executor.validate

    def train(self, envs: Sequence[ParallelEnvState], batches: Batches) -> None:
        for env in envs:
            self._before(env)
        self._inner.train(envs, batches)
        for env in envs:
            self._after(env)


def act(env_id: int, op: str, slot: str, blueprint: str | None = None, blend: str | None = None) -> ActionSpec:
    return ActionSpec(env_id=env_id, op=LifecycleOp[op], slot=slot, blueprint=blueprint, blend=blend)


SCRIPT: dict[tuple[int, int], ActionSpec] = {
    (0, 0): act(0, "GERMINATE", "r0c0", "cnn.conv", "linear_fast"),
    (0, 1): act(0, "ADVANCE", "r0c0"),
    (0, 4): act(0, "FOSSILIZE", "r0c0"),
    (0, 5): act(0, "GERMINATE", "r0c1", "cnn.conv", "gated"),
    (0, 6): act(0, "ADVANCE", "r0c1"),
    (1, 0): act(1, "GERMINATE", "r1c0", "cnn.conv", "multiply"),
    (1, 2): act(1, "PRUNE", "r1c0"),
    (1, 6): act(1, "GERMINATE", "r1c0", "cnn.conv", "sigmoid"),
    (2, 0): act(2, "GERMINATE", "r1c0", "cnn.conv", "linear_fast"),
    (2, 1): act(2, "ADVANCE", "r1c0"),
}
"""Growth, keeping, pruning and a second life. Env 3 is left alone."""


def specs_at(epoch: int, env_ids: Iterable[int] = range(NUM_ENVS)) -> list[ActionSpec]:
    return [SCRIPT.get((env_id, epoch), wait(env_id)) for env_id in env_ids]


def without_times(report: EpochReport) -> EpochReport:
    return replace(report, train_ms=0.0, val_ms=0.0)


def facts(result: StepResult) -> list[object]:
    """All of a result but the clock."""
    return [dict(sorted(result.outcomes.items())), [without_times(result.reports[i]) for i in sorted(result.reports)]]


Player = EnginePool | VectorizedEngine[ParallelEnvState]


def play(
    player: Player, epochs: Iterable[int] = range(HORIZON), before: Callable[[int], None] | None = None
) -> list[list[object]]:
    """The script's facts, step by step; starts the episode if epoch 0 is among them."""
    seen = []
    for epoch in epochs:
        if epoch == 0:
            seen.append(facts(player.reset(episode_seeds(7, 3, NUM_ENVS))))
        if before is not None:
            before(epoch)
        seen.append(facts(player.step(specs_at(epoch), ALL_EVENTS)))
    return seen


def digest(player: Player) -> dict[int, str]:
    """Weights, optimizer, lifecycle and books of every env."""
    return {
        env_id: hashlib.sha256(packed.meta_json.encode() + packed.tensors).hexdigest()
        for env_id, packed in sorted(player.snapshot().items())
    }


# ---- faults


@record
class Fault:
    """Something that happens to one env after the batches of one epoch. A file that exists afterwards makes it happen
    only once."""

    kind: str
    env_id: int
    epoch: int
    once: Path | None

    def due(self, env: ParallelEnvState) -> bool:
        if (env.env_id, env.epoch) != (self.env_id, self.epoch):
            return False
        if self.once is None:
            return True
        if self.once.exists():
            return False
        self.once.touch()
        return True


def spoil_weights(env: ParallelEnvState) -> None:
    with torch.no_grad():
        next(iter(env.model.host.parameters())).fill_(float("nan"))


def _die(env: ParallelEnvState) -> None:
    os.kill(os.getpid(), 9)


def _stop(env: ParallelEnvState) -> None:
    os.kill(os.getpid(), 19)


def _raise(env: ParallelEnvState) -> None:
    raise MemoryError("no more memory for this host")


def _sleep(env: ParallelEnvState) -> None:
    time.sleep(0.3)


FAULTS: Mapping[str, Callable[[ParallelEnvState], None]] = {
    "nan": spoil_weights,
    "die": _die,
    "stop": _stop,
    "raise": _raise,
    "sleep": _sleep,
}


@record
class FaultySpec:
    """A worker whose envs meet faults."""

    spec: WorkerSpec
    faults: tuple[Fault, ...]


def build_faulty(faulty: FaultySpec, beat: Beat) -> VectorizedEngine[ParallelEnvState]:
    worker = build_worker(faulty.spec, beat)

    def meet_faults(env: ParallelEnvState) -> None:
        for fault in faulty.faults:
            if fault.due(env):
                FAULTS[fault.kind](env)

    around_training(worker, after=meet_faults)
    return worker


NAN_IN_ENV_2 = Fault(kind="nan", env_id=2, epoch=3, once=None)


def faulty_spec(*faults: Fault, scratch: Path | None = None, task: TaskSpec | None = None) -> FaultySpec:
    return FaultySpec(spec=worker_spec(task, scratch), faults=faults)
