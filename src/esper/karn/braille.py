"""Curves for a terminal: braille dots, two by four to a character. Draws what it is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from esper.leyline import record

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot, by column and row."""
LABEL_WIDTH = 7
"""Columns left of a plot, for the numbers at its top and bottom."""


@record
class Curve:
    """One line of a plot. What was not measured, or is not finite, is a gap."""

    name: str
    values: Sequence[float | None]
    style: str


def plot(curves: Sequence[Curve], width: int, height: int) -> Text:
    """The curves over a common range, as `height` lines of `width` columns. Later curves are drawn over earlier ones.

    The newest values are always at the right edge; a long curve is thinned out to one value per dot.
    """
    columns, rows = max(width - LABEL_WIDTH - 1, 1), max(height, 1)
    finite = [value for curve in curves for value in curve.values if value is not None and math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    masks = [[0] * columns for _ in range(rows)]
    styles = [[""] * columns for _ in range(rows)]
    for curve in curves:
        before: tuple[int, int] | None = None
        for dot in _dots(curve.values, 2 * columns, 4 * rows, low, high):
            for x, y in [] if dot is None else _line(before or dot, dot):
                masks[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
                styles[y // 4][x // 2] = curve.style
            before = dot
    lines = []
    for row in range(rows):
        label = _label(high) if row == 0 else _label(low) if row == rows - 1 else ""
        line = Text(f"{label if finite else '':>{LABEL_WIDTH}}│", "dim")
        for mask, style in zip(masks[row], styles[row], strict=True):
            line.append(chr(0x2800 + mask) if mask else " ", style)
        lines.append(line)
    return Text("\n", end="").join(lines)


def _dots(
    values: Sequence[float | None], columns: int, rows: int, low: float, high: float
) -> list[tuple[int, int] | None]:
    """Where each value goes, from the top left; None for a gap."""
    num = len(values)
    shown: list[tuple[int, int] | None] = []
    for column in range(min(num, columns)):
        # With few values each has as many columns as the others; with many, each column has one value.
        idx = column if num <= columns else round(column * (num - 1) / (columns - 1))
        value = values[idx]
        if value is None or not math.isfinite(value):
            shown.append(None)
            continue
        x = round(column * (columns - 1) / (num - 1)) if 1 < num <= columns else column
        share = 0.5 if high == low else (value - low) / (high - low)
        shown.append((x, round((1.0 - share) * (rows - 1))))
    return shown


def _line(start: tuple[int, int], stop: tuple[int, int]) -> list[tuple[int, int]]:
    """All dots between two."""
    (x0, y0), (x1, y1) = start, stop
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(steps + 1)]


def _label(value: float) -> str:
    """A number in at most `LABEL_WIDTH` characters."""
    for digits in (4, 3, 2, 1):
        text = f"{value:.{digits}g}"
        if len(text) <= LABEL_WIDTH:
            return text
    return "huge"
