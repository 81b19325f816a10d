"""Writes one event as one line of JSON. It knows no files, and reading lines back is another package's work.

JSON has no NaN: msgspec writes null, which would read as "not measured". So a line whose payload holds such numbers
ends in a map from their paths to what they were.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from esper.leyline import LoggedEvent, join_path

_encoder = msgspec.json.Encoder()
_binary = msgspec.msgpack.Encoder()
_MAY_BE_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]", re.DOTALL)
"""MessagePack writes a float as cb and its eight bytes; those that are not finite have all exponent bits set."""


def encode(line: LoggedEvent) -> bytes:
    """One complete line, newline included.

    Raises:
        TypeError: The payload holds something that is no plain value, such as a tensor.
    """
    text = _encoder.encode(line)
    # Nearly every payload is finite, and its bytes show that sooner than a walk through it.
    if _MAY_BE_NONFINITE.search(_binary.encode(line.data)):
        odd = {join_path(path): str(number) for path, number in _nonfinite(msgspec.to_builtins(line.data), ())}
        if odd:
            text = text[:-1] + b',"nonfinite":' + _encoder.encode(odd) + b"}"
    return text + b"\n"


def _nonfinite(part: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], float]]:
    """Every number of a tree that is not finite, with its path."""
    if isinstance(part, float) and not math.isfinite(part):
        yield path, part
    elif isinstance(part, dict | list | tuple):
        for key, entry in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _nonfinite(entry, (*path, key))
