"""Makes envs, and workers out of plain data: what a process needs in order to run hosts of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from esper.kasmina import MorphogeneticModel, build_host
from esper.kasmina.layers import generator_for
from esper.leyline import (
    ActionOutcome,
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    EpochReport,
    FeatureContext,
    HostLayout,
    SlotTransition,
    TelemetryEventType,
    record,
    transition_event,
)
from esper.runtime.data.splits import Dataset, Split
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data
from esper.simic.training.action_execution import apply_action
from esper.simic.training.batch_ops import process_train_batch
from esper.simic.training.counterfactual_eval import process_fused_val_batch, report_again, report_epoch
from esper.simic.training.own_objective import own_objective
from esper.simic.training.parallel_env_state import EnvRecipe, ParallelEnvState, read_snapshot
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria.batches import SharedBatchIterator, StoredTensor, store_tensors
from esper.tolaria.engine import Beat, EnvOps, Executor, TaskRows, VectorizedEngine
from esper.tolaria.governor import LabelFacts, TolariaGovernor, Verdict
from esper.tolaria.optim import GrowingOptimizer
from esper.tolaria.runtime import Placement, parse_devices
from esper.tolaria.torch_executor import TorchExecutor

CreateEnv = Callable[[EnvRecipe, EpisodeSeed, Placement], ParallelEnvState]
OPEN_TASKS = 64
"""Tasks whose rows a worker keeps at hand; further ones take the place of those that were not used for longest."""


class TaskData(Protocol):
    """The rows that hosts of a task learn from and are measured on. Test rows never reach a worker."""

    @property
    def train(self) -> Split:
        """Training rows."""

    @property
    def val(self) -> Split:
        """Validation rows."""

    @property
    def mean(self) -> tuple[float, ...] | None:
        """Per channel; None: rows are fed as stored."""

    @property
    def std(self) -> tuple[float, ...] | None:
        """Goes with `mean`."""


@record
class OpenRows:
    """Rows in the memory of a worker."""

    train: Split
    val: Split
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


@record
class TaskEntry:
    """One task on its way to workers."""

    task: TaskSpec
    context: FeatureContext
    """Measured once for the run, because measuring is slow to start."""
    rows: Mapping[str, StoredTensor]
    """Tasks with the same rows hold the same objects."""
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def open(self) -> OpenRows:
        """Its rows, in whatever process this is called."""
        found = {name: stored.open() for name, stored in self.rows.items()}
        return OpenRows(
            train=Split(inputs=found["train_inputs"], targets=found["train_targets"]),
            val=Split(inputs=found["val_inputs"], targets=found["val_targets"]),
            mean=self.mean,
            std=self.std,
        )


@record
class WorkerSpec:
    """All that a worker is built from. Plain data: it travels to other processes."""

    tasks: Mapping[str, TaskEntry]
    """By name. A seed may name others: a worker looks them up and loads their data by itself."""
    rollback_ends_episode: bool
    devices: str
    amp: str
    backend: str = "torch"
    """native or torch; `choose_backend` finds out."""
    batches: type[SharedBatchIterator] = SharedBatchIterator
    """What gathers rows into batches, in the worker."""

    @property
    def only(self) -> TaskEntry:
        """Its one task."""
        (entry,) = self.tasks.values()
        return entry


def make_worker_spec(
    tasks: TaskSpec | Sequence[TaskSpec],
    data: Dataset | Sequence[Dataset],
    *,
    scratch: Path | None = None,
    devices: str = "cpu",
    amp: str = "off",
    backend: str = "torch",
    rollback_ends_episode: bool = True,
    batches: type[SharedBatchIterator] = SharedBatchIterator,
) -> WorkerSpec:
    """Describes the workers of a run on devices such as "cpu" or "cuda:0,cuda:1", with `amp` one of `AMP_CHOICES`.

    Every task has its data; what several of them share is stored once. Large data is copied to the folder `scratch`,
    which all workers map; without it every worker is sent its own copy. `rollback_ends_episode` is False where the
    product is the host and training goes on after a rollback. `backend` is what `choose_backend` found, which has also
    compiled it, or every worker would.
    """
    parse_devices(devices)
    listed = [tasks] if isinstance(tasks, TaskSpec) else tasks
    loaded = [data] if isinstance(data, Dataset) else data
    stored = _store_rows(loaded, scratch)
    entries = [
        TaskEntry(task=task, context=make_context(task, rows), rows=kept, mean=rows.mean, std=rows.std)
        for task, rows, kept in zip(listed, loaded, stored, strict=True)
    ]
    return WorkerSpec(
        tasks={entry.task.name: entry for entry in entries},
        rollback_ends_episode=rollback_ends_episode,
        devices=devices,
        amp=amp,
        backend=backend,
        batches=batches,
    )


def _store_rows(loaded: Sequence[TaskData], scratch: Path | None) -> list[dict[str, StoredTensor]]:
    """The rows of every data set, ready to travel; a tensor that several hold is stored once."""
    distinct: dict[int, tuple[str, Tensor]] = {}
    for index, data in enumerate(loaded):
        for name, tensor in _tensors(data).items():
            distinct.setdefault(id(tensor), (f"{index}.{name}", tensor))
    stored = store_tensors(dict(distinct.values()), scratch)
    return [{name: stored[distinct[id(tensor)][0]] for name, tensor in _tensors(data).items()} for data in loaded]


def _tensors(data: TaskData) -> dict[str, Tensor]:
    return {
        "train_inputs": data.train.inputs,
        "train_targets": data.train.targets,
        "val_inputs": data.val.inputs,
        "val_targets": data.val.targets,
    }


def build_worker(
    spec: WorkerSpec, beat: Beat, *, create: CreateEnv | None = None
) -> VectorizedEngine[ParallelEnvState]:
    """Builds the engine of a worker, in whatever process this is called.

    `beat` is called with every batch; `create` makes envs, `create_env_state` if None.
    """
    recipes = lru_cache(maxsize=OPEN_TASKS)(partial(_find_recipe, spec))
    create = create_env_state if create is None else create

    def create_env(seed: EpisodeSeed, placement: Placement) -> ParallelEnvState:
        return create(recipes(seed.task_among(spec.tasks)), seed, placement)

    return VectorizedEngine(
        env_ops(create_env, spec.backend),
        {name: entry.context for name, entry in spec.tasks.items()},
        devices=parse_devices(spec.devices),
        amp=spec.amp,
        beat=beat,
    )


def _find_recipe(spec: WorkerSpec, name: str) -> EnvRecipe:
    """What the envs of a task share, for a task that the spec lists or one that is found by its name."""
    if name in spec.tasks:
        entry = spec.tasks[name]
        return make_recipe(spec, entry.task, entry.context, entry.open())
    task = get_task_spec(name)
    data = load_task_data(task)
    return make_recipe(spec, task, make_context(task, data), data)


def make_recipe(spec: WorkerSpec, task: TaskSpec, context: FeatureContext, data: TaskData) -> EnvRecipe:
    """What the envs of a task share in a worker."""
    train, val = make_batches(task, data, spec.batches)
    objective = own_objective(task)
    devices = parse_devices(spec.devices)
    return EnvRecipe(
        task=task,
        context=context,
        rollback_ends_episode=spec.rollback_ends_episode,
        rows=TaskRows(tuple(train.on(device) for device in devices), tuple(val.on(device) for device in devices)),
        sample=next(train.in_order(limit=2)).inputs,
        labels=label_facts(val.targets) if objective is None else _no_labels(task, len(val.targets)),
        objective=objective,
    )


def make_batches(
    task: TaskSpec, data: TaskData, batches: type[SharedBatchIterator] = SharedBatchIterator
) -> tuple[SharedBatchIterator, SharedBatchIterator]:
    """The batches of training and of validation. The run's seed is set at each reset."""
    samples = None if task.samples_per_epoch is None else min(task.samples_per_epoch, len(data.train))
    train = batches(
        data.train.inputs,
        data.train.targets,
        batch_size=task.batch_size,
        run_seed=0,
        samples_per_epoch=samples,
        mean=data.mean,
        std=data.std,
        augment=task.augment,
        channels_last=task.channels_last,
    )
    val = batches(
        data.val.inputs,
        data.val.targets,
        batch_size=min(task.val_chunk_rows, len(data.val)),
        run_seed=0,
        mean=data.mean,
        std=data.std,
        channels_last=task.channels_last,
    )
    return train, val


