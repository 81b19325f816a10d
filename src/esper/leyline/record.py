"""The one way to declare a record that crosses a package or process boundary.

A record is frozen, slotted and keyword-only, every field is required, and it pickles by position: the default
pickling of frozen slotted dataclasses is several times slower and sits on the pipe between parent and workers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


def _rebuild(cls: type[T], values: tuple[Any, ...]) -> T:
    instance = cls.__new__(cls)
    for name, value in zip(cls.__record_fields__, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(instance, name, value)
    return instance


def _reduce(self: Any) -> tuple[Any, ...]:
    cls = type(self)
    return _rebuild, (cls, tuple(getattr(self, name) for name in cls.__record_fields__))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Turns an annotated class into a frozen, slotted, keyword-only dataclass that pickles by position."""
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    made.__record_fields__ = tuple(f.name for f in fields(made))  # type: ignore[arg-type,attr-defined]
    made.__reduce__ = _reduce  # type: ignore[method-assign]
    return made


def as_keywords(made: Any) -> dict[str, Any]:
    """The fields of a record by name, as they are: `dataclasses.asdict` copies every one."""
    return {name: getattr(made, name) for name in made.__record_fields__}
