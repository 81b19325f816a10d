"""`esper tasks`: what there is to train on, and whether its data is on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from esper.runtime.datasets import DataStatus
    from esper.runtime.tasks import TaskSpec

# Wide enough for any path: a pipe has no edge to wrap at.
PIPE_WIDTH = 10_000
TaskRow: TypeAlias = "tuple[TaskSpec, int, DataStatus]"
"""A task, the parameters of its host, and where its data is."""


def tasks_command(
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where to look for data first.")] = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="Print everything as JSON, for programs.")] = False,
    nursery: Annotated[
        int | None,
        tyro.conf.arg(metavar="N", help="Show the first N draws of the nursery instead, and the held-out list."),
    ] = None,
) -> None:
    """List the tasks and say whether the data of each is on this machine.

    A task is a host network, the slots in which it may grow, the data it learns and the number of epochs. The digits
    and pydoc tasks need no files of yours. For the others the list says where their data was found, or how to get
    it: Esper never downloads anything by itself.

    Controllers for many hosts are trained on draws of the nursery. A draw is a task too: `esper grow --task nursery:7`.
    """
    if nursery is not None:
        _print_draws(nursery, as_json)
        return
    from esper.runtime.datasets import find_data
    from esper.runtime.tasks import TASKS, count_host_params

    rows = [(spec, count_host_params(spec), find_data(spec.data, data_dir)) for spec in TASKS.values()]
    if as_json:
        print(json.dumps([_facts(*row) for row in rows], indent=2))  # noqa: T201
        return
    console = plain_console()
    if not console.is_terminal:
        console = plain_console(width=PIPE_WIDTH)
    console.print(_table(rows))
    _print_places(console, rows)


def _print_draws(count: int, as_json: bool) -> None:
    """The first draws of the nursery, then the list that training never sees."""
    from esper.runtime.nursery import facts, heldout_list, nursery_task

    if count < 0:
        raise ValueError(f"--nursery takes a number of draws of at least 0, got {count}")
    drawn = [facts(nursery_task(number)) for number in range(count)]
    held_out = [{**facts(row.task), "why": row.why} for row in heldout_list()]
    if as_json:
        print(json.dumps({"nursery": drawn, "held_out": held_out}, indent=2))  # noqa: T201
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("task", "family", "parameters", "budget", "epochs", "slots", "blueprints", "what it is"):
        right = name in ("parameters", "budget", "epochs")
        table.add_column(name, justify="right" if right else "left", no_wrap=name in ("task", "family"))
    for row in (*drawn, *held_out):
        table.add_row(
            row["task"],
            row["family"],
            f"{row['host_params']:,}",
            f"{row['budget_ratio']:.1f}x",
            str(row["epochs"]),
            " ".join(row["slots"]),
            " ".join(key.partition(".")[2] for key in row["blueprints"]),
            row["description"],
        )
    console = plain_console()
    (console if console.is_terminal else plain_console(width=PIPE_WIDTH)).print(table)


def _facts(spec: TaskSpec, host_params: int, status: DataStatus) -> dict[str, object]:
    return {
        "task": spec.name,
        "description": spec.description,
        "host": spec.host.kind,
        "host_params": host_params,
        "slots": list(spec.slots),
        "blueprints": list(spec.blueprint_keys),
        "num_classes": spec.num_classes,
        "metric": spec.metric,
        "epochs": spec.horizon,
        "batch_size": spec.batch_size,
        "samples_per_epoch": spec.samples_per_epoch,
        "data": spec.data,
        "data_found": status.found,
        "data_place": None if status.place is None else str(status.place),
        "data_searched": list(status.searched),
        "data_expected": status.source.expected,
        "data_remedy": status.source.remedy,
    }


def _table(rows: list[TaskRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("host, parameters", min_width=11)
    table.add_column("slots", min_width=5)
    table.add_column("metric, classes", min_width=9)
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("data", min_width=7)
    for spec, host_params, status in rows:
        table.add_row(
            spec.name,
            f"{spec.host.kind} {host_params:,}",
            " ".join(spec.slots),
            f"{spec.metric}, {spec.num_classes}",
            str(spec.horizon),
            str(spec.batch_size),
            f"{spec.data} {'found' if status.found else 'MISSING'}",
        )
    return table


def _print_places(console: Console, rows: list[TaskRow]) -> None:
    from esper.runtime.datasets import not_found_message

    for status in {status.source.name: status for _, _, status in rows}.values():
        found = f"found at {status.place}" if status.found else not_found_message(status)
        console.print(Text(f"{status.source.name}: {found}", style="" if status.found else "yellow"))
