"""`esper verify`: is the record of a run whole? The exit code says it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from esper.leyline.rundir import CHECKPOINTS_DIR, EVENTS_FILE, MANIFEST_FILE
from esper.scripts.terminal import plain_console

EXIT_UNSOUND = 1


def verify_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    rebuild: Annotated[
        bool, tyro.conf.arg(help="First rebuild manifest.json from the log's files, for a run that lost it.")
    ] = False,
) -> None:
    """Check that the record of a run is whole.

    Sound means: the closed log files have the hashes that the manifest lists, every line decodes, every missing
    sequence number is explained by the log itself, and the log has an end. Then the exit code is 0, otherwise 1, and
    every fault is named with its file and byte. A rebuilt manifest vouches for the files only from then on; it is
    refused while the manifest that is there contradicts one of them, and while the run is going on.
    """
    from esper.karn.console import clean
    from esper.karn.integrity import check_run
    from esper.karn.replay import find_run

    console = plain_console(soft_wrap=True, highlight=False)
    find_run(run)
    if rebuild:
        _rebuild(run)
        console.print("manifest.json rebuilt")
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


def _rebuild(run: Path) -> None:
    from esper.karn.integrity import check_run, contradictions
    from esper.nissa.segments import rebuild_manifest, scan_segment, write_manifest

    with _owned(run):
        if wrong := contradictions(run):
            raise ValueError(
                f"{run / MANIFEST_FILE} was not rebuilt, since it contradicts the log: {'; '.join(wrong)}. "
                f"Restore what is damaged, or delete {MANIFEST_FILE} to accept the files as they are, and try again"
            )
        manifest = rebuild_manifest(run)
        if manifest is None:
            raise ValueError(f"{run} has no readable event from which a manifest could be made")
        active = run / EVENTS_FILE
        if active.exists() and check_run(run).has_end:  # it will not grow, so it can be vouched for too
            entry = replace(scan_segment(active), attempt=manifest.attempts[-1].attempt)
            manifest = replace(manifest, active=entry)
        write_manifest(run, manifest)


def _owned(run: Path) -> AbstractContextManager[None]:
    """Holds the run, so that no writer changes files or manifest meanwhile. Only runs with checkpoints have one."""
    from esper.simic.run.run_dir import RunDir

    return RunDir(path=run.absolute()).lock() if (run / CHECKPOINTS_DIR).is_dir() else nullcontext()
