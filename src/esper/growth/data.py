"""The user's data as batches: tensors, arrays, data sets, loaders, or lists of batches.

The order of an epoch follows from the run's seed and the epoch alone, so any epoch can be run again with the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from esper.growth.structure import map_tensors
from esper.leyline import derive_seed

Data = Any
"""Tensors or arrays (inputs..., target), a dict of them, a Dataset (also of Hugging Face), a DataLoader, a list of
batches."""


class Batches:
    """Data, cut into batches.

    Args:
        data: What the user has.
        batch_size: Rows of a batch, where the data is not cut yet.
        shuffle: Whether the order is drawn anew in each epoch, where it is not the data's own.
        device: Where batches are wanted.
        what: Name of the data in messages.

    Raises:
        ValueError: There is no data, or it cannot be read more than once.
    """

    def __init__(self, data: Data, batch_size: int, *, shuffle: bool, device: torch.device, what: str) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if data is None:
            raise ValueError(f"there is no {what} data; pass tensors (inputs, targets), a Dataset or a DataLoader")
        self._data = _readable(data, what)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._device = device
        self._what = what
        if isinstance(self._data, Mapping | tuple):
            _check_rows(self._data, what)
        self.first = self._first()
        """The first batch, in the order of the data."""

    def _first(self) -> Any:
        for batch in self.in_order():
            return batch
        raise ValueError(f"the {self._what} data is empty; at least one batch is needed")

    @property
    def count(self) -> int | None:
        """Batches of an epoch; None if the data does not say."""
        if isinstance(self._data, Mapping | tuple):
            return len(_parts(torch.arange(_num_rows(self._data)), self._batch_size))
        try:
            size = len(self._data)
        except TypeError:
            return None
        return -(-size // self._batch_size) if isinstance(self._data, Dataset) else size

    def epoch(self, run_seed: int, epoch: int) -> Iterator[Any]:
        """The batches of one epoch."""
        generator = torch.Generator().manual_seed(derive_seed(run_seed, None, None, epoch, "order"))
        for batch in self._cut(generator if self._shuffle else None):
            yield self._move(batch)

    def in_order(self) -> Iterator[Any]:
        """All batches, the same in every call, also of a loader that shuffles."""
        with seeded_everywhere(0):
            own = getattr(self._data, "generator", None)
            if isinstance(own, torch.Generator):
                own.manual_seed(0)
            for batch in self._cut(None):
                yield self._move(batch)

    def _move(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def _cut(self, generator: torch.Generator | None) -> Iterator[Any]:
        data = self._data
        if isinstance(data, Mapping | tuple):
            rows = _num_rows(data)
            order = torch.arange(rows) if generator is None else torch.randperm(rows, generator=generator)
            for part in _parts(order, self._batch_size):
                yield map_tensors(data, lambda tensor, part=part: tensor[part])  # type: ignore[misc]
        elif isinstance(data, Dataset):
            shuffle = generator is not None and not isinstance(data, IterableDataset)
            yield from DataLoader(data, self._batch_size, shuffle=shuffle, generator=generator)
        else:
            own = getattr(data, "generator", None)
            if isinstance(own, torch.Generator) and generator is not None:
                own.manual_seed(generator.initial_seed())
            yield from data


def _parts(order: Tensor, size: int) -> list[Tensor]:
    """Rows of each batch. A single row that is left over joins the batch before: no batch norm can be trained on it."""
    parts = list(torch.split(order, size))
    if len(parts) > 1 and len(parts[-1]) == 1 and size > 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _readable(data: Data, what: str) -> Any:
    """Rows as a tuple or dict of tensors, a Dataset, or something that gives batches again and again."""
    if isinstance(data, DataLoader | Dataset):
        return data
    if hasattr(data, "with_format") and hasattr(data, "column_names"):
        return _HuggingFaceRows(data.with_format("torch"))
    if isinstance(data, Mapping):
        return {key: _tensor(value) for key, value in data.items()}
    if isinstance(data, tuple | list) and data and all(map(_is_column, data)):
        return tuple(map(_tensor, data))
    if isinstance(data, tuple):
        return list(data)
    if isinstance(data, Tensor | np.ndarray):
        raise ValueError(f"the {what} data is one tensor; pass (inputs, targets), or a DataLoader with your own loss")
    if isinstance(data, Iterator):
        raise ValueError(
            f"the {what} data can be read only once; pass a list, a Dataset or a DataLoader instead of an iterator"
        )
    if not hasattr(data, "__iter__") or isinstance(data, str | bytes):
        raise ValueError(
            f"the {what} data must be tensors (inputs, targets), a Dataset, a DataLoader or a list of batches, got "
            f"{type(data).__name__}"
        )
    return data


class _HuggingFaceRows(Dataset[Any]):
    """A data set of Hugging Face, without the columns that are no numbers."""

    def __init__(self, data: Any) -> None:
        self._data = data
        if len(data):
            self._columns = [name for name, value in data[0].items() if isinstance(value, Tensor)]

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        found = self._data[row]
        return {name: found[name] for name in self._columns}


def _is_column(part: Any) -> bool:
    """True for one entry per row: a tensor, an array, a column or table of pandas, a list of numbers or of rows."""
    while isinstance(part, list) and part:
        part = part[0]
        if isinstance(part, Tensor | np.ndarray):
            return False  # a batch
    return isinstance(part, Tensor | np.ndarray | int | float) or hasattr(part, "to_numpy")


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    tensor = torch.as_tensor(array if array.flags.writeable else array.copy())  # tensors can always be written to
    return tensor.float() if tensor.dtype is torch.float64 else tensor  # numpy's default, which no layer takes


def _num_rows(data: Mapping[str, Tensor] | Sequence[Tensor]) -> int:
    parts = data.values() if isinstance(data, Mapping) else data
    return next(iter(parts)).shape[0]


def _check_rows(data: Mapping[str, Tensor] | Sequence[Tensor], what: str) -> None:
    parts = list(data.values() if isinstance(data, Mapping) else data)
    sizes = [part.shape[0] if part.dim() else None for part in parts]
    if len(set(sizes)) != 1:
        raise ValueError(f"the parts of the {what} data must have one entry per row each, got {sizes}")


@contextmanager
def seeded_everywhere(rng_seed: int) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python for the block, for code that draws from them.

    Dropout, shuffling loaders and augmentations do. Their states are put back afterwards.
    """
    states = (random.getstate(), np.random.get_state())
    with torch.random.fork_rng():
        try:
            torch.manual_seed(rng_seed)
            np.random.seed(rng_seed % 2**32)
            random.seed(rng_seed)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
