"""`esper watch`: a run in the terminal, live or finished. Only reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

LOW_PRIORITY = 10
"""Added to the niceness of processes that only look, so that training goes first."""


def watch_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
) -> None:
    """Watch a run in the terminal: verdict, curves, hosts, policy, the life of every seed, events.

    Keys are shown at the bottom; ? explains all of them. It works over ssh and in 80 columns. The log is read in a
    process of low priority: closing or killing it cannot touch the run. A log of many megabytes is read to its end
    within seconds by counting, instead of reading, old events about single steps; the screen says how many. Needs the
    extra `watch`.
    """
    from esper.karn.replay import find_run

    find_run(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError("esper watch needs a terminal; for a pipe there is `esper status RUN --follow`")
    try:
        from esper.karn.watch.app import WatchApp
    except ImportError:
        raise ImportError("esper watch needs Textual: pip install 'esper-growth[watch]'") from None
    os.nice(LOW_PRIORITY)
    app = WatchApp(run)
    app.run()
    if app.return_code:
        raise SystemExit(app.return_code)
