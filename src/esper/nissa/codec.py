"""Writes one event as one line of JSON. It knows no files, and reading lines back is another package's work.

JSON has no NaN: msgspec writes null, which would read as "not measured". So a line whose payload holds such numbers
ends in a map from their paths to what they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from operator import attrgetter, getitem, itemgetter
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from esper.leyline import EVENTS, LoggedEvent, join_path

Path = tuple[str | int, ...]
Finder = Callable[[Any, Path, dict[str, str]], None]
"""Looks through a value and notes each number that is not finite under its path."""

_encoder = msgspec.json.Encoder()


def encode(line: LoggedEvent) -> bytes:
    """One complete line, newline included.

    Raises:
        TypeError: The payload holds something that is no plain value, such as a tensor.
    """
    text = _encoder.encode(line)
    odd = nonfinite(line.data)
    if odd:
        text = text[:-1] + b',"nonfinite":' + _encoder.encode(odd) + b"}"
    return text + b"\n"


def nonfinite(payload: object) -> dict[str, str]:
    """Where a payload holds numbers that are not finite, and which: nan, inf or -inf."""
    found: dict[str, str] = {}
    find = _FINDERS[type(payload)]
    if find is not None:
        find(payload, (), found)
    return found


def _find_in_number(value: float, path: Path, found: dict[str, str]) -> None:
    if not math.isfinite(value):
        found[join_path(path)] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _finder_of_record(cls: type) -> Finder | None:
    hints = get_type_hints(cls)
    finders = {name: find for name, hint in hints.items() if (find := _finder_of_hint(hint)) is not None}
    if not finders:
        return None
    read, getter = (getitem, itemgetter) if is_typeddict(cls) else (getattr, attrgetter)
    numbers = [name for name, find in finders.items() if find is _find_in_number]
    others = [(name, find) for name, find in finders.items() if find is not _find_in_number]
    get_numbers: Callable[[Any], Any] = getter(*numbers) if len(numbers) > 1 else _each(read, numbers)

    def find_in_record(value: Any, path: Path, found: dict[str, str]) -> None:
        if not _all_finite(get_numbers(value)):
            for name in numbers:
                if (part := read(value, name)) is not None:
                    _find_in_number(part, (*path, name), found)
        for name, find in others:
            if part := read(value, name):
                find(part, (*path, name), found)

    return find_in_record


def _each(read: Callable[[Any, str], Any], names: Sequence[str]) -> Callable[[Any], tuple[float | None, ...]]:
    return lambda value: tuple(read(value, name) for name in names)


def _all_finite(values: Iterable[float | None]) -> bool:
    """Looks at all at once: one that is not finite makes their sum so. False may also mean a sum that is too large."""
    return math.isfinite(sum(filter(None, values)))


def _finder_of_hint(hint: Any) -> Finder | None:
    """The finder for values of an annotated type; None where no float can be."""
    if hint is float:
        return _find_in_number
    if isinstance(hint, type) and (is_dataclass(hint) or is_typeddict(hint)):
        return _finder_of_record(hint)
    origin, arguments = get_origin(hint), [a for a in get_args(hint) if a not in (type(None), Ellipsis)]
    if origin in (Union, UnionType):
        assert len(arguments) == 1, f"{hint}: a payload field has one type, or one type and None"
        return _finder_of_hint(arguments[0])
    if origin is not None and _is_class(origin, Mapping):
        return _over(_finder_of_hint(arguments[1]), lambda values: values.items(), lambda values: values.values())
    if origin is tuple:
        return _over(_finder_of_hint(arguments[0]), enumerate, lambda values: values)
    return None


def _is_class(origin: Any, base: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, base)


def _over(find: Finder | None, pairs: Callable[[Any], Any], parts: Callable[[Any], Any]) -> Finder | None:
    if find is None:
        return None

    def find_in_all(values: Any, path: Path, found: dict[str, str]) -> None:
        if find is _find_in_number and _all_finite(parts(values)):
            return
        for key, value in pairs(values):
            find(value, (*path, key), found)

    return find_in_all


_FINDERS: dict[type, Finder | None] = {spec.payload: _finder_of_record(spec.payload) for spec in EVENTS.values()}
