"""TensorBoard files of a run. Needs the `metrics` extra."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from esper.leyline import LoggedEvent
from esper.nissa.scalars import RoundCollector, RoundScalars


class TensorBoardBackend:
    """Writes one point per round and curve.

    Args:
        folder: Where the files go.
        purge_step: On resume, the env steps of the checkpoint: points beyond it are hidden, since they come again.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        self._folder = folder
        self._purge_step = purge_step
        self._rounds = RoundCollector()
        self._files: Any = None

    def start(self) -> None:
        """Opens the files.

        Raises:
            ValueError: The library is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ValueError("TensorBoard files need tensorboardX: pip install 'esper-growth[metrics]'") from error
        # The first step after a resume is a new point, so what is purged begins right behind the checkpoint.
        purge = None if self._purge_step is None else self._purge_step + 1
        self._files = SummaryWriter(str(self._folder), purge_step=purge)

    def write(self, line: LoggedEvent) -> bool:
        """Takes an event; a completed round is written when the next one begins."""
        return self._write(self._rounds.add(line))

    def flush(self) -> None:
        """Writes the round at hand if it is complete."""
        self._write(self._rounds.take())
        self._files.flush()

    def close(self) -> None:
        """Writes the rest and closes the files."""
        self._write(self._rounds.take())
        self._files.close()

    def _write(self, rounds: Iterable[RoundScalars]) -> bool:
        """Whether there was anything to write."""
        used = False
        for each in rounds:
            for name, value in each.values.items():
                self._files.add_scalar(name, value, each.env_steps, each.wall)
            used = True
        return used
