"""Makes envs, and workers out of plain data: what a process needs in order to run hosts of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

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
    HostLayout,
    SlotTransition,
    TelemetryEventType,
    derive_seed,
    record,
    transition_event,
)
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.training.action_execution import apply_action
from esper.simic.training.batch_ops import process_train_batch
from esper.simic.training.counterfactual_eval import process_fused_val_batch, report_again, report_epoch
from esper.simic.training.parallel_env_state import EnvRecipe, EnvSpec, ParallelEnvState, read_snapshot
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria.batches import SharedBatchIterator, StoredTensor, store
from esper.tolaria.engine import Beat, EnvOps, VectorizedEngine
from esper.tolaria.governor import LabelFacts, TolariaGovernor, Verdict
from esper.tolaria.optim import GrowingOptimizer
from esper.tolaria.runtime import Placement, parse_devices
from esper.tolaria.torch_executor import TorchExecutor

CreateEnv = Callable[[EnvRecipe, EpisodeSeed, Placement], ParallelEnvState]


@record
class WorkerSpec(EnvSpec):
    """All that a worker is built from. Plain data: it travels to other processes."""

    rows: Mapping[str, StoredTensor]
    """Training and validation rows. Test rows never reach a worker."""
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    devices: str
    amp: str
    batches: type[SharedBatchIterator] = SharedBatchIterator
    """What gathers rows into batches, in the worker."""


def make_worker_spec(
    task: TaskSpec,
    data: Dataset,
    *,
    scratch: Path | None = None,
    devices: str = "cpu",
    amp: str = "off",
    rollback_ends_episode: bool = True,
    batches: type[SharedBatchIterator] = SharedBatchIterator,
) -> WorkerSpec:
    """Describes the workers of a run on devices such as "cpu" or "cuda:0,cuda:1", with `amp` one of `AMP_CHOICES`.

    Large data is copied to the folder `scratch`, which all workers map; without it every worker is sent its own copy.
    `rollback_ends_episode` is False where the product is the host and training goes on after a rollback.
    """
    parse_devices(devices)
    tensors = {
        "train_inputs": data.train.inputs,
        "train_targets": data.train.targets,
        "val_inputs": data.val.inputs,
        "val_targets": data.val.targets,
    }
    return WorkerSpec(
        task=task,
        layout=task_layout(task, data),
        rows=store(tensors, scratch),
        mean=data.mean,
        std=data.std,
        devices=devices,
        amp=amp,
        rollback_ends_episode=rollback_ends_episode,
        batches=batches,
    )


def build_worker(
    spec: WorkerSpec, beat: Beat, *, create: CreateEnv | None = None
) -> VectorizedEngine[ParallelEnvState]:
    """Builds the engine of a worker, in whatever process this is called.

    `beat` is called with every batch; `create` makes envs, `create_env_state` if None.
    """
    train, val = make_batches(spec)
    recipe = EnvRecipe(
        task=spec.task,
        layout=spec.layout,
        sample=next(train.in_order(limit=2)).inputs,
        labels=label_facts(val.targets),
        rollback_ends_episode=spec.rollback_ends_episode,
    )
    return VectorizedEngine(
        env_ops(recipe, create_env_state if create is None else create),
        train,
        val,
        layout=spec.layout,
        lifecycle=spec.task.lifecycle,
        devices=parse_devices(spec.devices),
        amp=spec.amp,
        beat=beat,
    )


def make_batches(spec: WorkerSpec) -> tuple[SharedBatchIterator, SharedBatchIterator]:
    """The batches of training and of validation. The run's seed is set at each reset."""
    task = spec.task
    inputs, targets = spec.rows["train_inputs"].open(), spec.rows["train_targets"].open()
    samples = None if task.samples_per_epoch is None else min(task.samples_per_epoch, len(inputs))
    train = spec.batches(
        inputs,
        targets,
        batch_size=task.batch_size,
        run_seed=0,
        samples_per_epoch=samples,
        mean=spec.mean,
        std=spec.std,
        augment=task.augment,
        channels_last=task.channels_last,
    )
    inputs, targets = spec.rows["val_inputs"].open(), spec.rows["val_targets"].open()
    val = spec.batches(
        inputs,
        targets,
        batch_size=min(task.val_chunk_rows, len(inputs)),
        run_seed=0,
        mean=spec.mean,
        std=spec.std,
        channels_last=task.channels_last,
    )
    return train, val


def task_layout(task: TaskSpec, data: Dataset) -> HostLayout:
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
        layout=recipe.layout,
    )


def create_env_state(recipe: EnvRecipe, seed: EpisodeSeed, placement: Placement) -> ParallelEnvState:
    """An env at the start of an episode. Equal seeds give equal weights, wherever the env lives."""
    rng_seed = derive_seed(seed.run_seed, seed.env_id, seed.episode, None, "init")
    model = build_model(recipe, rng_seed, placement.device)
    optimizer = GrowingOptimizer(recipe.task.optimizer, model.parameter_groups(), recipe.task.lifecycle.clip_norm)
    model.bind(optimizer)
    env = ParallelEnvState(
        env_id=seed.env_id,
        episode=seed.episode,
        run_seed=seed.run_seed,
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


def env_ops(recipe: EnvRecipe, create: CreateEnv) -> EnvOps[ParallelEnvState]:
    """What an engine does to the envs of a task."""
    return EnvOps(
        create=partial(create, recipe),
        apply=_apply,
        executors=(TorchExecutor(train_batch=process_train_batch, eval_batch=process_fused_val_batch),),
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
    meta = read_snapshot(snapshot)
    return EpisodeSeed(env_id=snapshot.env_id, episode=meta["episode"], run_seed=meta["run_seed"])
