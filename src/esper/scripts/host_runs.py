"""Hosts of a task under a controller, from the first epoch to the last, for the commands that show what came of it.

Two controllers run on the same seeds see the same initial weights and the same batches, so only their ops make a
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from esper.kasmina import MorphogeneticModel, export_module
from esper.leyline import (
    ActionExecutionResult,
    ActionSpec,
    EpisodeSeed,
    EpochReport,
    HostLayout,
    PolicyProtocol,
    TelemetryEvent,
    TelemetryEventType,
)
from esper.runtime.datasets import Dataset, Split
from esper.runtime.tasks import TaskSpec
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.parallel_env_state import model_of
from esper.simic.training.rollout import run_episodes
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.pool import EnginePool

LIFE_EVENTS = frozenset(
    {
        TelemetryEventType.SEED_GERMINATED,
        TelemetryEventType.SEED_STAGE_CHANGED,
        TelemetryEventType.SEED_FOSSILIZED,
        TelemetryEventType.SEED_PRUNED,
    }
)
OnEpoch = Callable[[ActionExecutionResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """One host after its last epoch."""

    run_seed: int
    model: MorphogeneticModel
    reports: tuple[EpochReport, ...]
    """One per epoch."""

    @property
    def events(self) -> tuple[TelemetryEvent, ...]:
        """What happened to its seeds, in order."""
        return tuple(event for report in self.reports for event in report.events)


def run_hosts(
    task: TaskSpec,
    data: Dataset,
    make_controller: Callable[[HostLayout], PolicyProtocol],
    run_seeds: Sequence[int],
    *,
    workers: int = 1,
    on_epoch: OnEpoch = lambda state: None,
) -> tuple[HostRun, ...]:
    """Trains one host per run seed for the task's epochs, side by side, under one controller.

    Args:
        task: Host, optimizer, limits.
        data: Train and val are read; test is not.
        make_controller: Makes the controller once the slots are known.
        run_seeds: Host i is env i on seed i: the order matters for pairing.
        workers: Processes; 1 runs all in this one. Results are the same bits.
        on_epoch: Called after each epoch.
    """
    kind = "process" if workers > 1 else "inline"
    seeds = [EpisodeSeed(env_id=env, episode=0, run_seed=seed) for env, seed in enumerate(run_seeds)]
    with TemporaryDirectory(prefix="esper-") as scratch:
        spec = make_worker_spec(task, data, scratch=Path(scratch), rollback_ends_episode=False)
        with EnginePool(build_worker, spec, kind=kind, workers=min(workers, len(seeds)), wanted=LIFE_EVENTS) as pool:
            watched = _Watched(make_controller(pool.layout), on_epoch)
            run_episodes(pool, watched, seeds, task.horizon)
            snapshots = pool.snapshot()
    return tuple(
        HostRun(
            run_seed=seed.run_seed,
            model=model_of(snapshots[seed.env_id]),
            reports=tuple(watched.reports[seed.env_id]),
        )
        for seed in seeds
    )


class _Watched:
    """A controller whose every step is noted."""

    def __init__(self, inner: PolicyProtocol, on_epoch: OnEpoch) -> None:
        self.reports: dict[int, list[EpochReport]] = {}
        self._inner = inner
        self._on_epoch = on_epoch

    def begin(self, state: ActionExecutionResult) -> None:
        self.reports = {report.env_id: [] for report in state.reports}
        self._inner.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        return self._inner.act(state)

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        self._inner.store(before, after)
        for report in after.reports:
            self.reports[report.env_id].append(report)
        self._on_epoch(after)


def score_committed(task: TaskSpec, data: Dataset, model: MorphogeneticModel, split: Split) -> tuple[float, float]:
    """(loss, accuracy in percent) of the network that would be delivered, over every row of a split."""
    network = export_module(model)
    rows = SharedBatchIterator(
        split.inputs,
        split.targets,
        batch_size=min(task.val_chunk_rows, len(split)),
        run_seed=0,
        mean=data.mean,
        std=data.std,
        channels_last=task.channels_last,
    )
    loss, correct, count = 0.0, 0, 0
    with torch.inference_mode():
        for batch in rows.in_order():
            logits, targets = network(batch.inputs).flatten(0, -2), batch.targets.flatten()
            loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            correct += int((logits.argmax(-1) == targets).sum())
            count += targets.numel()
    return loss / count, 100.0 * correct / count


def with_overrides(spec: TaskSpec, *, epochs: int | None, budget: int | None) -> TaskSpec:
    """The task with another horizon or parameter budget, checked as a whole."""
    from esper.runtime.tasks import override

    if epochs is not None:
        spec = override(spec, horizon=epochs)
    if budget is not None:
        spec = override(spec, lifecycle=replace(spec.lifecycle, param_budget=budget))
    return spec
