"""What a task is, and what makes one whole: host, slots, blueprints and data that fit together."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.blueprints import blueprints_for, get_blueprint
from esper.kasmina.hosts import Host, HostSpec, build_host
from esper.leyline import LifecycleConfig, OptimSpec, SlotConfig, record
from esper.runtime.datasets import get_source

METRICS: tuple[str, ...] = ("accuracy", "loss")
AUGMENTATIONS: tuple[str, ...] = ("crop_flip",)


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
    """Data source, a key of `datasets.SOURCES`."""
    context: int | None
    """Tokens per row; None for images."""
    num_classes: int
    metric: str
    """What rewards and gates read: one of METRICS."""
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

    def __post_init__(self) -> None:
        for name in ("batch_size", "horizon", "val_chunk_rows"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_classes", self.num_classes, 2)
        if self.samples_per_epoch is not None:
            _at_least("samples_per_epoch (one batch)", self.samples_per_epoch, self.batch_size)
        if self.context is not None:
            _at_least("context", self.context, 1)
        if self.val_samples is not None:
            _at_least("val_samples", self.val_samples, 1)
        if self.metric not in METRICS:
            raise ValueError(f"unknown metric {self.metric!r}. Known: {', '.join(METRICS)}")
        if self.augment is not None and self.augment not in AUGMENTATIONS:
            raise ValueError(f"unknown augmentation {self.augment!r}. Known: {', '.join(AUGMENTATIONS)}")
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
        return blueprints_for(self.host.kind) if self.blueprints is None else self.blueprints


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


def count_host_params(spec: TaskSpec) -> int:
    """Parameters of the task's host before anything has grown."""
    return _count(_outline(spec.host))


def _count(host: Host) -> int:
    return sum(weight.numel() for weight in host.parameters())


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
    _refuse_unknown(changes, own | lifecycle | optimizer)
    changed = replace(spec, **{name: value for name, value in changes.items() if name in own})
    changed = replace(
        changed,
        lifecycle=replace(changed.lifecycle, **{name: changes[name] for name in changes.keys() & lifecycle}),
        optimizer=replace(changed.optimizer, **{name: changes[name] for name in changes.keys() & optimizer}),
    )
    check_task(changed)
    return changed


def _refuse_unknown(changes: dict[str, Any], known: set[str]) -> None:
    for name in changes.keys() - known:
        close = get_close_matches(name, sorted(known), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}"
        raise ValueError(f"a task has no field {name!r}. {hint}")


def check_task(spec: TaskSpec) -> None:
    """Checks that host, slots, blueprints and data of a task fit together, by running the host once.

    Raises:
        ValueError: They do not; the message says what was expected and found.
    """
    source = get_source(spec.data)
    if source.is_text != (spec.context is not None):
        raise ValueError(f"context is for text: data source {spec.data!r} with context {spec.context}")
    if spec.augment is not None and source.is_text:
        raise ValueError(f"augment {spec.augment!r} is for images; data source {spec.data!r} is text")
    if spec.channels_last and spec.host.kind != "cnn":
        raise ValueError(f"channels_last is for cnn hosts; the host of {spec.name} is of kind {spec.host.kind!r}")
    host = _outline(spec.host)
    _check_growth(spec, host)
    sample = _sample(spec)
    try:
        with torch.no_grad():
            out = host.eval()(sample)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the host of {spec.name} cannot take rows of {tuple(sample.shape[1:])}: {error}") from error
    if out.shape[-1] != spec.num_classes:
        raise ValueError(f"{spec.name} has {spec.num_classes} classes, its host puts out {out.shape[-1]}")


def _sample(spec: TaskSpec) -> Tensor:
    row_shape = get_source(spec.data).row_shape
    if row_shape is not None:
        return torch.zeros((2, *row_shape))
    assert spec.context is not None
    return torch.zeros((2, spec.context), dtype=torch.int64)


def _check_growth(spec: TaskSpec, host: Host) -> None:
    budget, params = spec.lifecycle.param_budget, _count(host)
    if budget is not None and budget < params:
        raise ValueError(f"param_budget {budget} of {spec.name} is below the {params} parameters of its host alone")
    offered = tuple(slot_id for slot_id in host.slots if slot_id in spec.slots)
    if offered != spec.slots:
        raise ValueError(
            f"slots of {spec.name} must be among those of its host, in execution order ({', '.join(host.slots)}); "
            f"got {', '.join(spec.slots)}"
        )
    for key in spec.blueprint_keys:
        if get_blueprint(key).topology != host.topology:
            raise ValueError(f"blueprint {key!r} does not fit a host of topology {host.topology!r}")
