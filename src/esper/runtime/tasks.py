"""The table of tasks: which host learns what, where it may grow, and for how long.

A task is one frozen row of plain values. To add one, append a row; its tests and its line in `esper tasks` come with
it. A task of the user's own names functions instead (`own.py`). Knows hosts and data; knows no envs and no training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints import blueprints_for, get_blueprint
from esper.kasmina.hosts import Host, HostSpec, build_host
from esper.leyline import AUGMENTATIONS, DEFAULT_LIFECYCLE, LifecycleConfig, OptimSpec, SlotConfig, check_known, record
from esper.leyline.references import load_function
from esper.leyline.scale import MetricScale
from esper.runtime.data.splits import Dataset, Split, spread
from esper.runtime.data.variants import DataVariant
from esper.runtime.datasets import get_source, load_dataset
from esper.runtime.own import check_own_functions, is_own, load_own_data

METRICS: tuple[str, ...] = ("accuracy", "loss")


@record
class TaskSpec:
    """One task. `check_task` looks at the whole; here each field is checked for itself."""

    name: str
    description: str
    host: HostSpec
    slots: tuple[str, ...]
    """Slot ids offered for growth, in execution order; a host may have more."""
    blueprints: tuple[str, ...] | None
    """Blueprint keys offered. None: all of the host's topology but the controls."""
    data: str
    """Data source: a key of `datasets.SOURCES`, or the place of a function that returns the user's own."""
    variant: DataVariant | None
    """What is done to that data first. None: it is used as it is."""
    context: int | None
    """Tokens per row; None for images."""
    num_classes: int
    metric: str
    """What rewards and gates read: one of METRICS, or the place of a function of (outputs, targets) that returns a mean
    over rows."""
    batch_size: int
    samples_per_epoch: int | None
    """Most training rows per epoch. None: all."""
    val_samples: int | None
    """Most controller-validation rows, spread evenly over the split. None: all."""
    val_chunk_rows: int
    """Rows per forward pass in validation. Part of the task because float sums depend on it."""
    horizon: int
    """Epochs in an episode."""
    optimizer: OptimSpec
    lifecycle: LifecycleConfig
    augment: str | None
    """One of AUGMENTATIONS, on training batches only."""
    channels_last: bool
    """Memory format of images: faster from 28x28 up, and part of the task because it changes float sums."""
    loss: str | None = None
    """Place of a function of (outputs, targets) that returns a mean over rows. None: cross-entropy."""
    scale: MetricScale | None = None
    """What a loss or metric of the user's own means to controllers. None: accuracy and nats as they are."""

    def __post_init__(self) -> None:
        for name, value, low in (
            ("batch_size", self.batch_size, 1),
            ("horizon", self.horizon, 1),
            ("val_chunk_rows", self.val_chunk_rows, 1),
            ("num_classes", self.num_classes, 2),
            ("samples_per_epoch (one batch)", self.samples_per_epoch, self.batch_size),
            ("context", self.context, 1),
            ("val_samples", self.val_samples, 1),
        ):
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if self.metric not in METRICS and not is_own(self.metric):
            raise ValueError(
                f"unknown metric {self.metric!r}. Known: {', '.join(METRICS)}, or a function as FILE.py:FUNCTION"
            )
        if (self.loss is not None or is_own(self.metric)) and self.scale is None:
            raise ValueError(
                "a loss or metric of your own needs scale=..., which says what knowing nothing and perfection read: "
                "r2_scale(variance of the targets) for a squared error, or a MetricScale"
            )
        if self.scale is not None and self.scale.classes != self.num_classes:
            raise ValueError(f"num_classes must be that of the scale, {self.scale.classes}, got {self.num_classes}")
        if self.augment is not None:
            check_known("augmentation", self.augment, AUGMENTATIONS)
        if not self.slots:
            raise ValueError("slots must name at least one place to grow")
        SlotConfig(slot_ids=self.slots)
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("blueprints must name at least one seed to plant, or be None for all that fit")

    @property
    def chance_loss(self) -> float:
        """Loss in nats of a guess that gives every class the same chance."""
        return math.log(self.num_classes)

    @property
    def blueprint_keys(self) -> tuple[str, ...]:
        """The blueprints offered, in head order."""
        return blueprints_for(self.host.topology) if self.blueprints is None else self.blueprints


# ---- the table


def _mlp(*hidden: int) -> HostSpec:
    return HostSpec(kind="mlp", kwargs={"inputs": 64, "hidden": list(hidden), "classes": 10, "input_slot": True})


def _cnn(in_channels: int, *channels: int, kernel: int, pools: int) -> HostSpec:
    pool = [block < pools for block in range(len(channels))]
    kwargs = {"in_channels": in_channels, "channels": list(channels), "kernel": kernel, "pool": pool, "classes": 10}
    return HostSpec(kind="cnn", kwargs=kwargs)


