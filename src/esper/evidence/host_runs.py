"""Hosts of a task under a controller, from the first epoch to the last.

Two controllers run on the same seeds see the same initial weights and the same batches, so only their ops make a
difference.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from esper.evidence.static_networks import HostWorkerSpec, SeedChoice, StaticNetwork, build_host_worker
from esper.kasmina import MorphogeneticModel, export_module
from esper.leyline import (
    ActionExecutionResult,
    ActionSpec,
    EpisodeSeed,
    EpochReport,
    HostLayout,
    LifecycleOp,
    PolicyProtocol,
    SeedEnded,
    SeedGerminated,
    SeedStage,
    SeedStageChanged,
    TelemetryEventType,
    record,
)
from esper.leyline.files import scratch_folder
from esper.runtime.data.splits import Dataset, Split
from esper.runtime.tasks import TaskSpec, get_task_spec, override
from esper.simic.training.env_factory import make_worker_spec
from esper.simic.training.own_objective import OwnObjective, own_objective
from esper.simic.training.parallel_env_state import model_of
from esper.simic.training.rollout import StepObserver, run_episodes
from esper.tamiyo.controller import Setting, life_epochs
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.schedule import ScheduleEntry
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.kinds import Workers
from esper.tolaria.pool import EnginePool
from esper.tolaria.worker import PoolFailure

SEED_EVENTS = frozenset(
    {
        TelemetryEventType.SEED_GERMINATED,
        TelemetryEventType.SEED_STAGE_CHANGED,
        TelemetryEventType.SEED_FOSSILIZED,
        TelemetryEventType.SEED_PRUNED,
    }
)
# What to plant by default: of each topology, the blueprint with the operation that hosts lack most.
DEFAULT_BLUEPRINT = {"mlp": "mlp.mlp", "cnn": "cnn.conv", "transformer": "transformer.conv_causal"}
DEFAULT_BLEND = "linear_fast"

OnEpoch = Callable[[ActionExecutionResult], None]


@record
class PlantedSeed(SeedChoice):
    """One seed from planting to its end. Epochs count from 0; None: it did not come to that."""

    params: int
    planted: int
    blended: int | None = None
    kept: int | None = None
    pruned: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """One host after its last epoch."""

    run_seed: int
    model: MorphogeneticModel
    reports: tuple[EpochReport, ...]
    """One per epoch."""
    num_ops: Mapping[LifecycleOp, int]
    """Ops carried out, by kind."""
    controller_s: float
    """Seconds its controller took to decide; controllers that decide for several hosts at once share equally."""
    rows_per_epoch: int
    """Training rows."""

    @property
    def training_macs(self) -> int:
        """Multiply-accumulates of all training, each epoch with the seeds that were in place at its end."""
        layout = self.model.layout
        return sum(
            layout.training_macs(
                self.rows_per_epoch,
                [
                    (slot.slot_id, slot.blueprint)
                    for slot in report.slots
                    if slot.blueprint is not None and slot.stage.has_seed
                ],
            )
            for report in self.reports
        )

    @property
    def grown_seeds(self) -> tuple[PlantedSeed, ...]:
        """Every seed that was planted, in order."""
        seeds: dict[str, PlantedSeed] = {}
        for event in chain.from_iterable(report.events for report in self.reports):
            data, epoch = event.data, event.epoch
            if isinstance(data, SeedGerminated):
                assert epoch is not None
                seeds[data.seed_id] = PlantedSeed(
                    slot=data.slot_id, blueprint=data.blueprint, blend=data.blend, params=data.params, planted=epoch
                )
            elif isinstance(data, SeedEnded):
                kept, seed = event.type is TelemetryEventType.SEED_FOSSILIZED, seeds[data.seed_id]
                seeds[data.seed_id] = replace(seed, kept=epoch) if kept else replace(seed, pruned=epoch)
            elif isinstance(data, SeedStageChanged) and data.to_stage == SeedStage.BLENDING.name:
                seeds[data.seed_id] = replace(seeds[data.seed_id], blended=epoch)
        return tuple(seeds.values())

    @property
    def kept(self) -> tuple[SeedChoice, ...]:
        """The seeds of the committed network."""
        return tuple(
            SeedChoice(slot=slot.spec.slot_id, blueprint=str(slot.blueprint), blend=slot.blend.name)
            for slot in self.model.all_slots()
            if slot.stage is SeedStage.FOSSILIZED and slot.blend is not None
        )

    @property
    def seconds(self) -> float:
        """Of one thread: training, validation and controller."""
        return sum(report.train_ms + report.val_ms for report in self.reports) / 1_000 + self.controller_s

    @property
    def committed_scores(self) -> tuple[float, float]:
        """(loss, accuracy in percent) of the committed network after the last epoch, on validation data."""
        last = self.reports[-1]
        assert last.committed_loss is not None
        assert last.committed_accuracy_pct is not None
        return last.committed_loss, last.committed_accuracy_pct


class HostRunner(ExitStack):
    """Workers for one task, used in a `with` block: `run` plays one episode per run seed under a controller.

    Args:
        task: Host, optimizer, limits, epochs.
        data: Train and val are read; test is not.
        workers: A number of processes, 1 runs everything in this one; or workers of a kind. Results are the same bits.
        networks: Networks to start with, by run seed; None starts every run with the task's bare host.
        backend: What trains them, as `choose_backend` found.
    """

    def __init__(
        self,
        task: TaskSpec,
        data: Dataset,
        *,
        workers: Workers | int = 1,
        networks: Mapping[int, StaticNetwork] | None = None,
        backend: str = "torch",
    ) -> None:
        workers = Workers.of(workers)
        super().__init__()
        self._task = task
        rows = min(len(data.train), task.samples_per_epoch or len(data.train))
        self._rows_per_epoch = rows - rows % task.batch_size  # a short last batch is left out
        with ExitStack() as stack:
            scratch = stack.enter_context(scratch_folder()) if workers.row.shares_files else None
            spec = make_worker_spec(task, data, scratch=scratch, rollback_ends_episode=False, backend=backend)
            hosts = HostWorkerSpec(worker=spec, networks=networks)
            pool = EnginePool(
                build_host_worker,
                hosts,
                kind=workers.row.name,
                workers=workers.count,
                wanted=SEED_EVENTS,
                options=workers.options,
            )
            self._pool = stack.enter_context(pool)
            self.enter_context(stack.pop_all())

    @property
    def layout(self) -> HostLayout:
        """The hosts' slots and blueprints."""
        return self._pool.context.layout

    def setting(self, run_seed: int) -> Setting:
        """What a fixed controller knows of the hosts."""
        return Setting(layout=self.layout, lifecycle=self._task.lifecycle, run_seed=run_seed)

    def controller(self, name: str, run_seed: int = 0, **params: Any) -> PolicyProtocol:
        """A controller that is not learned. The parameters of `schedule` are `entries`, or those of `default_schedule`.

        Raises:
            ValueError: There is no such controller, or a parameter is unknown or out of range.
        """
        setting = self.setting(run_seed)
        if name == "schedule" and "entries" not in params:
            params = {"entries": default_schedule(setting, self._task.horizon, **params)}
        return make_controller(name, setting, **params)

    def run(
        self, controller: PolicyProtocol, seeds: Sequence[EpisodeSeed], on_epoch: OnEpoch = lambda state: None
    ) -> tuple[HostRun, ...]:
        """Trains one host per seed for the task's epochs, side by side.

        Raises:
            PoolFailure: A worker was lost and a host with it.
        """
        recorder = _RunRecorder(on_epoch)
        run_episodes(self._pool, controller, seeds, self._task.horizon, observers=(recorder,))
        if self._pool.lost_envs:
            raise PoolFailure(f"hosts {sorted(self._pool.lost_envs)} were lost with their worker")
        snapshots = self._pool.snapshot()
        return tuple(
            HostRun(
                run_seed=seed.run_seed,
                model=model_of(snapshots[seed.env_id], self._task.host),
                reports=tuple(recorder.reports[seed.env_id]),
                num_ops=recorder.num_ops[seed.env_id],
                controller_s=recorder.controller_s / len(seeds),
                rows_per_epoch=self._rows_per_epoch,
            )
            for seed in seeds
        )


