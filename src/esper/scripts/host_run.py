"""One host, one schedule, one life: trains a task's host for its epochs and carries out the ops that are due.

Two runs on the same seed see the same initial weights and the same batches, so only the ops make a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina import (
    EpochMeasurement,
    MorphogeneticModel,
    SlotAttribution,
    apply_op,
    begin_epoch,
    build_host,
    end_epoch,
)
from esper.kasmina.layers import generator_for
from esper.leyline import (
    ActionSpec,
    GateResult,
    HostLayout,
    LifecycleOp,
    SeedStage,
    SlotTransition,
    derive_seed,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    get_blend,
    lr_factor,
    record,
)
from esper.runtime.datasets import Dataset, Split
from esper.runtime.tasks import TaskSpec
from esper.tolaria.batches import Batch, SharedBatchIterator
from esper.tolaria.optim import GrowingOptimizer

ENV, EPISODE = 0, 0

# What to plant when nobody says otherwise: the blueprint of each topology that adds the operation hosts lack most.
DEFAULT_BLUEPRINT = {"mlp": "mlp.mlp", "cnn": "cnn.conv", "transformer": "transformer.conv_causal"}
DEFAULT_BLEND = "linear_fast"


@record
class PlannedOp:
    """An op and the first epoch at which it may happen. A closed gate delays it, and with it all later ones."""

    epoch: int
    spec: ActionSpec


@record
class EpochRow:
    """One line of a training history."""

    epoch: int
    train_loss: float
    val_loss: float
    val_accuracy_pct: float
    committed_loss: float
    committed_accuracy_pct: float
    params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """A finished run."""

    model: MorphogeneticModel
    optimizer: GrowingOptimizer
    history: tuple[EpochRow, ...]
    moves: tuple[tuple[int, SlotTransition], ...]
    """(epoch, move), in order."""
    undone: tuple[PlannedOp, ...]
    """Planned ops that never became legal."""


def default_schedule(layout: HostLayout, horizon: int, blueprint: str | None = None) -> tuple[PlannedOp, ...]:
    """Grows one seed after the other in every slot where it fits, each kept as soon as its gate allows.

    The last quarter of the epochs is left free, so that what was grown can settle.
    """
    key = DEFAULT_BLUEPRINT[layout.topology] if blueprint is None else blueprint
    life = get_blend(DEFAULT_BLEND).ramp_epochs + 2
    plan: list[PlannedOp] = []
    start = 0
    for slot in layout.slots:
        if not layout.card(slot.slot_id, key).fits or start + life > horizon * 3 // 4:
            continue
        plan += [
            _planned(start, LifecycleOp.GERMINATE, slot.slot_id, key, DEFAULT_BLEND),
            _planned(start + 1, LifecycleOp.ADVANCE, slot.slot_id),
            _planned(start + life - 1, LifecycleOp.FOSSILIZE, slot.slot_id),
        ]
        start += life
    return tuple(plan)


def _planned(
    epoch: int, op: LifecycleOp, slot: str, blueprint: str | None = None, blend: str | None = None
) -> PlannedOp:
    return PlannedOp(epoch=epoch, spec=ActionSpec(env_id=ENV, op=op, slot=slot, blueprint=blueprint, blend=blend))


def build_model(task: TaskSpec, data: Dataset, run_seed: int) -> MorphogeneticModel:
    """The task's untrained host with all slots empty."""
    host = build_host(task.host, generator_for(derive_seed(run_seed, ENV, EPISODE, None, "init")))
    sample = next(_rows_in_order(task, data, data.train)).inputs
    return MorphogeneticModel(host, sample, task.lifecycle, slots=task.slots, blueprints=task.blueprints)


def run_host(
    task: TaskSpec,
    data: Dataset,
    plan: Sequence[PlannedOp],
    run_seed: int,
    on_epoch: Callable[[EpochRow, Sequence[SlotTransition]], None] = lambda row, moves: None,
) -> HostRun:
    """Trains the host for the task's epochs and carries out the plan, at most one op per epoch.

    Args:
        task: Host, optimizer, limits.
        data: Train and val are read; test is not.
        plan: Ops in order; empty leaves the host alone.
        run_seed: Decides weights and order of data.
        on_epoch: Called after each epoch.
    """
    model = build_model(task, data, run_seed)
    optimizer = GrowingOptimizer(task.optimizer, model.parameter_groups(), task.lifecycle.clip_norm)
    model.bind(optimizer)
    train = SharedBatchIterator(
        data.train.inputs,
        data.train.targets,
        batch_size=task.batch_size,
        run_seed=run_seed,
        samples_per_epoch=None if task.samples_per_epoch is None else min(task.samples_per_epoch, len(data.train)),
        mean=data.mean,
        std=data.std,
        augment=task.augment,
        channels_last=task.channels_last,
    )
    waiting = list(plan)
    history: list[EpochRow] = []
    moves: list[tuple[int, SlotTransition]] = []
    for epoch in range(task.horizon):
        happened: list[SlotTransition] = []
        if waiting and waiting[0].epoch <= epoch and _is_legal(model, waiting[0].spec):
            spec = waiting.pop(0).spec
            move = apply_op(model, spec, derive_seed(run_seed, ENV, EPISODE, epoch, f"seed:{spec.slot}"))
            assert move is not None
            happened.append(move)
        happened += begin_epoch(model)
        optimizer.set_lr_factor(lr_factor(task.optimizer.schedule, epoch, task.horizon))
        train_loss = _train(model, optimizer, train.epoch(EPISODE, epoch))
        table = validate(task, data, model, data.val, coalitions(model))
        full, committed = table[_blended(model)], table[fossils(model)]
        happened += end_epoch(
            model,
            EpochMeasurement(
                train_loss=train_loss,
                val_loss=full[0],
                attributions=_attributions(task, model, table),
                gradients=optimizer.finish_epoch(),
            ),
        )
        row = EpochRow(
            epoch=epoch,
            train_loss=train_loss,
            val_loss=full[0],
            val_accuracy_pct=full[1],
            committed_loss=committed[0],
            committed_accuracy_pct=committed[1],
            params=model.param_counts().total,
        )
        history.append(row)
        moves += [(epoch, move) for move in happened]
        on_epoch(row, happened)
    return HostRun(model=model, optimizer=optimizer, history=tuple(history), moves=tuple(moves), undone=tuple(waiting))


