"""Shortcuts for common runs. They add nothing to the loop."""

from __future__ import annotations

from typing import Any

from esper.leyline import BatchSummary
from esper.simic.training.config import TrainingConfig, with_overrides
from esper.simic.training.vectorized import open_trainer
from esper.simic.training.vectorized_trainer import NeverStop, Recorder


def train_heuristic(config: TrainingConfig | None = None, /, **overrides: Any) -> list[BatchSummary]:
    """Runs Tamiyo's hand-written rules in the loop that trains policies, and returns the summaries of its rounds.

    Args:
        config: What to run; the defaults if None.
        overrides: Fields of the configuration that are to differ.
    """
    base = TrainingConfig() if config is None else config
    with open_trainer(
        with_overrides(base, {**overrides, "controller": "heuristic"}), Recorder(), NeverStop()
    ) as trainer:
        return trainer.run()
