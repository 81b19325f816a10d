"""`esper verify`: is the record of a run whole? The exit code says it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from esper.scripts.terminal import plain_console

EXIT_UNSOUND = 1


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
    writer = _writer(run)
    if writer is not None:
        console.print(f"still running: process {writer} is writing this log, and its end is yet to come")
    console.print("sound" if found.complete else Text("NOT SOUND", style="bold red"))
    if not found.complete:
        raise SystemExit(EXIT_UNSOUND)


def _writer(run: Path) -> int | None:
    """The process that is writing the run now; None if there is none, or it cannot be asked."""
    from esper.karn.process import ProcessState, read_heartbeat

    heartbeat = read_heartbeat(run, time.time())
    if heartbeat is None or heartbeat.status.closed or heartbeat.process is not ProcessState.ALIVE:
        return None
    return heartbeat.status.pid
