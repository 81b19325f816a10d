"""`esper report`: one HTML file about a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro

from esper.leyline import StorageError
from esper.leyline.rundir import REPORT_FILE
from esper.scripts.terminal import plain_console


def report_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    out: Annotated[
        Path | None, tyro.conf.arg(help="Where to write; default: report.html in the run directory.")
    ] = None,
) -> None:
    """Write a report of a run as one HTML file that needs no network.

    It shows the verdict, curves of accuracy, loss and return, accuracy against parameters, the stages of the seeds, the
    health of the policy, every warning, whether the record is whole, and what is needed to repeat the run.
    """
    from esper.karn.replay import find_run
    from esper.karn.report import make_report
    from esper.leyline.files import free_bytes, write_atomic

    find_run(run)
    target = run / REPORT_FILE if out is None else out
    if target.is_dir():
        raise ValueError(f"cannot write {target}: it is a folder; name a file, such as {target / REPORT_FILE}")
    if not target.parent.is_dir():
        raise ValueError(f"cannot write {target}: {target.parent} is not a folder")
    page = make_report(run, time.time()).encode()
    try:
        if out is not None and out.exists() and not out.is_file():
            out.write_bytes(page)  # a device or a pipe
        else:
            write_atomic(target, page, durable=False)
    except OSError as error:  # while writing, it does not say where
        raise StorageError(str(target), error, needed_bytes=len(page), free_bytes=free_bytes(target.parent)) from error
    plain_console(soft_wrap=True, highlight=False).print(f"Wrote {target} ({len(page) / 1000:.0f} kB)")
