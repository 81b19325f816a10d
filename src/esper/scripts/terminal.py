"""How commands print: text as it is, and numbers as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console


def plain_console(*, width: int | None = None, soft_wrap: bool = False, highlight: bool = True) -> Console:
    """A console that takes brackets and colons for what they are.

    Paths, names and what a log holds may look like rich's markup or its names of emoji; rich would swallow or change
    them, or fail.
    """
    return Console(width=width, soft_wrap=soft_wrap, highlight=highlight, markup=False, emoji=False)


def json_ready(value: Any) -> Any:
    """JSON has no word for numbers that are not finite; they become text, so that null keeps its meaning."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    return [json_ready(entry) for entry in value] if isinstance(value, list | tuple) else value
