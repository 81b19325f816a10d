"""Writes the tables of docs/telemetry.md from the code: `python tools/telemetry_docs.py`. A test keeps them current."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

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


def with_tables(page: str) -> str:
    """The page with both tables as they are now."""
    for name, table in (("events", events_table()), ("thresholds", thresholds_table())):
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
