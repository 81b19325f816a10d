"""One session of a training run, from start or resume to its last event: where it begins, how it ends.

Who opens log and workers is the composition root, `simic/training/vectorized.py`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from esper.leyline import (
    BatchSummary,
    ExitCode,
    RunBusy,
    RunEnded,
    Severity,
    StorageError,
    TelemetryEventType,
    make_event,
)
from esper.leyline.files import free_bytes, write_new
from esper.leyline.rundir import CONFIG_FILE
from esper.nissa import Hub, complain
from esper.runtime.tasks import get_task_spec
from esper.simic.run.checkpoint import LoadedCheckpoint, Rejection, checkpoint_folders, newest_valid
from esper.simic.run.checkpoint_schedule import FLUSH_TIMEOUT_S, CheckpointWriter
from esper.simic.run.environment import identity, identity_differences
from esper.simic.run.run_dir import RunDir, create_run, open_run
from esper.simic.run.run_state import RunState, read_own
from esper.simic.training.config import FREE_ON_RESUME, TrainingConfig, resume_differences, with_overrides
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer
from esper.tolaria.executor.available import VERSION
from esper.tolaria.worker import StepCancelled

TRACEBACK_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Where a session begins: a configuration, with a run directory if it is to be kept, and a checkpoint of it."""

    config: TrainingConfig
    run: RunDir | None = None
    """None: nothing is written, and events go to the hub of the process."""
    checkpoint: LoadedCheckpoint | None = None
    saved: RunState | None = None
    """What the checkpoint holds."""
    rejected: tuple[Rejection, ...] = ()
    """Newer checkpoints that are not valid."""
    group: str | None = None
    """Cohort of the run in its log."""

    @property
    def path(self) -> Path:
        """The run directory."""
        assert self.run is not None, "this run is not kept on disk"
        return self.run.path

    @property
    def rounds_done(self) -> int:
        """Rounds in the checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.facts.index

    @property
    def differences(self) -> tuple[str, ...]:
        """How this machine and build differ from those of the checkpoint."""
        return () if self.checkpoint is None else identity_differences(self.checkpoint.facts.identity, identity())


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How a session ended."""

    history: tuple[BatchSummary, ...]
    exit_code: ExitCode
    saved_index: int | None
    """Rounds that a resume need not repeat; None if nothing is saved that it could go on from."""


def start_new(
    config: TrainingConfig, runs_dir: Path, run_id: str | None = None, *, group: str | None = None
) -> RunStart:
    """Makes the directory of a new run, named by date, time and random digits unless `run_id` is given.

    Raises:
        ValueError: The name is not allowed or taken.
        StorageError: The directory cannot be written to.
    """
    run = create_run(runs_dir, run_id)
    path = run.path / CONFIG_FILE
    try:
        write_new(path, config.to_json().encode())
    except OSError as error:
        raise StorageError(str(path), error, needed_bytes=None, free_bytes=free_bytes(run.path)) from error
    return RunStart(run=run, config=config, group=group)


def start_again(path: Path, changes: Mapping[str, Any]) -> RunStart:
    """Finds the newest valid checkpoint of a run; says on stderr which newer ones are not.

    `changes` are fields that are to differ from the run's own configuration.

    Raises:
        ValueError: There is no such run, or a change would make it another run.
        CheckpointError: No checkpoint is valid.
    """
    run = open_run(path)
    if "task" in changes:
        get_task_spec(changes["task"])  # code of the user's own is run because it was named here, not in the folder
    checkpoint, saved, rejected = newest_valid(run, partial(read_own, run.run_id))
    for one in rejected:
        complain(f"{one.name} rejected: {one.reason}. Using {checkpoint.path.name}")
    if changes.get("backend") == "auto":
        changes = {name: value for name, value in changes.items() if name != "backend"}  # the run has made its choice
    if changes.get("worker_kind", saved.config.worker_kind) != saved.config.worker_kind:
        changes = {"workers": None, "ray_address": None, **changes}  # what was said of workers no longer wanted
    config = with_overrides(saved.config, changes)
    if changed := resume_differences(saved.config, config):
        free = ", ".join(f"--{name.replace('_', '-')}" for name in FREE_ON_RESUME)
        raise ValueError(
            f"cannot change on resume: {'; '.join(changed)}. Only {free} may differ; start a new run for the rest"
        )
    if config.ray_address not in (None, "auto") and "ray_address" not in changes:
        raise ValueError(
            f"{run.run_id} was trained by the Ray cluster at {config.ray_address}, but a run folder does not say whose "
            f"machines to trust. Name it again, --ray-address {config.ray_address}, or other workers, --worker-kind"
        )
    trained_by = checkpoint.facts.identity.get("native")
    if config.backend == "native" and trained_by != VERSION:
        raise ValueError(
            f"{run.run_id} was trained by version {trained_by} of the native backend, this is version {VERSION}, and "
            "its hosts would not be the same. Start a new run, or go on with the release it was started with"
        )
    done = checkpoint.facts.index
    if config.rounds < done:
        raise ValueError(f"{run.run_id} has done {done} rounds already, got --rounds {config.rounds}")
    return RunStart(run=run, config=config, saved=saved, checkpoint=checkpoint, rejected=rejected)


