"""Keeps the record of a run: tells the log and the checkpoints what the loop has just done."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.leyline import (
    ActionExecutionResult,
    ActionSpec,
    BatchSummary,
    CudaMemory,
    EpisodeCompleted,
    EventSink,
    HostLayout,
    PhaseTime,
    ProfileMeasured,
    TelemetryEventType,
    make_event,
)
from esper.leyline.files import free_bytes
from esper.nissa import Hub
from esper.runtime.datasets import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.run.checkpoint import LoadedCheckpoint, Rejection
from esper.simic.run.checkpoint_schedule import CheckpointWriter
from esper.simic.run.environment import run_started
from esper.simic.run.run_state import run_files
from esper.simic.telemetry.telemetry_config import TelemetryConfig
from esper.simic.training.run_log import PolicyReads, RunLog
from esper.simic.training.vectorized_trainer import Recorder, VectorizedPPOTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a sitting comes from."""

    checkpoint: LoadedCheckpoint | None = None
    rejected: tuple[Rejection, ...] = ()
    differences: tuple[str, ...] = ()
    log_state: dict[str, Any] | None = None
    """What the alarms remembered at the checkpoint."""


class RunRecorder(Recorder):
    """What the trainer tells about itself goes from here to the log and to the checkpoints. Nothing comes back.

    Args:
        hub: The log.
        telemetry: How much is told.
        keeper: Saves boundaries; None where nothing is saved.
        origin: Where the sitting comes from.
        reads: A closer look at a trainer's policy, for level DEBUG.
        folder: Where the run lies, for the room that is left there; None if it lies nowhere.
    """

    def __init__(
        self,
        hub: Hub,
        telemetry: TelemetryConfig,
        *,
        keeper: CheckpointWriter | None,
        origin: Origin,
        reads: Callable[[VectorizedPPOTrainer], PolicyReads],
        folder: Path | None = None,
    ) -> None:
        self.sink: EventSink | None = hub
        self._hub, self._telemetry, self._keeper = hub, telemetry, keeper
        self._origin = origin
        self._reads = reads
        self._folder = folder
        self._log: RunLog
        self._has_workers: bool
        self._num_rows: int
        self._trainer: VectorizedPPOTrainer
        self._looks: PolicyReads
        self._round_idx = 0
        self.telling_total_s = 0.0
        """CPU time of the training thread in here, for benchmarks."""
        self._telling_s = 0.0
        self._writer_ms = 0.0

    def opened(
        self, trainer: VectorizedPPOTrainer, task: TaskSpec, data: Dataset, layout: HostLayout, workers: tuple[str, int]
    ) -> None:
        """The run begins."""
        self._trainer, self._looks, config = trainer, self._reads(trainer), trainer.config
        self._has_workers, self._num_rows = workers[0] == "process", len(data.train)
        self._log = RunLog(self._hub, self._telemetry, task, layout, num_rounds=config.rounds, outbox=trainer.pool)
        if self._origin.log_state is not None:
            self._log.load_state_dict(self._origin.log_state)
        checkpoint = self._origin.checkpoint
        payload = run_started(
            config,
            task,
            data,
            layout,
            workers=workers,
            resumed_from=None if checkpoint is None else checkpoint.path.name,
            differences=self._origin.differences,
        )
        self._hub.emit(make_event(TelemetryEventType.RUN_STARTED, payload))
        if checkpoint is not None and self._keeper is not None:
            self._keeper.loaded(checkpoint, self._origin.rejected)

    def round_begins(self, round_idx: int) -> None:
        """The next round's episodes start."""
        self._round_idx, started = round_idx, time.thread_time()
        self._log.round_begins(round_idx, self._trainer.config.envs)
        self._count(started)
        self._hub.progress("play", round=round_idx, epoch=0)

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        """All envs finished a step."""
        started = time.thread_time()
        done = max(report.epochs_done for report in after.reports)
        self._hub.progress("play", round=self._round_idx, epoch=done)
        self._log.step(self._trainer.client.last_step, self._looks)
        self._count(started)

    def round_ends(
        self,
        round_idx: int,
        summary: BatchSummary,
        metrics: PPOUpdateMetrics | None,
        episodes: Sequence[EpisodeCompleted],
        phases: Mapping[str, PhaseTime],
    ) -> None:
        """The round is complete and counted."""
        profile, started = self._profile(summary, episodes, phases), time.thread_time()
        self._telling_s = 0.0  # telling a round is part of the next one's profile, as saving it is
        self._log.round_ends(round_idx, summary, metrics, episodes, profile, self._looks)
        self._count(started)

    def checkpoint(self, trainer: VectorizedPPOTrainer, *, last: bool) -> None:
        """Saves the boundary if it is due."""
        if self._keeper is None:
            return
        score = trainer.history[-1].committed_accuracy_pct if trainer.history else None
        self._hub.progress("save", round=trainer.next_round)
        self._keeper.offer(
            trainer.next_round, lambda: run_files(trainer, self._log.state_dict()), score=score, last=last
        )

    def _count(self, started: float) -> None:
        spent_s = time.thread_time() - started
        self._telling_s += spent_s
        self.telling_total_s += spent_s

    def _profile(
        self, summary: BatchSummary, episodes: Sequence[EpisodeCompleted], phases: Mapping[str, PhaseTime]
    ) -> ProfileMeasured:
        """Where the round's time went. Saving comes after a round and is told with the next."""
        steps = sum(episode.num_epochs for episode in episodes)
        health = self._hub.health()
        writer_ms, self._writer_ms = health.writer_cpu_ms - self._writer_ms, health.writer_cpu_ms
        waits = self._has_workers and summary.duration_s > 0.0
        return ProfileMeasured(
            env_steps_per_s=steps / summary.duration_s if summary.duration_s > 0.0 else 0.0,
            host_samples_per_s=steps * self._num_rows / summary.duration_s if summary.duration_s > 0.0 else None,
            phases=phases,
            controller_ms_per_env_step=phases["act"].wall_ms / steps if steps else None,
            telemetry_cpu_ms=1e3 * self._telling_s + writer_ms,
            wait_share=phases["execute"].wall_ms / (1e3 * summary.duration_s) if waits else None,
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            cuda=cuda_memory(),
            disk_free_bytes=None if self._folder is None else free_bytes(self._folder),
            queue_high_water=health.queue_high_water,
        )


def cuda_memory() -> dict[str, CudaMemory] | None:
    """What this process holds on its devices; None where it uses none. Worker processes hold their own."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    found = {}
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(device)
        found[f"cuda:{device}"] = CudaMemory(
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            total_bytes=torch.cuda.get_device_properties(device).total_memory,
            num_retries=stats.get("num_alloc_retries", 0),
        )
    return found
