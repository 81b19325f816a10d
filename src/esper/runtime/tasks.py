"""The table of tasks: which host learns what, where it may grow, and for how long.

A task is one frozen row of plain values, no factories. To add one, append a row; its tests and its line in
`esper tasks` come with it. Knows hosts and data; knows no envs and no training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from esper.kasmina.hosts import HostSpec
from esper.leyline import DEFAULT_LIFECYCLE, OptimSpec
from esper.runtime.data.splits import spread
from esper.runtime.datasets import Dataset, Split, load_dataset
from esper.runtime.task_spec import TaskSpec, check_task, count_host_params, override

__all__ = ["TASKS", "TaskSpec", "check_task", "count_host_params", "get_task_spec", "load_task_data", "override"]


def _mlp(*hidden: int) -> HostSpec:
    return HostSpec(kind="mlp", kwargs={"inputs": 64, "hidden": list(hidden), "classes": 10, "input_slot": True})


def _cnn(in_channels: int, *channels: int, kernel: int, pools: int) -> HostSpec:
    pool = [block < pools for block in range(len(channels))]
    kwargs = {"in_channels": in_channels, "channels": list(channels), "kernel": kernel, "pool": pool, "classes": 10}
    return HostSpec(kind="cnn", kwargs=kwargs)


def _transformer(*, dim: int, heads: int, layers: int, ff: int, context: int) -> HostSpec:
    kwargs = {"vocab": 256, "dim": dim, "heads": heads, "layers": layers, "ff": ff, "context": context}
    return HostSpec(kind="transformer", kwargs=kwargs)


def _adamw(lr: float) -> OptimSpec:
    return OptimSpec(kind="adamw", lr=lr, weight_decay=0.01, momentum=0.0, schedule="cosine")


_DIGITS_MLP = TaskSpec(
    name="digits_mlp",
    description="low-gain control: a bottleneck that seeds cannot widen",
    host=_mlp(16),
    slots=("r0c0", "r0c1"),
    blueprints=None,
    data="digits",
    context=None,
    num_classes=10,
    metric="accuracy",
    batch_size=64,
    samples_per_epoch=None,
    val_samples=None,
    val_chunk_rows=512,
    horizon=40,
    optimizer=_adamw(1e-2),
    lifecycle=DEFAULT_LIFECYCLE,
    augment=None,
    channels_last=False,
)
_DIGITS_BLIND = replace(
    _DIGITS_MLP,
    name="digits_blind",
    description="blind: no block sees a pixel's neighbours until a seed does",
    host=_cnn(1, 8, 8, kernel=1, pools=1),
    slots=("r0c0", "r1c0", "r0c1"),
)
_PYDOC_LM = replace(
    _DIGITS_MLP,
    name="pydoc_lm",
    description="language model over Python's own documentation",
    host=_transformer(dim=32, heads=4, layers=2, ff=2, context=64),
    data="pydoc",
    context=64,
    num_classes=256,
    metric="loss",
    batch_size=32,
    samples_per_epoch=2_048,
    val_samples=256,
    val_chunk_rows=64,
    horizon=15,
    optimizer=_adamw(3e-3),
)
_FASHION_TINY = replace(
    _DIGITS_MLP,
    name="fashion_tiny",
    description="small but sighted",
    host=_cnn(1, 8, 16, 32, kernel=3, pools=2),
    slots=("r0c0", "r0c1", "r0c2"),
    data="fashion",
    batch_size=128,
    samples_per_epoch=10_000,
    val_samples=2_000,
    val_chunk_rows=250,
    optimizer=_adamw(5e-3),
    channels_last=True,
)
_CIFAR_BASELINE = replace(
    _FASHION_TINY,
    name="cifar_baseline",
    host=_cnn(3, 8, 16, 32, kernel=3, pools=2),
    data="cifar10",
    samples_per_epoch=None,
    horizon=60,
    optimizer=OptimSpec(kind="sgd", lr=0.05, weight_decay=5e-4, momentum=0.9, schedule="cosine"),
    lifecycle=replace(DEFAULT_LIFECYCLE, embargo=5),
    augment="crop_flip",
)

TASKS: dict[str, TaskSpec] = {
    task.name: task
    for task in (
        _DIGITS_MLP,
        replace(
            _DIGITS_MLP,
            name="digits_limited",
            description="capacity-limited: a linear host that gains from hidden units",
            host=_mlp(),
            slots=("r0c0",),
            optimizer=_adamw(3e-2),
        ),
        replace(
            _DIGITS_MLP, name="digits_saturated", description="saturated: the right answer is to wait", host=_mlp(64)
        ),
        _DIGITS_BLIND,
        replace(
            _DIGITS_BLIND,
            name="digits_conv",
            description="small but sighted",
            host=_cnn(1, 4, 8, kernel=3, pools=1),
            batch_size=32,
        ),
        _PYDOC_LM,
        _FASHION_TINY,
        replace(
            _FASHION_TINY,
            name="fashion_blind",
            description=_DIGITS_BLIND.description,
            host=_cnn(1, 8, 8, 8, kernel=1, pools=2),
        ),
        _CIFAR_BASELINE,
        replace(
            _CIFAR_BASELINE,
            name="cifar_impaired",
            description="blind and very narrow",
            host=_cnn(3, 1, 2, 4, kernel=1, pools=2),
            samples_per_epoch=10_000,
        ),
        replace(
            _CIFAR_BASELINE,
            name="cifar_minimal",
            description="blind and narrow, at full resolution throughout",
            host=_cnn(3, 2, 4, 8, kernel=1, pools=0),
            samples_per_epoch=10_000,
        ),
        replace(
            _CIFAR_BASELINE,
            name="cifar_scale",
            description="larger, with five slots",
            host=_cnn(3, 8, 16, 32, 64, 128, kernel=3, pools=4),
            slots=("r0c0", "r0c1", "r0c2", "r0c3", "r0c4"),
        ),
        replace(
            _PYDOC_LM,
            name="tinystories",
            description="language model over a text file; made for a GPU",
            host=_transformer(dim=384, heads=6, layers=6, ff=4, context=256),
            slots=("r0c1", "r0c3", "r0c5"),
            data="text",
            context=256,
            samples_per_epoch=8_192,
            val_samples=512,
            val_chunk_rows=32,
            horizon=50,
            optimizer=_adamw(3e-4),
        ),
    )
}


def get_task_spec(name: str) -> TaskSpec:
    """Looks a task up by name, in any case.

    Raises:
        ValueError: No task has that name; the message lists the known ones.
    """
    task = TASKS.get(name.lower())
    if task is None:
        raise ValueError(f"unknown task {name!r}. Known: {', '.join(TASKS)}")
    return task


def load_task_data(spec: TaskSpec, data_dir: str | Path | None = None) -> Dataset:
    """Loads the data of a task, with its val split cut down to `val_samples`.

    Args:
        spec: The task.
        data_dir: Where to look first; see `datasets.find_data`.

    Raises:
        DataNotFound: The data is not on this machine; the message says where it was sought and how to get it.
        DataDamaged: The data is there but is not what it claims to be.
        ValueError: Task and data do not fit together.
    """
    check_task(spec)
    dataset = load_dataset(spec.data, context=spec.context, data_dir=data_dir)
    if dataset.num_classes != spec.num_classes:
        raise ValueError(f"{spec.name} has {spec.num_classes} classes, {spec.data} has {dataset.num_classes}")
    if spec.batch_size > len(dataset.train):
        raise ValueError(f"batch_size {spec.batch_size} of {spec.name}: only {len(dataset.train)} training rows")
    if spec.val_samples is None:
        return dataset
    rows = torch.from_numpy(spread(len(dataset.val), spec.val_samples))
    val = Split(inputs=dataset.val.inputs[rows], targets=dataset.val.targets[rows])
    return replace(dataset, val=val)
