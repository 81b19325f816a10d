"""`esper status`: what a run is doing, why that is said, and what to do next. Reads only, in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from esper.leyline.rundir import EVENTS_FILE, STATUS_FILE
from esper.scripts.terminal import complain, json_ready, plain_console

if TYPE_CHECKING:
    from esper.karn.verdict import Verdict
    from esper.karn.view import RunView

POLL_S = 0.5
PATIENCE_S = 60.0
"""How long to follow a folder in which nobody writes."""


def status_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    follow: Annotated[bool, tyro.conf.arg(help="Stay and show the run as it goes on, until it is over.")] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="Print the verdict as JSON, for programs.")] = False,
) -> None:
    """Show what a run is doing, live or finished.

    Below the run's name, the first line says what is the case, the second cites the figure, limit and event behind it,
    the third what to do. All of it is computed from the event log; only the question whether the process is alive is
    put to the heartbeat file and the operating system. Watching a run cannot disturb it.
    """
    from esper.karn.console import render_status

    console = plain_console()
    views = _views(run, wait=follow)
    view, found = next(views)
    if as_json:
        print(json.dumps(json_ready(_facts(view, found)), indent=2, allow_nan=False))  # noqa: T201
    elif not follow:
        console.print(render_status(view, found))
    elif console.is_terminal:
        _follow_on_screen(console, view, found, views)
    else:
        _follow_in_lines(console, view, found, views)


def _follow_in_lines(console: Console, view: RunView, found: Verdict, views: Iterator[tuple[RunView, Verdict]]) -> None:
    """A line when a round is done or something else is the case, for a pipe or a file."""
    from esper.karn.console import clean, render_line

    line = ""
    while True:
        if (newest := render_line(view, found)) != line:
            line = newest
            console.print(f"{line} [{clean(found.why)}]", highlight=False, soft_wrap=True)
        if _is_over(view, found):
            return
        time.sleep(POLL_S)
        view, found = next(views)


def _follow_on_screen(
    console: Console, view: RunView, found: Verdict, views: Iterator[tuple[RunView, Verdict]]
) -> None:
    from rich.live import Live

    from esper.karn.console import render_status

    with Live(render_status(view, found), console=console, auto_refresh=False, vertical_overflow="crop") as screen:
        while not _is_over(view, found):
            time.sleep(POLL_S)
            view, found = next(views)
            screen.update(render_status(view, found), refresh=True)


def _is_over(view: RunView, found: Verdict) -> bool:
    """Nothing more will come: the log has its end, or the process that wrote it is gone."""
    from esper.karn.finding import State

    return view.progress.ended is not None or found.state is State.DIED


def _views(run: Path, *, wait: bool) -> Iterator[tuple[RunView, Verdict]]:
    """The run as it is whenever the next view is asked for.

    Args:
        run: The run directory.
        wait: True to say so where nothing shows that anybody writes the run, and to give up after a while.
    """
    from esper.karn.fold import fold_all
    from esper.karn.process import read_heartbeat
    from esper.karn.replay import Follower, find_run
    from esper.karn.verdict import verdict
    from esper.karn.view import EMPTY

    follower, view = Follower(find_run(run)), EMPTY
    patience = _Patience(run) if wait else None
    while True:
        batch = follower.poll()
        view = fold_all(batch.items, EMPTY if batch.restarted else view)
        wall = time.time()
        heartbeat = read_heartbeat(run, wall)
        if patience is not None:
            patience.look(view.log.num_events > 0 or heartbeat is not None)
        yield view, verdict(view, heartbeat, wall, run_dir=run)


class _Patience:
    """Waits for a first sign of life: without an event or a heartbeat nobody can tell that the process is gone."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._since: float | None = None

    def look(self, alive: bool) -> None:
        """Notes whether there is a sign; without one it says so first, and in the end stops.

        Raises:
            ValueError: There has been none for too long.
        """
        now = time.monotonic()
        missing = f"{self._run} has no event ({EVENTS_FILE}) and no heartbeat ({STATUS_FILE})"
        if alive:
            self._since = None
        elif self._since is None:
            self._since = now
            complain(f"{missing} yet; waiting {PATIENCE_S:g} s for a process to write them")
        elif now - self._since > PATIENCE_S:
            raise ValueError(f"{missing} after {PATIENCE_S:g} s: nobody writes this run. Start or resume it first")


def _facts(view: RunView, found: Verdict) -> dict[str, object]:
    last = view.progress.last_round
    return {
        "run": view.log.run,
        "group": view.log.group,
        "attempt": view.log.attempt,
        "state": found.state.value,
        "severity": found.severity.value,
        "now": found.now,
        "why": found.why,
        "next": found.next,
        "findings": [
            {"state": f.state.value, "severity": f.severity.value, "now": f.now, "why": f.why, "next": f.next}
            for f in found.findings
        ],
        "round": view.progress.round,
        "num_rounds_done": view.progress.rounds.num_seen,
        "num_rounds": None if view.progress.started is None else view.progress.started.num_rounds,
        "accuracy_mean_pct": None if last is None else last.data.accuracy_mean_pct,
        "return_mean": None if last is None else last.data.return_mean,
        "num_events": view.log.num_events,
    }
