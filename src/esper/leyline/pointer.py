"""Paths into a payload, written as JSON Pointers (RFC 6901). Layer names contain dots, so dots cannot separate."""

from __future__ import annotations

from collections.abc import Sequence


def join_path(parts: Sequence[str | int]) -> str:
    """Writes a path: ("heads", "op", "kl") becomes "/heads/op/kl"."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def split_path(path: str) -> tuple[str, ...]:
    """Reads a path that `join_path` wrote. List positions come back as digits."""
    assert path.startswith("/"), f"not a path: {path!r}"
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/"))
