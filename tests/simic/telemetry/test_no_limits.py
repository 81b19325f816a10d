"""All limits are in leyline's table: the code that measures and compares has no numbers of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper.simic

FOLDER = Path(esper.simic.__file__).parent
FILES = [
    FOLDER / "rewards" / "suspicion.py",
    *(file for file in sorted((FOLDER / "telemetry").glob("*.py")) if file.name != "telemetry_config.py"),
]
"""The configuration of the hub has ranges, which are no limits of alarms."""
HARMLESS = {0.0, 1.0}
"""None at all, and a whole."""
NO_LIMITS = HARMLESS | {0.5, 100.0}
"""Also square roots and percent."""
MEASURES = {"debug_telemetry.py": {10.0}}
"""What `large_share` counts: it says what is measured, not what is bad."""


def number(node: ast.AST) -> float | None:
    """The number that a literal stands for, with its sign lost; None for anything else."""
    if isinstance(node, ast.UnaryOp):
        return number(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


def limits_in(source: str, measures: set[float]) -> Iterator[float]:
    """Numbers that something is compared with, and fractions wherever they stand, be it as defaults or by a name."""
    allowed = NO_LIMITS | measures
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = (number(side) for side in (node.left, *node.comparators))
            yield from (side for side in sides if side is not None and side not in HARMLESS)
        elif isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in allowed:
            yield node.value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_measuring_code_has_no_limits_of_its_own(file: Path) -> None:
    assert list(limits_in(file.read_text(), MEASURES.get(file.name, set()))) == []


def test_that_check_would_see_a_limit() -> None:
    seen = [
        "def fell(x, threshold: float = 0.05): return x < -threshold",
        "MIN_GAIN = 0.25",
        "if 15 < age: pass",
        "if x < -0.5: pass",
        "if len(rows) >= 3: pass",
    ]
    assert [list(limits_in(source, set())) for source in seen] == [[0.05], [0.25], [15.0], [0.5], [3.0]]
    assert not list(limits_in("if x > 0 and rows[:2] == other[:2]: y = (100.0 * x) ** 0.5", set()))
