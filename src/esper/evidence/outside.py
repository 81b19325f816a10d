"""An arm from outside: an MLP that the public library gromo grows, neuron by neuron, on the same batches.

It knows neither hosts nor seeds nor gates: it starts with two hidden units and adds those that its statistics of the
gradient ask for (Growing Tiny Networks), evenly over the first half of the epochs, until the budget is full. Epochs,
batches, optimizer and learning rates are the task's. Its optimizer starts anew when the network has grown.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from esper.evidence.host_runs import all_rows, score_network
from esper.leyline import PASSES_PER_STEP, derive_seed, lr_factor
from esper.runtime.data.splits import Dataset
from esper.runtime.datasets import get_source
from esper.runtime.tasks import TaskSpec
from esper.tolaria.batches import SharedBatchIterator

FIRST_HIDDEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRun:
    """One network after its last epoch."""

    network: nn.Module
    hidden: int
    params: tuple[int, ...]
    """By epoch."""
    scores: tuple[tuple[float, float], ...]
    """(loss, accuracy in percent) on validation data, by epoch."""
    training_macs: int


def why_not_gromo(task: TaskSpec) -> str | None:
    """Why the library cannot run on a task; None if it can."""
    if find_spec("gromo") is None:
        return "the library gromo is not installed (pip install gromo)"
    if task.context is not None:
        return f"gromo grows no transformers, and {task.name} is text"
    if task.lifecycle.param_budget is None:
        return "it grows until a budget is full: pass --budget"
    if task.optimizer.kind != "adamw":
        return f"its optimizer here is AdamW, and {task.name} has {task.optimizer.kind}"
    return None if _final_hidden(task) >= FIRST_HIDDEN else "the budget is too small for two hidden units"


def _inputs(task: TaskSpec) -> int:
    shape = get_source(task.data).row_shape
    assert shape is not None
    return math.prod(shape)


def _final_hidden(task: TaskSpec) -> int:
    """The hidden units for which the budget has room."""
    assert task.lifecycle.param_budget is not None
    return (task.lifecycle.param_budget - task.num_classes) // (_inputs(task) + 1 + task.num_classes)


def grow_with_gromo(task: TaskSpec, data: Dataset, run_seed: int) -> OutsideRun:
    """Trains and grows one MLP on the batches of a run seed."""
    from gromo.containers.growing_mlp import GrowingMLP

    rows = min(len(data.train), task.samples_per_epoch or len(data.train))
    batches = SharedBatchIterator(
        data.train.inputs,
        data.train.targets,
        batch_size=task.batch_size,
        run_seed=run_seed,
        samples_per_epoch=rows,
        mean=data.mean,
        std=data.std,
        augment=task.augment,
    )
    with torch.random.fork_rng(devices=[]):  # the library draws from torch's own generator
        torch.manual_seed(derive_seed(run_seed, None, None, None, "gromo"))
        network = GrowingMLP(
            _inputs(task), task.num_classes, FIRST_HIDDEN, 1, activation=nn.ReLU(), device=torch.device("cpu")
        )
        return _train(task, data, network, batches)


def _train(task: TaskSpec, data: Dataset, network: Any, batches: SharedBatchIterator) -> OutsideRun:
    hidden, final = FIRST_HIDDEN, _final_hidden(task)
    steps = max(1, task.horizon // 2)
    sizes, scores, macs = [], [], 0
    recipe, optimizer = task.optimizer, None
    for epoch in range(task.horizon):
        before, wanted = hidden, min(final, FIRST_HIDDEN + math.ceil((final - FIRST_HIDDEN) * epoch / steps))
        rows = list(batches.epoch(0, epoch))
        count = sum(len(batch.targets) for batch in rows)
        if wanted > hidden:
            hidden += _grow(network, rows, wanted - hidden)
            macs += PASSES_PER_STEP * count * before * (_inputs(task) + task.num_classes)  # its statistics
        if optimizer is None or hidden > before:
            optimizer = torch.optim.AdamW(network.parameters(), weight_decay=recipe.weight_decay)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * lr_factor(recipe.schedule, epoch, task.horizon)
        network.train()
        for batch in rows:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), task.lifecycle.clip_norm)
            optimizer.step()
        network.eval()
        macs += PASSES_PER_STEP * count * hidden * (_inputs(task) + task.num_classes)
        sizes.append(sum(param.numel() for param in network.parameters()))
        scores.append(score_network(network, all_rows(task, data, data.val)))
    return OutsideRun(network=network, hidden=hidden, params=tuple(sizes), scores=tuple(scores), training_macs=macs)


def _grow(network: Any, rows: list[Any], count: int) -> int:
    """Adds at most so many hidden units, and says how many it became."""
    from gromo.utils.training_utils import compute_statistics

    before = network.layers[0].out_features
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # singular matrices are usual in small networks, and handled
        compute_statistics(
            network, [(batch.inputs, batch.targets) for batch in rows], nn.CrossEntropyLoss(reduction="sum")
        )
        network.compute_optimal_updates(maximum_added_neurons=count, compute_delta=False)
    network.reset_computation()
    network.dummy_select_update()
    network.set_scaling_factor(1.0)
    network.apply_change()
    return int(network.layers[0].out_features - before)
