"""Weights & Biases, or trackio, which answers to the same three calls: init, log, finish. Neither comes with Esper."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from esper.leyline import LoggedEvent
from esper.nissa.scalars import RoundCollector, RoundScalars

STEPS = "env_steps"


class WandbBackend:
    """Logs one row per round, with the env steps as a column, so that no second step counter exists.

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
        self.name: str = library
        self._project = project
        self._run_id = run_id
        self._config = dict(config)
        self._folder = folder
        self._rounds = RoundCollector()
        self._library: ModuleType | None = None

    def start(self) -> None:
        """Begins the run there.

        Raises:
            ValueError: The library is not installed.
        """
        try:
            self._library = import_module(self.name)
        except ImportError as error:
            raise ValueError(f"{self.name} is not installed: pip install {self.name}, or leave it out") from error
        if self.name == "wandb":
            # Nothing leaves this machine unless the library's own switch asks for it.
            mode = os.environ.get("WANDB_MODE", "offline")
            self._library.init(
                project=self._project,
                id=self._run_id,
                name=self._run_id,
                resume="allow",
                mode=mode,
                config=self._config,
                dir=str(self._folder),
            )
            self._library.define_metric("*", step_metric=STEPS)
        else:
            self._library.init(project=self._project, name=self._run_id, resume="allow", config=self._config)

    def write(self, line: LoggedEvent) -> bool:
        """Takes an event; a completed round is logged when the next one begins."""
        return self._log(self._rounds.add(line))

    def flush(self) -> None:
        """Logs the round at hand if it is complete."""
        self._log(self._rounds.take())

    def close(self) -> None:
        """Logs the rest and ends the run there. The hub does not wait for it longer than its own time limit."""
        self.flush()
        assert self._library is not None
        self._library.finish()

    def _log(self, rounds: Iterable[RoundScalars]) -> bool:
        """Whether there was anything to log."""
        assert self._library is not None
        used = False
        for each in rounds:
            self._library.log({STEPS: each.env_steps, **each.values})
            used = True
        return used
