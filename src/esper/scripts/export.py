"""`esper export` and `esper report`: a run in the formats of other tools, or as one HTML file, made from its log."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from esper.leyline import ExitCode, StorageError
from esper.leyline.files import write_folder
from esper.leyline.rundir import MANIFEST_FILE, METRICS_DIR, REPORT_FILE
from esper.scripts.terminal import plain_console, warn_if_not_whole

if TYPE_CHECKING:
    from esper.karn.integrity import Integrity

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
    from esper.karn.sql import write_parquet

    find_run(run)
    folder = run / (METRICS_DIR if form == "tensorboard" else TABLES_DIR) if out is None else out
    if out is None and folder.is_symlink():
        raise ValueError(f"{folder} is a link, which is not followed; name a folder with --out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name another one with --out")
    with write_folder(folder) as unfinished:  # half an export must not look like one
        if form == "tensorboard":
            num_rounds, found = _write_tensorboard(run, unfinished, folder)
            written = f"the curves of {num_rounds} rounds"
        else:
            num_tables, found = write_parquet(run, unfinished)
            written = f"{num_tables} tables"
    plain_console(soft_wrap=True, highlight=False).print(f"Wrote {written} to {folder}")
    warn_if_not_whole({run: found})


def _write_tensorboard(run: Path, unfinished: Path, folder: Path) -> tuple[int, Integrity]:
    from esper.karn.integrity import check_run
    from esper.leyline import LoggedEvent, TelemetryEventType
    from esper.nissa.exporters import TensorBoardBackend

    files = TensorBoardBackend(unfinished)
    num_rounds = 0

    def write(event: LoggedEvent, line: bytes) -> None:
        nonlocal num_rounds
        files.write(event)
        num_rounds += event.type is TelemetryEventType.ROUND_COMPLETED

    with _ending_if_a_thread_fails(unfinished, folder):
        files.start()
        found = check_run(run, write)
        files.close()
    return num_rounds, found


@contextmanager
def _ending_if_a_thread_fails(unfinished: Path, folder: Path) -> Iterator[None]:
    """TensorBoard's library writes its files in a thread. If that fails, the next point and the end of the process
    wait for it for ever, so the process exits at once, without what it has written.
    """
    usual = threading.excepthook

    def end(failed: threading.ExceptHookArgs) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(failed.exc_value, OSError):
            sys.stderr.write(f"esper: error: cannot write {folder}: {failed.exc_value.strerror}\n")
            os._exit(ExitCode.STORAGE)
        usual(failed)
        sys.stderr.flush()
        os._exit(ExitCode.UNEXPECTED)

    threading.excepthook = end
    try:
        yield
    finally:
        threading.excepthook = usual


def report_command(
    run: Annotated[
        tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory, or the folder of an evaluation.")
    ],
    out: Annotated[Path | None, tyro.conf.arg(help="Where to write; default: report.html in that folder.")] = None,
) -> None:
    """Write a report of a run or of an evaluation as one HTML file that needs no network.

    Of a run it shows the verdict, curves of accuracy, loss and return, accuracy against parameters, the stages of the
    seeds, the health of the policy, every warning, whether the record is whole, and what is needed to repeat the run.
    Of an evaluation: claims and their verdicts, all arms with intervals, the figures, controls, notes and provenance.
    """
    from esper.leyline.files import free_bytes, write_atomic

    make = _report_maker(run)
    target = run / REPORT_FILE if out is None else out
    if target.is_dir():
        raise ValueError(f"cannot write {target}: it is a folder; name a file, such as {target / REPORT_FILE}")
    if not target.parent.is_dir():
        raise ValueError(f"cannot write {target}: {target.parent} is not a folder")
    page = make(run).encode()
    try:
        if out is not None and out.exists() and not out.is_file():
            out.write_bytes(page)  # a device or a pipe
        else:
            write_atomic(target, page, durable=False)
    except OSError as error:  # while writing, it does not say where
        raise StorageError(str(target), error, needed_bytes=len(page), free_bytes=free_bytes(target.parent)) from error
    plain_console(soft_wrap=True, highlight=False).print(f"Wrote {target} ({len(page) / 1000:.0f} kB)")


def _report_maker(folder: Path) -> Callable[[Path], str]:
    """What makes the page of a folder, which must be a run or an evaluation."""
    from esper.karn.replay import find_run, is_run

    if not is_run(folder) and (folder / MANIFEST_FILE).is_file() and (folder / "results.csv").is_file():
        from esper.evidence.statistics import require_libraries

        require_libraries()
        from esper.evidence.publication import report_page

        return report_page
    find_run(folder)
    from esper.karn.report import make_report

    return lambda run: make_report(run, time.time())
