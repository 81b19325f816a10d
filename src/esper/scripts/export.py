"""`esper export`: a run in the formats of other tools, made from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from esper.leyline.rundir import METRICS_DIR

TABLES_DIR = "tables"


def export_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    form: Annotated[
        tyro.conf.Positional[Literal["tensorboard", "parquet"]],
        tyro.conf.arg(help="TensorBoard files, or one Parquet file per table of `esper query`."),
    ],
    out: Annotated[
        Path | None, tyro.conf.arg(help="An empty or new folder; default: metrics or tables in the run directory.")
    ] = None,
) -> None:
    """Write a run for other tools: curves for TensorBoard, tables for pandas, polars and the like.

    Everything comes from the event log, so what a live exporter missed can be made again, and rounds that a crash
    undid and a resume repeated appear once. Needs the extra `metrics` or `runs`.
    """
    from esper.karn.replay import find_run

    find_run(run)
    folder = run / (METRICS_DIR if form == "tensorboard" else TABLES_DIR) if out is None else out
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name another one with --out")
    folder.mkdir(parents=True, exist_ok=True)
    told = _write_tensorboard(run, folder) if form == "tensorboard" else _write_parquet(run, folder)
    Console(soft_wrap=True, highlight=False).print(f"Wrote {told} to {folder}")


def _write_tensorboard(run: Path, folder: Path) -> str:
    from esper.karn.replay import replay
    from esper.leyline import LoggedEvent, TelemetryEventType
    from esper.nissa.tensorboard import TensorBoardBackend

    files = TensorBoardBackend(folder)
    files.start()
    num_rounds = 0
    for item in replay(run):
        if isinstance(item, LoggedEvent):
            files.write(item)
            num_rounds += item.type is TelemetryEventType.ROUND_COMPLETED
    files.close()
    return f"the curves of {num_rounds} rounds"


def _write_parquet(run: Path, folder: Path) -> str:
    from esper.karn.sql import write_parquet

    return f"{len(write_parquet([run], folder))} tables"
