"""`esper verify`: is the record of a run whole? The exit code says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

EXIT_UNSOUND = 1


def verify_command(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The run directory.")],
    rebuild: Annotated[
        bool, tyro.conf.arg(help="First write manifest.json anew from the log's files, for a run that lost it.")
    ] = False,
) -> None:
    """Check that the record of a run is whole.

    Sound means: the closed log files have the hashes that the manifest lists, every line decodes, every missing
    sequence number is explained by the log itself, and the log has an end. Then the exit code is 0, otherwise 1, and
    every fault is named with its file and byte. A rebuilt manifest vouches for the files only from then on.
    """
    from esper.karn.console import clean
    from esper.karn.integrity import check_run
    from esper.karn.replay import find_run

    console = Console(soft_wrap=True, highlight=False)
    find_run(run)
    if rebuild:
        _rebuild(run)
        console.print("manifest.json written anew")
    found = check_run(run)
    console.print(
        f"{found.num_lines:,} lines, {found.num_superseded:,} of them written again by a later attempt; "
        f"{found.num_missing_seq:,} numbers missing, {found.num_dropped:,} reported as dropped; "
        f"{found.torn_tail_bytes:,} bytes of torn lines"
    )
    for problem in found.problems:
        console.print(Text(clean(problem), style="red"))
    console.print("sound" if found.complete else Text("NOT SOUND", style="bold red"))
    if not found.complete:
        raise SystemExit(EXIT_UNSOUND)


def _rebuild(run: Path) -> None:
    from esper.nissa.segments import rebuild_manifest, write_manifest

    manifest = rebuild_manifest(run)
    if manifest is None:
        raise ValueError(f"{run} has no readable event from which a manifest could be made")
    write_manifest(run, manifest)
