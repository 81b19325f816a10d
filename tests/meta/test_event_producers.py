"""Every type of event has somebody who makes it: a type that nobody emits is not in the catalogue."""

from __future__ import annotations

import ast
from pathlib import Path

import esper
from esper.leyline import TelemetryEventType

SOURCES = Path(esper.__file__).parent
NOT_PRODUCERS = {"leyline/catalogue.py", "nissa/scalars.py"}


def named_types(path: Path) -> set[str]:
    """The event types that a file speaks of as `TelemetryEventType.X`, or `T.X` where that is its name there."""
    owners = {"T", "TelemetryEventType"}
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners
    }


def test_every_type_has_a_producer() -> None:
    files = [file for file in SOURCES.rglob("*.py") if file.relative_to(SOURCES).parts[0] not in ("karn", "scripts")]
    producers = [file for file in files if file.relative_to(SOURCES).as_posix() not in NOT_PRODUCERS]
    produced = set().union(*(named_types(file) for file in producers))
    assert {kind.name for kind in TelemetryEventType} <= produced
