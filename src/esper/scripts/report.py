"""`esper report`: one HTML file about a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.leyline.rundir import REPORT_FILE


def report_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    out: Annotated[
        Path | None, tyro.conf.arg(help="Where to write; default: report.html in the run directory.")
    ] = None,
) -> None:
    """Write a report of a run as one HTML file that needs no network.

    It shows the verdict, learning curves, accuracy against parameters, the lives of the seeds, the health of the
    policy, every warning, whether the record is whole, and what is needed to repeat the run.
    """
    from esper.karn.replay import find_run
    from esper.karn.report import make_report

    page = make_report(find_run(run), time.time())
    target = run / REPORT_FILE if out is None else out
    if not target.parent.is_dir():
        raise ValueError(f"cannot write {target}: {target.parent} is not a folder")
    target.write_text(page, encoding="utf-8")
    Console(soft_wrap=True, highlight=False).print(f"Wrote {target} ({len(page) / 1000:.0f} kB)")