class _RunRecorder(StepObserver):
    """Keeps the reports and ops of every env, and the time its controller took."""

    def __init__(self, on_epoch: OnEpoch) -> None:
        self.reports: dict[int, list[EpochReport]] = {}
        self.num_ops: dict[int, Counter[LifecycleOp]] = {}
        self.controller_s = 0.0
        self._since = 0.0
        self._on_epoch = on_epoch

    def reset(self, state: ActionExecutionResult) -> None:
        self.reports = {report.env_id: [] for report in state.reports}
        self.num_ops = {report.env_id: Counter() for report in state.reports}
        self._since = time.perf_counter()

    def acted(self, state: ActionExecutionResult, specs: Sequence[ActionSpec]) -> None:
        self.controller_s += time.perf_counter() - self._since

    def executed(self, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        self._since = time.perf_counter()

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        self.controller_s += time.perf_counter() - self._since
        for report in after.reports:
            self.reports[report.env_id].append(report)
        for outcome in after.outcomes:
            self.num_ops[outcome.env_id][outcome.op] += outcome.applied
        self._on_epoch(after)
        self._since = time.perf_counter()


def default_schedule(
    setting: Setting,
    horizon: int,
    blueprint: str | None = None,
    *,
    blend: str = DEFAULT_BLEND,
    gap: int = 1,
    fill: bool = False,
) -> tuple[ScheduleEntry, ...]:
    """One seed after the other in every slot where it fits, each kept as soon as its gate allows.

    The last quarter of the epochs is left free, so that what was grown can settle, unless no seed could live then.
    Where the budget has no room for the blueprint, the largest that fits takes its place.

    Args:
        setting: The hosts.
        horizon: Epochs of a run.
        blueprint: What to plant; None takes one that suits the topology of each slot.
        blend: How it is blended in.
        gap: Epochs from keeping one seed to planting the next.
        fill: Choose the seeds, whatever they are, so that they use most of the budget.
    """
    life = life_epochs(setting.lifecycle, blend)
    step = life + gap
    count = max(int(horizon > life), math.ceil((horizon * 3 // 4 - life) / step))
    seeds = _fill_budget(setting, count) if fill else _same_in_every_slot(setting, count, blueprint)
    entries: list[ScheduleEntry] = []
    for number, (slot_id, key) in enumerate(seeds):
        start = number * step
        entries += [
            ScheduleEntry(epoch=start, op=LifecycleOp.GERMINATE, slot=slot_id, blueprint=key, blend=blend),
            ScheduleEntry(epoch=start + setting.lifecycle.min_training, op=LifecycleOp.ADVANCE, slot=slot_id),
            ScheduleEntry(epoch=start + step - gap, op=LifecycleOp.FOSSILIZE, slot=slot_id),
        ]
    return tuple(entries)


def _same_in_every_slot(setting: Setting, count: int, blueprint: str | None) -> list[tuple[str, str]]:
    keys = tuple(DEFAULT_BLUEPRINT.values()) if blueprint is None else (blueprint,)
    layout, room, seeds = setting.layout, setting.room, list[tuple[str, str]]()
    for slot_id in layout.slot_ids:
        cards = [card for card in layout.fitting(slot_id) if card.added_params("add") <= room]
        wanted = [card for card in cards if card.blueprint in keys]
        usable = any(layout.card(slot_id, key).fits for key in keys)
        if len(seeds) < count and usable and cards:
            card = max(wanted or cards, key=lambda card: card.params)
            seeds.append((slot_id, card.blueprint))
            room -= card.added_params("add")
    return seeds


def _fill_budget(setting: Setting, count: int) -> list[tuple[str, str]]:
    """At most `count` seeds, one per slot, that together come closest to the budget from below."""
    best: dict[tuple[int, float], list[tuple[str, str]]] = {(0, 0): []}
    for slot_id in setting.layout.slot_ids:
        for (number, total), seeds in list(best.items()):
            for card in setting.layout.fitting(slot_id):
                if number < count and total + card.added_params("add") <= setting.room:
                    best.setdefault((number + 1, total + card.added_params("add")), [*seeds, (slot_id, card.blueprint)])
    return best[max(best, key=lambda key: key[1])]


def score_committed(task: TaskSpec, data: Dataset, model: MorphogeneticModel, split: Split) -> tuple[float, float]:
    """(loss, accuracy in percent) of the network that would be delivered, over every row of a split."""
    return score_network(export_module(model), all_rows(task, data, split), own_objective(task))


def all_rows(task: TaskSpec, data: Dataset, split: Split) -> SharedBatchIterator:
    """A split as the task's networks are fed."""
    return SharedBatchIterator(
        split.inputs,
        split.targets,
        batch_size=min(task.val_chunk_rows, len(split)),
        run_seed=0,
        mean=data.mean,
        std=data.std,
        channels_last=task.channels_last,
    )


def score_network(
    network: torch.nn.Module, rows: SharedBatchIterator, own: OwnObjective | None = None
) -> tuple[float, float]:
    """(loss, accuracy in percent) over every row; by a loss and metric of the user's own, on their scale."""
    loss, correct, count = 0.0, 0.0, 0
    with torch.inference_mode():
        for batch in rows.in_order():
            if own is not None:
                mean, right, num = own.mean(network(batch.inputs), batch.targets)
                loss, correct, count = loss + float(mean) * num, correct + float(right), count + num
                continue
            logits, targets = network(batch.inputs).flatten(0, -2), batch.targets.flatten()
            loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            correct += int((logits.argmax(-1) == targets).sum())
            count += targets.numel()
    return loss / count, 100.0 * correct / count


def task_with(name: str, *, epochs: int | None, budget: int | None, rows: int | None = None) -> TaskSpec:
    """A task by name, with another horizon, budget or rows per epoch where one is given; checked as a whole."""
    changes = {"horizon": epochs, "param_budget": budget, "samples_per_epoch": rows}
    return override(get_task_spec(name), **{field: value for field, value in changes.items() if value is not None})