def _train(model: MorphogeneticModel, optimizer: GrowingOptimizer, batches: Iterator[Batch]) -> float:
    model.train()
    total = torch.zeros(())
    count = 0
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(model(batch.inputs), batch.targets)
        penalty = model.penalty()
        torch.autograd.backward(loss if penalty is None else loss + penalty)
        optimizer.step()
        total += loss.detach()
        count += 1
    return float(total / count)


def _loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def validate(
    task: TaskSpec,
    data: Dataset,
    model: MorphogeneticModel,
    split: Split,
    wanted: Sequence[frozenset[str]],
) -> dict[frozenset[str], tuple[float, float]]:
    """(loss, accuracy in percent) of each coalition over every row, weighted by rows."""
    model.eval()
    sums = torch.zeros(len(wanted), 2, dtype=torch.float64)
    rows = 0
    for batch in _rows_in_order(task, data, split):
        for index, logits in enumerate(model.forward_coalitions(batch.inputs, wanted)):
            sums[index, 0] += _loss(logits, batch.targets, reduction="sum").double()
            sums[index, 1] += (logits.argmax(-1) == batch.targets).sum()
        rows += batch.targets.numel()
    return {
        coalition: (loss / rows, 100.0 * correct / rows)
        for coalition, (loss, correct) in zip(wanted, sums.tolist(), strict=True)
    }


def _rows_in_order(task: TaskSpec, data: Dataset, split: Split) -> Iterator[Batch]:
    """Every row of a split once, as validation sees it."""
    return SharedBatchIterator(
        split.inputs,
        split.targets,
        batch_size=min(task.val_chunk_rows, len(split)),
        run_seed=0,
        mean=data.mean,
        std=data.std,
        channels_last=task.channels_last,
    ).in_order()


def _blended(model: MorphogeneticModel) -> frozenset[str]:
    return frozenset(slot.spec.slot_id for slot in model.all_slots() if slot.stage.is_blended)


def fossils(model: MorphogeneticModel) -> frozenset[str]:
    """Slots whose seeds are kept: with the host they are the committed network."""
    return frozenset(slot.spec.slot_id for slot in model.all_slots() if slot.stage is SeedStage.FOSSILIZED)


def coalitions(model: MorphogeneticModel) -> list[frozenset[str]]:
    """All blended seeds, each of them left out once, and the fossils alone."""
    full = _blended(model)
    return list(dict.fromkeys([full, *(full - {slot_id} for slot_id in sorted(full)), fossils(model)]))


def _attributions(
    task: TaskSpec, model: MorphogeneticModel, table: Mapping[frozenset[str], tuple[float, float]]
) -> dict[str, SlotAttribution]:
    full = _blended(model)
    return {
        slot_id: SlotAttribution(
            contribution_pp=points(task, *table[full]) - points(task, *table[full - {slot_id}]),
            solo_pp=None,
            interaction_pp=None,
        )
        for slot_id in full
    }


def points(task: TaskSpec, loss: float, accuracy_pct: float) -> float:
    """A result in points, larger is better: accuracy, or for language models the way from chance to zero loss."""
    if task.metric == "accuracy":
        return accuracy_pct
    return 100.0 * (task.chance_loss - min(loss, 2 * task.chance_loss)) / task.chance_loss


def _is_legal(model: MorphogeneticModel, spec: ActionSpec) -> bool:
    assert spec.slot is not None
    if spec.op is LifecycleOp.GERMINATE:
        assert spec.blueprint is not None
        stage, card = model.slot(spec.slot).stage, model.layout.card(spec.slot, spec.blueprint)
        result: GateResult = gate_germinate(stage, card, model.num_live, model.param_counts().total, model.lifecycle)
    else:
        gate = {LifecycleOp.ADVANCE: gate_blend, LifecycleOp.FOSSILIZE: gate_fossilize}[spec.op]
        result = gate(model.evidence(spec.slot), model.lifecycle)
    return result.passed
