"""Tasks of the user's own: host, data, loss and metric are functions that every worker finds by their names.

They are trained like the bundled ones, by the engine and under every controller. What a metric and a loss mean to
controllers is said by a `MetricScale`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.hosts import HostSpec
from esper.leyline.references import load_function, name_of
from esper.runtime.data.splits import Content, Dataset, Split, digest, make_content


def user_host(make: Callable[..., Any] | str, topology: str) -> HostSpec:
    """A host that `make()` returns, such as one by `esper.kasmina.wrap_sequential`. Its weights are seeded anew."""
    return HostSpec(kind="user", kwargs={"make": name_of(make), "topology": topology})


def is_own(source: str) -> bool:
    """True for data that a function of the user's returns."""
    return ":" in source


def load_own_data(where: str) -> Dataset:
    """What a function of the user's returns: (train, validation) or (train, validation, test), each (inputs, targets).

    Raises:
        ValueError: It returns something else.
    """
    return Dataset.load(where, where, partial(read_own_data, where))


def read_own_data(where: str) -> Content:
    """All splits; without test rows that split is empty."""
    found = load_function(where)()
    if not isinstance(found, tuple | list) or len(found) not in (2, 3):
        raise ValueError(f"{where} must return (train, validation) or (train, validation, test), got {_kind(found)}")
    names = ("train", "val", "test")
    splits = {name: _split(where, name, part) for name, part in zip(names, found, strict=False)}
    if "test" not in splits:
        splits["test"] = Split(inputs=splits["val"].inputs[:0], targets=splits["val"].targets[:0])
    hashes = {name: digest(part.inputs.numpy(), part.targets.numpy()) for name, part in splits.items()}
    targets = splits["train"].targets
    classes = 2 if targets.is_floating_point() else max(2, int(targets.max()) + 1)
    return make_content(f"data of {where}", classes, splits, hashes)


def _split(where: str, name: str, part: Any) -> Split:
    tensors = part.tensors if isinstance(part, torch.utils.data.TensorDataset) else part
    if not isinstance(tensors, tuple | list) or len(tensors) != 2 or not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(f"{where}: {name} must be (inputs, targets), two tensors of as many rows; got {_kind(part)}")
    inputs, targets = (tensor.detach().cpu().contiguous() for tensor in tensors)
    if len(inputs) != len(targets) or (name != "test" and len(inputs) < 2):
        raise ValueError(f"{where}: {name} has {len(inputs)} inputs and {len(targets)} targets; expected two or more")
    return Split(inputs=inputs, targets=targets)


def _kind(found: Any) -> str:
    return f"{type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else type(found).__name__


def check_own_functions(name: str, loss: str | None, metric: str, outputs: Tensor, targets: Tensor) -> None:
    """Tries the user's loss and metric on a few rows.

    Raises:
        ValueError: One is no mean over rows: a single finite number.
    """
    for what, where in (("loss", loss), ("metric", metric if is_own(metric) else None)):
        if where is None:
            continue
        try:
            value = load_function(where)(outputs, targets)
        except (RuntimeError, TypeError, ValueError) as error:
            shapes = f"outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}"
            raise ValueError(f"{what} {where} of {name} cannot take {shapes}: {error}") from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value)):
            raise ValueError(f"{what} {where} of {name} must return the mean over rows, a finite scalar; got {value!r}")