def _transformer(*, dim: int, heads: int, layers: int, ff: int, context: int) -> HostSpec:
    kwargs = {"vocab": 256, "dim": dim, "heads": heads, "layers": layers, "ff": ff, "context": context}
    return HostSpec(kind="transformer", kwargs=kwargs)


def adamw_spec(lr: float) -> OptimSpec:
    """AdamW along a cosine."""
    return OptimSpec(kind="adamw", lr=lr, weight_decay=0.01, momentum=0.0, schedule="cosine")


_DIGITS_MLP = TaskSpec(
    name="digits_mlp",
    description="a bottleneck that only a span from the input to the logits widens",
    host=_mlp(16),
    slots=("r0c0", "r0c1"),
    blueprints=None,
    data="digits",
    variant=None,
    context=None,
    num_classes=10,
    metric="accuracy",
    batch_size=64,
    samples_per_epoch=None,
    val_samples=None,
    val_chunk_rows=512,
    horizon=40,
    optimizer=adamw_spec(1e-2),
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
    optimizer=adamw_spec(3e-3),
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
    optimizer=adamw_spec(5e-3),
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
        replace(_DIGITS_MLP, slots=("r0c0", "r0c1", "r3c0")),
        replace(
            _DIGITS_MLP,
            name="digits_limited",
            description="capacity-limited: a linear host that gains from hidden units",
            host=_mlp(),
            slots=("r0c0",),
            optimizer=adamw_spec(3e-2),
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
            slots=("r0c0", "r1c0", "r2c0", "r0c1", "r3c0"),
            batch_size=32,
        ),
        _PYDOC_LM,
        replace(_FASHION_TINY, slots=("r0c0", "r0c1", "r0c2", "r3c0")),
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
            optimizer=adamw_spec(3e-4),
        ),
    )
}


_ASKED_FOR: set[str] = set()
"""Functions that this process was told to call for their task, by anything but a file it has read."""


def get_task_spec(name: str, *, by_a_file: bool = False) -> TaskSpec:
    """Looks a task up by name, in any case: a row of the table, a draw of the nursery such as "nursery:7", or what a
    function of the user's returns, such as "file.py:make_task".

    Args:
        name: The task.
        by_a_file: True if a file gave the name, such as a checkpoint, which anybody may have written. A function is
            then called only if it was asked for in this process before.

    Raises:
        ValueError: No task has that name; the message lists the known ones.
    """
    task = TASKS.get(name.lower())
    if task is not None:
        return task
    from esper.runtime.nursery import HELD_OUT, NURSERY, any_nursery_task, heldout_task, nursery_task

    place, _, number = name.lower().partition(":")
    if name.lower() == NURSERY:
        return any_nursery_task()
    if number.isdecimal() and place in (NURSERY, HELD_OUT):
        return nursery_task(int(number)) if place == NURSERY else heldout_task(int(number))
    if number.isidentifier() and place not in (NURSERY, HELD_OUT):
        if by_a_file and name not in _ASKED_FOR:
            raise ValueError(
                f"its task is what the code of {name} returns, which is not run because a file says so. If you trust "
                f"that code, name it yourself: --task {name}, or get_task_spec({name!r}) before this"
            )
        _ASKED_FOR.add(name)
        return _own_task(name)
    raise ValueError(
        f"unknown task {name!r}. Known: {', '.join(TASKS)}, draws such as nursery:0 or heldout:0 "
        "(`esper tasks --nursery`), and your own as FILE.py:FUNCTION"
    )


def _own_task(where: str) -> TaskSpec:
    task = load_function(where)()
    if not isinstance(task, TaskSpec):
        raise ValueError(f"{where} must return a TaskSpec, got {type(task).__name__}")
    return task


# ---- what makes a task whole


def count_host_params(spec: TaskSpec) -> int:
    """Parameters of the task's host before anything has grown."""
    return sum(weight.numel() for weight in _outline(spec.host).parameters())


def _outline(host: HostSpec) -> Host:
    """A host to look at, never to train: which weights it has does not matter."""
    return build_host(host, torch.Generator().manual_seed(0))


def override(spec: TaskSpec, **changes: Any) -> TaskSpec:
    """A copy of a task with some fields changed, checked as a whole.

    Args:
        spec: The task to start from.
        changes: New values by field name; fields of the lifecycle (`param_budget`) and of the optimizer (`lr`) may be
            given by their own names.

    Raises:
        ValueError: A field is unknown, or the result makes no sense; the message says what was expected.
    """
    own, lifecycle, optimizer = (
        {field.name for field in fields(part)} for part in (spec, spec.lifecycle, spec.optimizer)
    )
    known = own | lifecycle | optimizer
    for name in changes.keys() - known:
        close = get_close_matches(name, sorted(known), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}"
        raise ValueError(f"a task has no field {name!r}. {hint}")
    changed = replace(spec, **{name: value for name, value in changes.items() if name in own})
    changed = replace(
        changed,
        lifecycle=replace(changed.lifecycle, **{name: changes[name] for name in changes.keys() & lifecycle}),
        optimizer=replace(changed.optimizer, **{name: changes[name] for name in changes.keys() & optimizer}),
    )
    check_task(changed)
    return changed


