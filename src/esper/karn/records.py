"""Records from JSON, also from an Esper that did not know all of their fields yet. Knows types, not what they mean.

A field that may be None can be added without a new version of the schema. Where an older build did not write it, it
was not measured: it reads as None. Every other field must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from esper.karn.columns import without_none

R = TypeVar("R")
Filler = Callable[[Any], None]
"""Adds what is missing to a tree of JSON values, in place. What is no tree of its type is left for others to refuse."""


class RecordDecoder(Generic[R]):
    """Reads one type of record. Costs nothing extra where all fields are there."""

    def __init__(self, record: type[R]) -> None:
        self._record = record
        self._strict = msgspec.json.Decoder(record)
        self._fill = _filler(record)

    def decode(self, content: bytes | msgspec.Raw) -> R:
        """The record.

        Raises:
            msgspec.DecodeError: The content is no such record.
        """
        try:
            return self._strict.decode(content)
        except msgspec.ValidationError:
            return self.convert(msgspec.json.decode(content))

    def convert(self, tree: Any) -> R:
        """The record from JSON values that are read already. Changes the tree.

        Raises:
            msgspec.ValidationError: They are no such record.
        """
        if self._fill is not None:
            self._fill(tree)
        return msgspec.convert(tree, self._record, str_keys=True)


def _filler(annotation: Any) -> Filler | None:
    """The filler for values of an annotated type; None where nothing could be missing."""
    annotation = without_none(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation):
        return _fill_record(annotation)
    if origin is tuple:
        return _fill_each(_filler(args[0]), list, iter)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _fill_each(_filler(args[1]), dict, lambda tree: tree.values())
    return None


def _fill_record(record: Any) -> Filler | None:
    hints = get_type_hints(record)
    optional = [name for name, hint in hints.items() if without_none(hint) is not hint]
    parts = [(name, part) for name, hint in hints.items() if (part := _filler(hint)) is not None]
    if not optional and not parts:
        return None

    def fill(tree: Any) -> None:
        if not isinstance(tree, dict):
            return
        for name in optional:
            tree.setdefault(name, None)
        for name, part in parts:
            if name in tree:
                part(tree[name])

    return fill


def _fill_each(fill: Filler | None, kind: type, parts: Callable[[Any], Any]) -> Filler | None:
    if fill is None:
        return None

    def fill_all(tree: Any) -> None:
        if isinstance(tree, kind):
            for part in parts(tree):
                fill(part)

    return fill_all
