"""How commands print: text as it is, numbers as JSON can hold them, and a warning where a record is not whole."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from esper.karn.integrity import Integrity


def plain_console(*, width: int | None = None, soft_wrap: bool = False, highlight: bool = True) -> Console:
    """A console that takes brackets and colons for what they are.

    Paths, names and what a log holds may look like rich's markup or its names of emoji; rich would swallow or change
    them, or fail.
    """
    return Console(width=width, soft_wrap=soft_wrap, highlight=highlight, markup=False, emoji=False)


def progress_bar(console: Console, *, width: int, facts: bool = False) -> Progress:
    """A bar per task, behind its description in so many columns; with `facts`, a field of that name beside it."""
    columns: list[ProgressColumn] = [
        TextColumn(f"{{task.description:>{width}}}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
    ]
    if facts:
        columns.append(TextColumn("{task.fields[facts]}", markup=False))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def json_ready(value: Any) -> Any:
    """Numbers that are not finite as text, since JSON has none and null means not measured."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    return [json_ready(entry) for entry in value] if isinstance(value, list | tuple) else value


def print_stderr(text: str) -> None:
    """Prints a message on stderr. What it quotes may come from a log or a path, and must not control the terminal."""
    from esper import nissa
    from esper.karn.console import clean_lines

    nissa.complain(clean_lines(text))


def warn_if_not_whole(found: Mapping[Path, Integrity]) -> None:
    """Names in one line the runs behind an answer that are damaged, or have no end yet."""
    broken = [folder for folder, integrity in found.items() if not integrity.complete]
    if not broken:
        return
    names = ", ".join(str(found[folder].run or folder.name) for folder in broken)
    what = f"run {names} is not whole" if len(broken) == 1 else f"{len(broken)} runs are not whole ({names})"
    where = shlex.quote(str(broken[0])) if len(broken) == 1 else "RUN"
    print_stderr(f"{what}: see the table integrity, or esper verify {where}")
