"""SQL types and columns from the payload records, so that a renamed field is an error, not a column of NULLs."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

_SCALARS: dict[Any, str] = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "VARCHAR"}


def sql_type(annotation: Any) -> str:
    """The DuckDB type of a field: None disappears, records become structs, mappings become maps."""
    annotation = without_none(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if origin is Literal or (
        isinstance(annotation, type) and issubclass(annotation, str) and issubclass(annotation, Enum)
    ):
        return "VARCHAR"
    if origin is tuple and args[1:] == (Ellipsis,):
        return f"{sql_type(args[0])}[]"
    if origin is not None and issubclass(origin, Mapping):
        return f"MAP({sql_type(args[0])}, {sql_type(args[1])})"
    if is_dataclass(annotation) or is_typeddict(annotation):
        return struct_type(annotation)
    raise TypeError(f"no SQL type for {annotation}")


def struct_type(record: Any, **instead: str) -> str:
    """The struct of a record; `instead` gives fields another type."""
    hints = get_type_hints(record)
    parts = (f"{quoted(name)} {instead[name] if name in instead else sql_type(hints[name])}" for name in hints)
    return f"STRUCT({', '.join(parts)})"


def without_none(annotation: Any) -> Any:
    """The annotation of the value when it is measured."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def flat_columns(payload: Any, *, without: tuple[str, ...] = (), path: str = "data", prefix: str = "") -> Iterator[str]:
    """A select list with one column per field; a nested record gives one per field of its own, as in `lstm_h_rms`."""
    hints = get_type_hints(payload)
    unknown = set(without) - set(hints)
    assert not unknown, f"{payload.__name__} has no {unknown}"
    for name in hints:
        if name in without:
            continue
        inner, place = without_none(hints[name]), f"{path}.{quoted(name)}"
        if is_dataclass(inner) or is_typeddict(inner):
            yield from flat_columns(inner, path=place, prefix=f"{prefix}{name}_")
        else:
            yield f"{place} AS {quoted(prefix + name)}"


def quoted(name: str) -> str:
    """A name that SQL takes as a name, whatever it means otherwise: `limit` and `group` are among them."""
    return f'"{name}"'
