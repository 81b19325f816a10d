"""Keeps the record of a run: tells the log, the screen and the checkpoints what the loop has just done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from esper.leyline import BatchSummary, EventSink, HostLayout, TelemetryEventType
from esper.nissa import Hub
from esper.runtime.datasets import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.client import StepFacts
from esper.simic.training.accounts import EpisodeStats
from esper.simic.training.checkpoint import LoadedCheckpoint, Rejection
from esper.simic.training.config import TrainingConfig
from esper.simic.training.keeper import CheckpointKeeper
from esper.simic.training.run_state import run_files
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer


class Display(Protocol):
    """Somebody who watches."""

    def step(self, facts: StepFacts) -> None:
        """One step of every env is done."""

    def round(self, summary: BatchSummary, episodes: Sequence[EpisodeStats]) -> None:
        """A round is complete."""


class RunRecorder:
    """What the trainer tells about itself goes three ways from here. Nothing comes back."""

    def __init__(
        self,
        hub: Hub,
        keeper: CheckpointKeeper,
        display: Display,
        *,
        resumed_from: LoadedCheckpoint | None,
        rejected: tuple[Rejection, ...],
        differences: tuple[str, ...],
    ) -> None:
        self.wanted: frozenset[TelemetryEventType] = frozenset()
        self.sink: EventSink | None = hub
        self._hub, self._keeper, self._display = hub, keeper, display
        self._resumed_from, self._rejected, self._differences = resumed_from, rejected, differences
        self._round_idx = 0

    def opened(self, config: TrainingConfig, task: TaskSpec, data: Dataset, layout: HostLayout) -> None:
        """The run begins."""
        if self._resumed_from is not None:
            self._keeper.loaded(self._resumed_from, self._rejected)

    def round_begins(self, round_idx: int) -> None:
        """The next round's episodes start."""
        self._round_idx = round_idx
        self._hub.progress("play", round=round_idx, epoch=0)

    def step(self, facts: StepFacts) -> None:
        """All envs finished a step."""
        done = max(report.epochs_done for report in facts.after.reports)
        self._hub.progress("play", round=self._round_idx, epoch=done)
        self._display.step(facts)

    def round_ends(
        self, summary: BatchSummary, metrics: PPOUpdateMetrics | None, episodes: Sequence[EpisodeStats]
    ) -> None:
        """The round is complete and counted."""
        self._display.round(summary, episodes)

    def checkpoint(self, trainer: VectorizedPPOTrainer, *, last: bool) -> None:
        """Saves the boundary if it is due."""
        score = trainer.history[-1].committed_accuracy_pct if trainer.history else None
        self._hub.progress("save", round=trainer.next_round)
        self._keeper.offer(trainer.next_round, lambda: run_files(trainer), score=score, last=last)
