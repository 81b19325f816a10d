"""Curves of a run for other tools: TensorBoard files, Weights & Biases, trackio. Each library is optional."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from esper.leyline import LoggedEvent
from esper.nissa.scalars import RoundCollector, RoundScalars

STEPS = "env_steps"


class _RoundExporter:
    """Collects events and hands on one set of numbers per round, when the next one begins or at a flush."""

    name: str

    def __init__(self) -> None:
        self._rounds = RoundCollector()

    def write(self, line: LoggedEvent) -> bool:
        """Takes an event; True if it completed a round."""
        return self._export_all(self._rounds.add(line))

    def flush(self) -> None:
        """Exports the round at hand if it is complete."""
        self._export_all(self._rounds.take())

    def _export_all(self, rounds: Iterable[RoundScalars]) -> bool:
        used = False
        for each in rounds:
            self._export(each)
            used = True
        return used

    def _export(self, scalars: RoundScalars) -> None:
        raise NotImplementedError


class TensorBoardBackend(_RoundExporter):
    """Writes one point per round and curve. Needs the `metrics` extra.

    Args:
        folder: Where the files go.
        purge_step: On resume, the env steps of the checkpoint: points beyond it are hidden, since they come again.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        super().__init__()
        self._folder, self._purge_step = folder, purge_step
        self._files: Any = None

    def start(self) -> None:
        """Opens the files; ValueError if the library is not installed."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ValueError("TensorBoard files need tensorboardX: pip install 'esper-growth[metrics]'") from error
        # The first step after a resume is a new point, so what is purged begins right behind the checkpoint.
        purge = None if self._purge_step is None else self._purge_step + 1
        self._files = SummaryWriter(str(self._folder), purge_step=purge)

    def flush(self) -> None:
        """Writes the round at hand if it is complete."""
        super().flush()
        self._files.flush()

    def close(self) -> None:
        """Writes the rest and closes the files."""
        super().flush()
        self._files.close()

    def _export(self, scalars: RoundScalars) -> None:
        for name, value in scalars.values.items():
            self._files.add_scalar(name, value, scalars.env_steps, scalars.wall)


class WandbBackend(_RoundExporter):
    """Logs one row per round to W&B or trackio, with the env steps as a column, so that no second step counter exists.

    Both answer to the same three calls: init, log, finish. Neither comes with Esper.

    Args:
        library: Which of the two to use.
        project: Where the run appears.
        run_id: Name and identity of the run there: ours.
        config: What to show as its configuration. Never put secrets here; the library has its own place for them.
        folder: Where W&B keeps its files; trackio has one place for all runs.
    """

    def __init__(
        self,
        library: Literal["wandb", "trackio"],
        *,
        project: str,
        run_id: str,
        config: Mapping[str, Any],
        folder: Path,
    ) -> None:
        super().__init__()
        self.name: str = library
        self._project, self._run_id, self._config, self._folder = project, run_id, dict(config), folder
        self._library: Any = None

    def start(self) -> None:
        """Begins the run there; ValueError if the library is not installed."""
        try:
            self._library = import_module(self.name)
        except ImportError as error:
            raise ValueError(f"{self.name} is not installed: pip install {self.name}, or leave it out") from error
        common = {"project": self._project, "name": self._run_id, "resume": "allow", "config": self._config}
        if self.name == "wandb":
            # Nothing leaves this machine unless the library's own switch asks for it.
            mode = os.environ.get("WANDB_MODE", "offline")
            self._library.init(id=self._run_id, mode=mode, dir=str(self._folder), **common)
            self._library.define_metric("*", step_metric=STEPS)
        else:
            self._library.init(**common)

    def close(self) -> None:
        """Logs the rest and ends the run there. The hub does not wait for it longer than its own time limit."""
        self.flush()
        self._library.finish()

    def _export(self, scalars: RoundScalars) -> None:
        self._library.log({STEPS: scalars.env_steps, **scalars.values})