def check_still_newest(start: RunStart) -> None:
    """The checkpoint was chosen before the lock was ours; its owner may have gone on meanwhile.

    Raises:
        RunBusy: It has.
    """
    assert start.run is not None
    newest = max(checkpoint_folders(start.run), default=0)
    if start.checkpoint is not None and newest > start.rounds_done and not start.rejected:
        raise RunBusy(
            f"{start.run.run_id} went on to round {newest} while this process started at {start.rounds_done}. "
            "Resume it again"
        )


@dataclass(slots=True, kw_only=True)
class Session:
    """An open run: its trainer, ready for the next round."""

    trainer: VectorizedPPOTrainer
    checkpoints: CheckpointWriter | None
    log_complete: bool = True
    """Final when the session is closed."""

    def run(self) -> list[BatchSummary]:
        """Trains until the last round or a stop. A round that is broken off is not counted."""
        try:
            return self.trainer.run()
        except StepCancelled:
            self.save_boundary()
            return self.trainer.history

    def save_boundary(self) -> None:
        """Saves after a round was broken off: nothing the policy owns has changed since the last boundary."""
        self.trainer.offer_checkpoint(last=True)

    def end(self, stopped: ExitCode | None) -> SessionEnd:
        """How it ended, once it is closed; `stopped` is what a signal asked for."""
        saved = None if self.checkpoints is None else self.checkpoints.saved_index
        if stopped is not None:
            code = stopped
        elif not self.log_complete or self.trainer.recorder.log_trouble is not None:
            code = ExitCode.LOG_INCOMPLETE
        else:
            code = ExitCode.DONE if saved == self.trainer.next_round else ExitCode.STORAGE
        return SessionEnd(history=tuple(self.trainer.history), exit_code=code, saved_index=saved)


def end_unopened(start: RunStart, stopped: ExitCode | None) -> SessionEnd:
    """How a session ended that was stopped before its trainer was built."""
    return SessionEnd(
        history=() if start.saved is None else start.saved.history,
        exit_code=stopped or ExitCode.INTERRUPTED,
        saved_index=None if start.checkpoint is None else start.rounds_done,
    )


# ---- the log


def log_trouble(hub: Hub) -> str | None:
    """Why a log is not good enough for its run to go on; None if it is.

    The hub decides what is good enough: too much that waits for a disk, a writer that failed, or, where a complete log
    was asked for, any loss and any error. An error that is over by now, with nothing lost, is none.
    """
    if hub.health().must_stop:
        hub.flush(FLUSH_TIMEOUT_S, fsync=True)  # what failed a while ago may work by now
    health = hub.health()
    return log_losses(health.num_held, health.num_dropped, health.log_error) if health.must_stop else None


def log_losses(num_unwritten: int, num_dropped: Mapping[str, int], error: str | None) -> str:
    """In one line: what a log lacks, and why as far as the hub knows."""
    lost = ", ".join(f"{count} {kind}" for kind, count in sorted(num_dropped.items()))
    parts = [
        "the event log is not complete",
        f"{num_unwritten} events are not written" if num_unwritten else "",
        f"lost: {lost}" if lost else "",
        "" if error is None else error.strip().splitlines()[-1],
    ]
    return "; ".join(filter(None, parts))


def emit_run_ended(
    hub: Hub,
    trainer: VectorizedPPOTrainer | None,
    *,
    error: BaseException | None,
    started_s: float,
) -> None:
    """Emits the last event of a session; a cancelled step or Ctrl-C is no failure, having no trainer is one."""
    history = [] if trainer is None else trainer.history
    if isinstance(error, StepCancelled | KeyboardInterrupt):
        status, error = "interrupted", None
    elif error is not None or trainer is None:
        status = "failed"
    else:
        status = "completed" if trainer.next_round >= trainer.config.rounds else "interrupted"
    name = message = tail = None
    if error is not None:
        name, message = type(error).__name__, str(error)
        tail = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    elif trainer is not None and trainer.recorder.log_trouble is not None:
        name, message = "LogIncomplete", trainer.recorder.log_trouble
    payload = RunEnded(
        status=status,  # type: ignore[arg-type]
        error_type=name,
        error_message=message,
        traceback_tail=tail,
        num_rounds_total=len(history),
        num_env_steps_total=0 if trainer is None else trainer.num_env_steps,
        best_accuracy_pct=max((row.accuracy_best_pct for row in history), default=None),
        final_accuracy_pct=history[-1].accuracy_mean_pct if history else None,
        wall_s=time.monotonic() - started_s,
        num_dropped_total=sum(hub.health().num_dropped.values()),
    )
    severity = Severity.ERROR if status == "failed" else Severity.INFO
    hub.emit(make_event(TelemetryEventType.RUN_ENDED, payload, severity))
