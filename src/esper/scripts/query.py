"""`esper query`: SQL over the logs of runs."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.scripts.terminal import json_ready, plain_console, print_stderr, warn_if_not_whole

if TYPE_CHECKING:
    from esper.karn.sql import Answer

_MAX_ROWS = 1_000_000_000
_MAX_TIMEOUT_S = 86_400.0
GAP = 2
"""Spaces between two columns."""
LARGE, HUGE = 1e5, 1e15
"""From where seven digits are too few, and from where hundredths mean nothing."""


def query_command(
    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="A run directory, or a folder of them.")],
    sql: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="One SELECT; 'show tables' lists what there is.")],
    format: Annotated[Literal["table", "csv", "json"], tyro.conf.arg(help="How to print the rows.")] = "table",
    limit: Annotated[int, tyro.conf.arg(help="Most rows to print.")] = 1000,
    timeout: Annotated[float, tyro.conf.arg(help="Seconds after which the query is stopped.")] = 30.0,
) -> None:
    """Query the logs of runs with SQL.

    `show tables` lists the tables, `describe rounds` the columns of one. Tables hold what finally happened: rounds
    that a crash undid and a resume repeated appear once. Fields not measured are NULL. Quote "group" and "limit",
    which are SQL keywords. Nothing can be written, and no file other than the logs can be read. A table that is wider
    than the terminal is printed row by row, a line per column.

    Example: esper query runs/ "select blueprint, num_fossilized, mean_contribution_pp from blueprint_yield"
    """
    from esper.karn.replay import find_runs
    from esper.karn.sql_process import ask_runs

    if not 1 <= limit <= _MAX_ROWS:
        raise ValueError(f"--limit must be from 1 to {_MAX_ROWS}, got {limit}")
    if not 0 < timeout <= _MAX_TIMEOUT_S:
        raise ValueError(f"--timeout must be above 0 and at most {_MAX_TIMEOUT_S:.0f} seconds, got {timeout:g}")
    answer, found = ask_runs(find_runs(runs), sql, limit=limit, timeout_s=timeout)
    {"table": _print_table, "csv": _print_csv, "json": _print_json}[format](answer)
    if answer.truncated:
        print_stderr(f"only the first {limit} rows; --limit gives more")
    warn_if_not_whole(found)


def _print_table(answer: Answer) -> None:
    from esper.karn.console import clean

    names = [clean(name) for name in answer.columns]
    rows = [[clean(_cell(value)) for value in row] for row in answer.rows]
    widths = [max(map(cell_len, column)) + GAP for column in zip(names, *rows, strict=True)]
    console = plain_console()
    if not console.is_terminal:  # a pipe has no edge to wrap at
        console = plain_console(width=sum(widths))
    if sum(widths) - GAP > console.width:
        _print_row_by_row(console, names, rows)
    else:
        _print_side_by_side(console, names, rows, answer)


def _print_side_by_side(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]], answer: Answer) -> None:
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", pad_edge=False)
    for place, name in enumerate(names):
        numbers = all(isinstance(row[place], int | float | None) for row in answer.rows)
        table.add_column(Text(name), justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_row_by_row(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """What does not fit side by side: nothing is cut, and the terminal itself breaks lines that are too long."""
    width = max(map(cell_len, names)) + GAP
    if not rows:
        console.print(Text(f"no rows; columns: {', '.join(names)}"), soft_wrap=True)
    for number, row in enumerate(rows, start=1):
        console.print(Text(f"row {number}", style="bold"))
        for name, cell in zip(names, row, strict=True):
            line = Text(name + " " * (width - cell_len(name)), style="dim").append(cell, style="not dim")
            console.print(line, soft_wrap=True)


def _cell(value: object) -> str:
    """Seven digits, as the log has them; large numbers, as times are, whole and with hundredths."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= HUGE:
        return repr(value)
    return f"{value:.2f}" if abs(value) >= LARGE else f"{value:.7g}"


def _print_csv(answer: Answer) -> None:
    from esper.karn.console import clean

    writer = csv.writer(sys.stdout, lineterminator="\n")
    for row in (answer.columns, *answer.rows):
        # A file gets every character as it is, a terminal none that it would obey.
        writer.writerow([clean(cell) if isinstance(cell, str) and sys.stdout.isatty() else cell for cell in row])


def _print_json(answer: Answer) -> None:
    rows = [{name: json_ready(value) for name, value in zip(answer.columns, row, strict=True)} for row in answer.rows]
    json.dump(rows, sys.stdout, indent=2, default=str, allow_nan=False)
    sys.stdout.write("\n")
