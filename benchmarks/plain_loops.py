"""The other side of the engine's benchmark: the same hosts trained by plain PyTorch loops, in the same processes.

A plain loop has no slots, no governor and no controller: batch, forward, loss, backward, clip, step, and one
validation per epoch. It sees the same batches from the same initial weights, so it must reach the same losses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina import MorphogeneticModel, build_host
from esper.kasmina.flat import flat_stations
from esper.kasmina.layers import generator_for
from esper.leyline import (
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    FeatureContext,
    StepResult,
    TelemetryEventType,
    derive_seed,
    lr_factor,
    record,
)
from esper.runtime.tasks import TaskSpec
from esper.simic.training import parallel_env_state
from esper.simic.training.batch_ops import process_val_batch
from esper.simic.training.counterfactual_eval import process_fused_val_batch
from esper.simic.training.env_factory import WorkerSpec, build_worker, make_batches
from esper.simic.training.epoch_metrics import plan_coalitions
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.engine import Beat


class PlainLoop:
    """One host, or another network, and the loop a person would write for it."""

    def __init__(
        self,
        task: TaskSpec,
        seed: EpisodeSeed,
        train: SharedBatchIterator,
        val: SharedBatchIterator,
        network: nn.Sequential | None = None,
    ) -> None:
        if network is None:
            rng_seed = derive_seed(seed.run_seed, seed.env_id, seed.episode, None, "init")
            network = nn.Sequential(*build_host(task.host, generator_for(rng_seed)).segments)
        self.model = network
        if task.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.params = list(self.model.parameters())
        spec = task.optimizer
        self.optimizer: torch.optim.Optimizer
        if spec.kind == "adamw":
            self.optimizer = torch.optim.AdamW(self.params, spec.lr, weight_decay=spec.weight_decay, fused=True)
        else:
            self.optimizer = torch.optim.SGD(
                self.params, spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, fused=True
            )
        self.task = task
        self.seed = seed
        self.train = train.keyed(seed.run_seed)
        self.val = val

    def epoch(self, epoch: int) -> tuple[float, float]:
        """One epoch and its validation: (validation loss, validation accuracy in percent)."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.optimizer.lr * lr_factor(self.task.optimizer.schedule, epoch, self.task.horizon)
        self.model.train()
        total, correct, rows = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
        for batch in self.train.epoch(self.seed.episode, epoch):
            self.optimizer.zero_grad()
            logits = self.model(batch.inputs)
            if logits.dim() > 2:
                logits = logits.flatten(0, -2)
            targets = batch.targets.flatten()
            loss = F.cross_entropy(logits, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.params, self.task.lifecycle.clip_norm)
            self.optimizer.step()
            total.add_(loss.detach(), alpha=len(targets))
            correct.add_((logits.detach().argmax(-1) == targets).sum())
            rows += len(targets)
        self.train_loss, self.train_accuracy = float(total) / rows, float(correct) / rows
        return self.validate()

    def validate(self) -> tuple[float, float]:
        """One pass over the validation rows."""
        self.model.eval()
        total, correct, rows = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
        with torch.inference_mode():
            for batch in self.val.in_order():
                logits = self.model(batch.inputs)
                if logits.dim() > 2:
                    logits = logits.flatten(0, -2)
                targets = batch.targets.flatten()
                total.add_(F.cross_entropy(logits, targets, reduction="sum"))
                correct.add_((logits.argmax(-1) == targets).sum())
                rows += len(targets)
        return float(total) / rows, 100.0 * float(correct) / rows


@record
class Usage:
    """What a process has used."""

    cpu_s: float
    step_s: float
    """Wall time inside the last step or epoch of this worker."""
    pss_bytes: int | None
    """Memory, shared pages counted by share; None where the system does not tell."""


class BenchWorker:
    """An engine and plain loops side by side in one worker."""

    def __init__(self, spec: WorkerSpec, beat: Beat) -> None:
        self.engine = build_worker(spec, beat)
        self.protocol_version = self.engine.protocol_version
        self.contexts = self.engine.contexts
        self._task = spec.only.task
        self._batches = make_batches(self._task, spec.only.open(), spec.batches)
        self._loops: dict[int, PlainLoop] = {}
        self._step_s = 0.0

    def reset(self, seeds: Sequence[EpisodeSeed]) -> StepResult:
        """Starts the engine's envs and a plain loop for each."""
        self._loops = {seed.env_id: PlainLoop(self._task, seed, *self._batches) for seed in seeds}
        return self.engine.reset(seeds)

    def step(
        self,
        specs: Sequence[ActionSpec],
        wanted: frozenset[TelemetryEventType],
        gradient_detail_envs: frozenset[int] = frozenset(),
    ) -> StepResult:
        """A step of the engine."""
        started = time.perf_counter()
        result = self.engine.step(specs, wanted, gradient_detail_envs)
        self._step_s = time.perf_counter() - started
        return result

    def snapshot(self) -> Mapping[int, EnvSnapshot]:
        """Of the engine's envs."""
        return self.engine.snapshot()

    def restore(self, snapshots: Mapping[int, EnvSnapshot]) -> Mapping[int, FeatureContext]:
        """Of the engine's envs."""
        return self.engine.restore(snapshots)

    def plain_epoch(self, epoch: int) -> dict[int, tuple[float, float]]:
        """One epoch of every plain loop, one loop after the other."""
        started = time.perf_counter()
        results = {env_id: loop.epoch(epoch) for env_id, loop in self._loops.items()}
        self._step_s = time.perf_counter() - started
        return results

    def usage(self) -> Usage:
        """What this process has used so far."""
        return Usage(cpu_s=time.process_time(), step_s=self._step_s, pss_bytes=read_pss(os.getpid()))

    def pass_through(self, modules: bool) -> None:
        """Whether hosts are run through their modules from now on, or by flat lists of calls as usual."""
        setattr(parallel_env_state, "flat_stations", MorphogeneticModel.stations if modules else flat_stations)  # noqa: B010

    def validation_times(self, repeats: int) -> list[tuple[float, float, float]]:
        """CPU seconds of (one plain pass, the engine's single pass, the whole coalition table), alternating."""
        env = next(iter(self.engine.envs.values()))
        plain = self._loops[env.env_id]
        env.plan = plan_coalitions(env.model)
        env.begin_validation()
        times = []
        for _ in range(repeats):
            row = []
            for work in (None, process_val_batch, process_fused_val_batch):
                env.zero_accumulators()
                started = time.process_time()
                if work is None:
                    plain.validate()
                else:
                    for batch in plain.val.in_order():
                        work(env, batch)
                    env.totals.tolist()
                row.append(time.process_time() - started)
            times.append((row[0], row[1], row[2]))
        return times


def build_bench_worker(spec: WorkerSpec, beat: Beat) -> BenchWorker:
    """Builds both sides of the benchmark in a worker."""
    return BenchWorker(spec, beat)


def read_pss(pid: int) -> int | None:
    """Proportional memory of a process in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
