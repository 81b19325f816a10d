"""`esper query`: SQL over the logs of runs."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from esper.karn.sql import Answer

# Wide enough for any table: a pipe has no edge to wrap at.
PIPE_WIDTH = 10_000


def query_command(
    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="A run directory, or a folder of them.")],
    sql: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="One SELECT; 'show tables' lists what there is.")],
    format: Annotated[Literal["table", "csv", "json"], tyro.conf.arg(help="How to print the rows.")] = "table",
    limit: Annotated[int, tyro.conf.arg(help="Most rows to print.")] = 1000,
    timeout: Annotated[float, tyro.conf.arg(help="Seconds after which the query is stopped.")] = 30.0,
) -> None:
    """Ask the logs of runs with SQL.

    `show tables` lists the tables, `describe rounds` the columns of one. Tables hold what finally happened: rounds
    that a crash undid and a resume repeated appear once. Fields not measured are NULL. Quote "group" and "limit",
    which SQL uses as words. Nothing can be written, and no file other than the logs can be read.

    Example: esper query runs/ "select blueprint, num_fossilized, mean_contribution_pp from blueprint_yield"
    """
    from esper.karn.replay import find_runs
    from esper.karn.sql import RunDatabase

    if limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    if timeout <= 0:
        raise ValueError(f"--timeout must be above 0 seconds, got {timeout:g}")
    with RunDatabase(find_runs(runs)) as database:
        answer = database.ask(sql, limit=limit, timeout_s=timeout)
    {"table": _print_table, "csv": _print_csv, "json": _print_json}[format](answer)
    if answer.truncated:
        sys.stderr.write(f"esper: only the first {limit} rows; --limit gives more\n")


def _print_table(answer: Answer) -> None:
    from esper.karn.console import clean

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(answer.columns):
        numbers = all(isinstance(row[place], int | float | None) for row in answer.rows)
        table.add_column(clean(name), justify="right" if numbers else "left")
    for row in answer.rows:
        table.add_row(*(Text(clean(_word(value))) for value in row))
    console.print(table)


def _word(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_csv(answer: Answer) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows(answer.rows)


def _print_json(answer: Answer) -> None:
    rows = [{name: _plain(value) for name, value in zip(answer.columns, row, strict=True)} for row in answer.rows]
    json.dump(rows, sys.stdout, indent=2, default=str, allow_nan=False)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    """JSON has no word for numbers that are not finite; they become text, so that null keeps its meaning."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