def check_task(spec: TaskSpec) -> None:
    """Checks that host, slots, blueprints and data of a task fit together, by running the host once.

    Raises:
        ValueError: They do not; the message says what was expected and found.
    """
    if is_own(spec.data):
        if (spec.variant, spec.context, spec.augment) != (None, None, None):
            raise ValueError(f"variant, context and augment are for bundled data; {spec.name} has data of its own")
        _check_growth(spec, _outline(spec.host))
        return
    source = get_source(spec.data)
    if source.is_text != (spec.context is not None):
        raise ValueError(f"context is for text: data source {spec.data!r} with context {spec.context}")
    if spec.variant is not None and source.is_text:
        raise ValueError(f"variant is for images; data source {spec.data!r} is text")
    if spec.augment is not None and source.is_text:
        raise ValueError(f"augment {spec.augment!r} is for images; data source {spec.data!r} is text")
    if spec.channels_last and spec.host.kind != "cnn":
        raise ValueError(f"channels_last is for cnn hosts; the host of {spec.name} is of kind {spec.host.kind!r}")
    host = _outline(spec.host)
    _check_growth(spec, host)
    out = _run_host(spec, host, blank_rows(spec))
    if spec.loss is None and out.shape[-1] != spec.num_classes:
        raise ValueError(f"{spec.name} has {spec.num_classes} classes, its host puts out {out.shape[-1]}")


def blank_rows(spec: TaskSpec) -> Tensor:
    """Two rows of the shape that a task's bundled data has."""
    shape = get_source(spec.data).row_shape
    if shape is not None:
        return torch.zeros((2, *shape))
    assert spec.context is not None
    return torch.zeros((2, spec.context), dtype=torch.int64)


def _run_host(spec: TaskSpec, host: Host, rows: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            outputs: Tensor = host.eval()(rows)
            return outputs
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the host of {spec.name} cannot take rows of {tuple(rows.shape[1:])}: {error}") from error


def _check_growth(spec: TaskSpec, host: Host) -> None:
    budget, params = spec.lifecycle.param_budget, sum(weight.numel() for weight in host.parameters())
    if budget is not None and budget < params:
        raise ValueError(f"param_budget {budget} of {spec.name} is below the {params} parameters of its host alone")
    offered = tuple(slot_id for slot_id in host.places if slot_id in spec.slots)
    if offered != spec.slots:
        raise ValueError(
            f"slots of {spec.name} must be among those of its host, in execution order ({', '.join(host.places)}); "
            f"got {', '.join(spec.slots)}"
        )
    for key in spec.blueprint_keys:
        if get_blueprint(key).topology != host.topology:
            raise ValueError(f"blueprint {key!r} does not fit a host of topology {host.topology!r}")


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
    if is_own(spec.data):
        return _own_rows(spec, load_own_data(spec.data))
    return task_rows(spec, load_dataset(spec.data, context=spec.context, data_dir=data_dir, variant=spec.variant))


def _own_rows(spec: TaskSpec, dataset: Dataset) -> Dataset:
    """The user's data for the user's task: the host, the loss and the metric are tried on two rows."""
    classes = dataset.num_classes if spec.loss is None else spec.num_classes
    rows = task_rows(spec, replace(dataset, num_classes=classes))
    outputs = _run_host(spec, _outline(spec.host), rows.train.inputs[:2])
    check_own_functions(spec.name, spec.loss, spec.metric, outputs, rows.train.targets[:2])
    return rows


def load_tasks_data(specs: Sequence[TaskSpec], data_dir: str | Path | None = None) -> list[Dataset]:
    """Loads the data of several tasks. Each source is read once, and tasks that use it hold the same tensors."""
    read = cache(partial(load_dataset, data_dir=data_dir))
    for spec in specs:
        check_task(spec)
    return [
        load_task_data(spec)
        if is_own(spec.data)
        else task_rows(spec, read(spec.data, context=spec.context, variant=spec.variant))
        for spec in specs
    ]


def task_rows(spec: TaskSpec, dataset: Dataset) -> Dataset:
    """What a task makes of its source: the val split cut down to `val_samples`.

    Raises:
        ValueError: They do not fit together.
    """
    if dataset.num_classes != spec.num_classes:
        raise ValueError(f"{spec.name} has {spec.num_classes} classes, {spec.data} has {dataset.num_classes}")
    if spec.batch_size > len(dataset.train):
        raise ValueError(f"batch_size {spec.batch_size} of {spec.name}: only {len(dataset.train)} training rows")
    if spec.val_samples is None:
        return dataset
    rows = torch.from_numpy(spread(len(dataset.val), spec.val_samples))
    val = Split(inputs=dataset.val.inputs[rows], targets=dataset.val.targets[rows])
    return replace(dataset, val=val)