def make_context(task: TaskSpec, data: TaskData) -> FeatureContext:
    """What controllers may know of a task before an episode."""
    rows = len(data.train) if task.samples_per_epoch is None else min(len(data.train), task.samples_per_epoch)
    return FeatureContext(
        task=task.name,
        layout=task_layout(task, data),
        lifecycle=task.lifecycle,
        num_classes=task.num_classes,
        train_rows=rows,
        steps_per_epoch=max(1, rows // task.batch_size),
    )


def task_layout(task: TaskSpec, data: TaskData) -> HostLayout:
    """What controllers may know of the task's host: slots, blueprints and what each would cost there."""
    host = build_host(task.host, generator_for(0))
    sample = data.train.inputs[:2]
    sample = sample.float() if sample.dtype is torch.uint8 else sample
    model = MorphogeneticModel(host, sample, task.lifecycle, slots=task.slots, blueprints=task.blueprints)
    return model.layout


def label_facts(targets: Tensor) -> LabelFacts:
    """What guessing from the label frequencies would score."""
    counts = torch.bincount(targets.flatten()).double()
    shares = (counts[counts > 0] / counts.sum()).tolist()
    return LabelFacts(
        entropy=-math.fsum(share * math.log(share) for share in shares),
        top_share=max(shares),
        rows=targets.numel(),
    )


def _no_labels(task: TaskSpec, rows: int) -> LabelFacts:
    """Knowing nothing, where the user's scale puts it."""
    return LabelFacts(entropy=task.chance_loss, top_share=1.0 / task.num_classes, rows=rows)


def build_model(recipe: EnvRecipe, rng_seed: int, device: torch.device) -> MorphogeneticModel:
    """A fresh host of the task, all slots empty. Weights are drawn on the CPU, so they are the same on any device."""
    task = recipe.task
    host = build_host(task.host, generator_for(rng_seed)).to(device)
    if task.channels_last:
        host = host.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return MorphogeneticModel(
        host,
        recipe.sample.to(device),
        task.lifecycle,
        slots=task.slots,
        blueprints=task.blueprints,
        layout=recipe.context.layout,
    )


def create_env_state(recipe: EnvRecipe, seed: EpisodeSeed, placement: Placement) -> ParallelEnvState:
    """An env at the start of an episode. Equal seeds give equal weights, wherever the env lives."""
    model = build_model(recipe, seed.derive(None, "init"), placement.device)
    optimizer = GrowingOptimizer(recipe.task.optimizer, model.parameter_groups(), recipe.task.lifecycle.clip_norm)
    model.bind(optimizer)
    env = ParallelEnvState(
        seed=seed,
        context=recipe.context,
        rows=recipe.rows,
        recipe=recipe,
        placement=placement,
        model=model,
        optimizer=optimizer,
        tracker=SignalTracker(recipe.task.horizon),
        governor=TolariaGovernor(recipe.labels),
    )
    env.on_move = make_telemetry_callback(env)
    return env


# ---- telemetry of an env


def make_telemetry_callback(env: ParallelEnvState) -> Callable[[SlotTransition], None]:
    """Returns what turns each lifecycle move of this env into its one event, under the seed's name in the run."""

    def emit(move: SlotTransition) -> None:
        named = replace(move, seed_id=env.seed_name(move.seed_id))
        env.outbox.append(transition_event(named, episode=env.episode, env=env.env_id, epoch=env.epoch))

    return emit


def configure_slot_telemetry(env: ParallelEnvState, wanted: frozenset[TelemetryEventType]) -> None:
    """Says which events the env's next report is to carry. Nothing that is trained or measured changes."""
    env.wanted = wanted


# ---- the functions an engine is made of


def env_ops(
    create: Callable[[EpisodeSeed, Placement], ParallelEnvState], backend: str = "torch"
) -> EnvOps[ParallelEnvState]:
    """What an engine does to envs."""
    executors: list[Executor[ParallelEnvState]] = [
        TorchExecutor(train_batch=process_train_batch, eval_batch=process_fused_val_batch)
    ]
    if backend == "native":
        from esper.simic.training.native_executor import NativeExecutor  # numba takes a while to load

        executors.insert(0, NativeExecutor())
    return EnvOps(
        create=create,
        apply=_apply,
        executors=executors,
        report=_report,
        seed_of=_seed_of,
    )


def _apply(env: ParallelEnvState, spec: ActionSpec, wanted: frozenset[TelemetryEventType]) -> ActionOutcome:
    configure_slot_telemetry(env, wanted)
    env.action = spec
    return apply_action(env, spec)


def _report(env: ParallelEnvState, verdict: Verdict | None, restored_epoch: int | None) -> EpochReport:
    return report_again(env) if verdict is None else report_epoch(env, verdict, restored_epoch)


def _seed_of(snapshot: EnvSnapshot) -> EpisodeSeed:
    return EpisodeSeed(**read_snapshot(snapshot)["seed"])
