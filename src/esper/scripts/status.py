"""`esper status`: what a run is doing, and what to do next. `esper verify`: is its record whole? Both only read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from esper.leyline.rundir import EVENTS_DIR, STATUS_FILE
from esper.scripts.terminal import json_ready, plain_console, print_stderr

if TYPE_CHECKING:
    from esper.karn.diagnosis import Diagnosis
    from esper.karn.view import RunView

    Diagnoses = tuple[Diagnosis, ...]

FOLLOW_INTERVAL_S = 0.5
PATIENCE_S = 60.0
"""How long to follow a folder in which nobody writes."""


def status_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    follow: Annotated[bool, tyro.conf.arg(help="Stay and show the run as it goes on, until it is over.")] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="Print the verdict as JSON, for programs.")] = False,
) -> None:
    """Show what a run is doing, live or finished.

    Below the run's name, the first line is the verdict, the second cites the figure, limit and event behind it,
    the third what to do. All of it is computed from the event log; only the question whether the process is alive is
    put to the heartbeat file and the operating system. Watching a run cannot disturb it.
    """
    from rich.live import Live

    from esper.karn.console import clean, render_line, render_status

    console = plain_console()
    states = _watch(run, wait=follow)
    if as_json:
        print(json.dumps(json_ready(_facts(*next(states))), indent=2, allow_nan=False))  # noqa: T201
    elif not follow:
        console.print(render_status(*next(states)))
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as screen:
            for view, found in _until_over(states):
                screen.update(render_status(view, found), refresh=True)
    else:  # a line when a round is done or the verdict changes
        line = ""
        for view, found in _until_over(states):
            if (newest := render_line(view, found[0])) != line:
                line = newest
                console.print(f"{line} [{clean(found[0].why)}]", highlight=False, soft_wrap=True)


def _until_over(states: Iterator[tuple[RunView, Diagnoses]]) -> Iterator[tuple[RunView, Diagnoses]]:
    """Looks again and again until nothing more will come: the log has its end, or the process that wrote it is gone."""
    from esper.karn.diagnosis import RunCondition

    for view, found in states:
        yield view, found
        if view.ended is not None or found[0].state is RunCondition.DIED:
            return
        time.sleep(FOLLOW_INTERVAL_S)


def _watch(run: Path, *, wait: bool) -> Iterator[tuple[RunView, Diagnoses]]:
    """The run as it is whenever the next state is asked for.

    Args:
        run: The run directory.
        wait: True to wait a while for a first event or heartbeat, and to print that.

    Raises:
        ValueError: There has been neither an event nor a heartbeat for too long.
    """
    from esper.karn.diagnosis import diagnose
    from esper.karn.process import read_heartbeat
    from esper.karn.replay import RECENT_BYTES, Follower, find_run
    from esper.karn.view import RunView

    follower, view = Follower(find_run(run), RECENT_BYTES), RunView()
    waiting_since: float | None = None
    while True:
        batch = follower.poll()
        if batch.restarted:
            view = RunView()
        for item in batch.items:
            view.add(item)
        wall, now = time.time(), time.monotonic()
        heartbeat = read_heartbeat(run, wall)
        missing = f"{run} has no event ({EVENTS_DIR}/) and no heartbeat ({STATUS_FILE})"
        if not wait or view.num_events > 0 or heartbeat is not None:
            waiting_since = None
        elif waiting_since is None:
            waiting_since = now
            print_stderr(f"{missing} yet; waiting {PATIENCE_S:g} s for a process to write them")
        elif now - waiting_since > PATIENCE_S:
            raise ValueError(f"{missing} after {PATIENCE_S:g} s: nobody writes this run. Start or resume it first")
        yield view, diagnose(view, heartbeat, wall, run_dir=run)


def _facts(view: RunView, found: Diagnoses) -> dict[str, object]:
    last = view.last_round
    return {
        "run": view.run,
        "group": view.group,
        "attempt": view.attempt,
        **asdict(found[0]),
        "findings": [asdict(one) for one in found],
        "round": view.round,
        "num_rounds_done": len(view.returns),
        "num_rounds": None if view.started is None else view.started.num_rounds,
        "accuracy_mean_pct": None if last is None else last.data.accuracy_mean_pct,
        "return_mean": None if last is None else last.data.return_mean,
        "num_events": view.num_events,
    }


def verify_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
) -> None:
    """Check that the record of a run is whole.

    Sound means: the log of every attempt that ended has the hash in its checksum file, every line decodes, every
    missing sequence number is explained by the log itself, and the log has an end. Then the exit code is 0, otherwise
    1, and every fault is named with its file and byte.
    """
    from esper.karn.console import clean
    from esper.karn.integrity import check_run
    from esper.karn.process import Heartbeat, ProcessState, UnreadableStatus, read_heartbeat
    from esper.karn.replay import find_run

    console = plain_console(soft_wrap=True, highlight=False)
    find_run(run)
    found = check_run(run)
    console.print(
        f"{found.num_lines:,} lines, {found.num_superseded:,} of them written again by a later attempt; "
        f"{found.num_missing_seq:,} numbers missing, {found.num_dropped:,} reported as dropped; "
        f"{found.torn_tail_bytes:,} bytes of torn lines"
    )
    for problem in found.problems:
        console.print(Text(clean(problem), style="red"))
    heartbeat = read_heartbeat(run, time.time())
    if isinstance(heartbeat, UnreadableStatus):
        console.print(Text(clean(f"{heartbeat.reason}. It is no part of the record"), style="yellow"))
    elif isinstance(heartbeat, Heartbeat) and not heartbeat.status.closed and heartbeat.process is ProcessState.ALIVE:
        writer = heartbeat.status.pid
        console.print(f"still running: process {writer} is writing this log, and its end is yet to come")
    console.print("sound" if found.complete else Text("NOT SOUND", style="bold red"))
    if not found.complete:
        raise SystemExit(1)
