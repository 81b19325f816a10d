"""Batches and outputs of any structure: tensors inside tuples, lists, dicts and their subclasses.

Anything else (caches, packed sequences, plain values) is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Path = tuple[Any, ...]
"""Keys and positions that lead to a tensor; empty for the structure that is a tensor itself."""


def tensors(found: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a structure, with its path."""
    if isinstance(found, Tensor):
        yield path, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from tensors(value, (*path, key))
    elif _is_sequence(found):
        for position, value in enumerate(found):
            yield from tensors(value, (*path, position))


def pick(found: Any, path: Path) -> Any:
    """What a path leads to.

    Raises:
        LookupError: The structure has no such place.
    """
    for key in path:
        if not isinstance(found, Mapping | tuple | list):
            raise LookupError(f"no {key!r} in a {type(found).__name__}")
        found = found[key]
    return found


def put(found: Any, path: Path, value: Any) -> Any:
    """The structure with one place replaced. The original stays as it is."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(found, Mapping):
        changed = copy.copy(found)
        changed[key] = put(found[key], rest, value)  # type: ignore[index]
        return changed
    entries = list(found)
    entries[key] = put(entries[key], rest, value)
    return _rebuilt(found, entries)


def map_tensors(found: Any, change: Callable[[Tensor], Any]) -> Any:
    """The structure with every tensor replaced by what `change` makes of it."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, Mapping):
        changed = copy.copy(found)
        for key, value in found.items():
            changed[key] = map_tensors(value, change)  # type: ignore[index]
        return changed
    if _is_sequence(found):
        return _rebuilt(found, [map_tensors(value, change) for value in found])
    return found


def num_rows(batch: Any) -> int:
    """Rows of a batch: the first axis of its first tensor that has one.

    Raises:
        ValueError: There is no such tensor.
    """
    for _, tensor in tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise ValueError(f"a batch must hold a tensor with one row per sample, got {type(batch).__name__}")


def first_rows(batch: Any, count: int) -> Any:
    """The first rows of a batch; tensors that do not have one entry per row stay as they are."""
    rows = num_rows(batch)
    return map_tensors(batch, lambda tensor: tensor[:count] if tensor.dim() and tensor.shape[0] == rows else tensor)


def _is_sequence(found: Any) -> bool:
    return isinstance(found, tuple | list) and not isinstance(found, PackedSequence)


def _rebuilt(found: Any, entries: list[Any]) -> Any:
    return type(found)(*entries) if hasattr(found, "_fields") else type(found)(entries)
