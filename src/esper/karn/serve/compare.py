"""Curves of several runs beside each other, read from their logs without decoding anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper.karn.codec import LineError, decode_line
from esper.karn.replay import MAX_LINE_BYTES, file_size, first_seq_after
from esper.leyline import BatchSummary, RunStarted
from esper.leyline.files import open_regular
from esper.leyline.rundir import EventFile, event_files

MAX_COMPARED = 24
_WANTED = (b'{"type":"ROUND_COMPLETED"', b'{"type":"RUN_STARTED"')
"""How the lines begin that are looked at, as the hub writes them."""


class CurveCache:
    """Reads curves by round, and remembers them until a log changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def curves(self, name: str, run_dir: Path) -> dict[str, Any]:
        """The curves of one run, its group and its task; `error` says why there are none."""
        try:
            files = event_files(run_dir)
            sizes = tuple(file_size(file.path) for file in files)
            if run_dir not in self._known or self._known[run_dir][0] != sizes:
                self._known[run_dir] = (sizes, _read_curves(files))
            return {"id": name, **self._known[run_dir][1]}
        except (OSError, ValueError) as error:
            return {"id": name, "error": str(error)}


def _read_curves(files: list[EventFile]) -> dict[str, Any]:
    rounds: dict[int, BatchSummary] = {}
    about: dict[str, Any] = {"group": None, "task": None, "controller": None, "seed": None}
    for file in files:
        limit = first_seq_after(file, files)
        with open(open_regular(file.path), "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                if not line.startswith(_WANTED) or not line.endswith(b"\n"):
                    continue
                try:
                    event = decode_line(line)
                except LineError:
                    continue
                if limit is not None and event.seq >= limit:
                    continue
                if isinstance(event.data, RunStarted):
                    begun = event.data
                    about = {
                        "group": event.group,
                        "task": begun.task,
                        "controller": begun.controller,
                        "seed": begun.run_seed,
                    }
                elif isinstance(event.data, BatchSummary) and event.round is not None:
                    rounds[event.round] = event.data
    kept = sorted(rounds.items())
    return {
        **about,
        "round": [number for number, _ in kept],
        "env_steps": [data.num_env_steps_total for _, data in kept],
        "accuracy_pct": [data.accuracy_mean_pct for _, data in kept],
        "committed_pct": [data.committed_accuracy_pct for _, data in kept],
        "return_mean": [data.return_mean for _, data in kept],
        "params_ratio": [data.params_ratio_mean for _, data in kept],
    }
