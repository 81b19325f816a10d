"""Writes the tables of docs/telemetry.md from the code: `python tools/telemetry_docs.py`. A test keeps them current."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

from esper.leyline import EVENTS, THRESHOLDS, EventSpec, TelemetryEventType, Threshold

PAGE = Path(__file__).parent.parent / "docs" / "telemetry.md"


def events_table() -> str:
    """One row per type of event."""
    rows = [_event_row(kind, spec) for kind, spec in EVENTS.items()]
    return "\n".join(["| event | says | ids | may be lost | from level | fields |", "|---|---|---|---|---|---|", *rows])


def thresholds_table() -> str:
    """One row per limit."""
    rows = [_threshold_row(row) for row in THRESHOLDS.values()]
    head = "| metric | unit | warning | critical | clears at | patience | judged | meaning |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def fields_table() -> str:
    """One row per field that has words of its own, record by record in the order of the events."""
    rows = [
        f"| {place} | `{name}` | {_for_readers(words)} |"
        for place, record in _records().items()
        for name, words in field_docs(record).items()
    ]
    return "\n".join(["| of | field | meaning |", "|---|---|---|", *rows])


def field_docs(record: type) -> dict[str, str]:
    """What the source says about each field of a record, in the text right below it; first those of its bases."""
    found = {name: words for base in record.__bases__ if is_dataclass(base) for name, words in field_docs(base).items()}
    (body,) = ast.parse(inspect.getsource(record)).body
    assert isinstance(body, ast.ClassDef)
    for field, below in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def payload_records() -> list[type]:
    """Every record that a payload consists of, each once."""
    return list(_records().values())


def _records() -> dict[str, type]:
    """Records by the places in which they occur, each once: payloads by their events, parts after their payload."""
    places: dict[type, list[str]] = {}
    for kind, spec in EVENTS.items():
        places.setdefault(spec.payload, []).append(kind.value)
        for record, path in _parts(spec.payload):
            places.setdefault(record, []).append(f"`{path}` of {kind.value}")
    return {", ".join(dict.fromkeys(where)): record for record, where in places.items()}


def _parts(record: type, path: str = "") -> Iterator[tuple[type, str]]:
    """Records inside a record, with the names that lead there."""
    for name, hint in get_type_hints(record).items():
        for part in _records_in(hint):
            yield part, f"{path}{name}"
            yield from _parts(part, f"{path}{name}.")


def _records_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and (is_dataclass(hint) or is_typeddict(hint)):
        yield hint
    for part in get_args(hint):
        yield from _records_in(part)


def _for_readers(words: str) -> str:
    """As people meet it in the log, where None is null."""
    return re.sub(r"\bNone\b", "`null`", words)


def with_tables(page: str) -> str:
    """The page with all tables as they are now."""
    tables = {"events": events_table(), "fields": fields_table(), "thresholds": thresholds_table()}
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        page, count = pattern.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
        assert count == 1, f"{PAGE.name} needs exactly one place for {name}, found {count}"
    return page


def _event_row(kind: TelemetryEventType, spec: EventSpec) -> str:
    says = " ".join((spec.payload.__doc__ or "").split())
    names = ", ".join(f"`{field.name}`" for field in fields(spec.payload))
    lost = "no" if spec.must else "yes"
    return f"| {kind.value} | {says} | {spec.scope.value} | {lost} | {spec.level.name} | {names} |"


def _threshold_row(row: Threshold) -> str:
    sign = {"above": "> ", "at_least": ">= ", "below": "< "}[row.direction]
    limits = ["" if limit is None else f"{sign}{limit:.4g}" for limit in (row.warn, row.critical)]
    clear = f"{'>=' if row.direction == 'below' else '<='} {row.clear_at:.4g}"
    patience = f"{row.num_consecutive} in a row" if row.num_consecutive > 1 else ""
    if row.warmup:
        patience = f"{patience}; " if patience else ""
        patience += f"after {row.warmup} updates"
    cells = [f"`{row.metric}`", row.unit, *limits, clear, patience, row.checked, row.reason]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
