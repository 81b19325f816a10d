"""One sitting of a training run: its directory, its lock, its log, its checkpoints, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from esper.leyline import (
    BatchSummary,
    ExitCode,
    RunBusy,
    StorageError,
)
from esper.leyline.files import free_bytes
from esper.leyline.rundir import CONFIG_FILE, DEFAULT_GROUP
from esper.nissa import Backend, Hub, TelemetryHub, complain
from esper.nissa.reports import HubReport
from esper.nissa.segments import read_manifest
from esper.simic.telemetry.opening import open_hub
from esper.simic.training import storage
from esper.simic.training.checkpoint import LoadedCheckpoint, Rejection, checkpoint_folders
from esper.simic.training.config import FREE_ON_RESUME, TrainingConfig, resume_differences, with_overrides
from esper.simic.training.end_marker import EndMarker
from esper.simic.training.identity import NOT_PROMISED, identity, identity_differences
from esper.simic.training.keeper import CheckpointKeeper, find_checkpoint
from esper.simic.training.log_watch import LogWatch, what_is_lost
from esper.simic.training.recorder import Origin, RunRecorder
from esper.simic.training.run_dir import RunDir, create_run, open_run
from esper.simic.training.run_state import RunState
from esper.simic.training.stop_signals import StopSignals
from esper.simic.training.vectorized import CALIBRATIONS_DIR, AgentReads, open_trainer
from esper.simic.training.vectorized_trainer import StopRequest, VectorizedPPOTrainer
from esper.tolaria.messages import StepCancelled

CLOSE_TIMEOUT_S = 10.0
"""Most time that the log and its exporters get to end; an upload may need some of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a sitting begins: a new run, or a checkpoint of an old one."""

    run: RunDir
    config: TrainingConfig
    saved: RunState | None = None
    checkpoint: LoadedCheckpoint | None = None
    rejected: tuple[Rejection, ...] = ()
    group: str = DEFAULT_GROUP
    """Cohort of the run, as its log tells it."""

    @property
    def rounds_done(self) -> int:
        """Rounds that lie behind."""
        return 0 if self.checkpoint is None else self.checkpoint.index

    @property
    def next_seq(self) -> int:
        """Number of the first event of this sitting."""
        return 0 if self.checkpoint is None else self.checkpoint.facts.next_seq

    @property
    def differences(self) -> tuple[str, ...]:
        """How this machine and build differ from those of the checkpoint."""
        return () if self.checkpoint is None else identity_differences(self.checkpoint.facts.identity, identity())


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a sitting ended."""

    history: tuple[BatchSummary, ...]
    exit_code: ExitCode
    saved_index: int | None
    """Rounds that a resume need not repeat; None if nothing is saved that it could go on from."""


def start_new(
    config: TrainingConfig, runs_dir: Path, run_id: str | None = None, *, group: str = DEFAULT_GROUP
) -> Start:
    """Makes the directory of a new run.

    Args:
        config: What to train.
        runs_dir: Folder of run directories.
        run_id: Its name; None for date, time and chance.
        group: Cohort of the run.

    Raises:
        ValueError: The name is not allowed or taken.
        StorageError: The directory cannot be written to.
    """
    run = create_run(runs_dir, run_id)
    path = run.path / CONFIG_FILE
    try:
        storage.write_bytes(path, config.to_json().encode())
    except OSError as error:
        raise StorageError(str(path), error, needed_bytes=None, free_bytes=free_bytes(run.path)) from error
    return Start(run=run, config=config, group=group)


def start_again(path: Path, changes: Mapping[str, Any]) -> Start:
    """Finds the newest valid checkpoint of a run.

    Args:
        path: The run directory.
        changes: Fields that are to differ from the run's own configuration.

    Raises:
        ValueError: There is no such run, or a change would make it another run.
        CheckpointError: No checkpoint is valid.
    """
    run = open_run(path)
    checkpoint, saved, rejected = find_checkpoint(run)
    config = with_overrides(saved.config, changes)
    if changed := resume_differences(saved.config, config):
        free = ", ".join(f"--{name.replace('_', '-')}" for name in FREE_ON_RESUME)
        raise ValueError(
            f"cannot change on resume: {'; '.join(changed)}. Only {free} may differ; start a new run for the rest"
        )
    if config.rounds < checkpoint.index:
        raise ValueError(f"{run.run_id} has done {checkpoint.index} rounds already, got --rounds {config.rounds}")
    manifest = read_manifest(path)
    return Start(
        run=run,
        config=config,
        saved=saved,
        checkpoint=checkpoint,
        rejected=rejected,
        group=DEFAULT_GROUP if manifest is None else manifest.group,
    )


def run_session(
    start: Start, stop: StopSignals, listeners: Sequence[Backend] = (), *, data_dir: Path | None = None
) -> Finish:
    """Trains until the last round, a stop or an error, and leaves the run in a state that can be resumed.

    Args:
        start: Where it begins.
        stop: Who may end it.
        listeners: Told every event, such as a screen. What they do cannot touch the run.
        data_dir: Where the data lies; None for the usual places.

    Raises:
        RunBusy: Another process works on this run.
        Exception: Whatever went wrong, after the log has its end marker.
    """
    try:
        with sitting(start, stop, listeners, data_dir=data_dir) as seat:
            try:
                seat.trainer.run()
            except StepCancelled:
                seat.save_boundary()
    except StepCancelled:  # before the first round, while the scale was measured
        return finish_unopened(start, stop.exit_code)
    return seat.finish(stop.exit_code)


def finish_unopened(start: Start, stopped: ExitCode | None) -> Finish:
    """How a sitting ended that was stopped before it could play a round."""
    return Finish(
        history=() if start.saved is None else tuple(start.saved.history),
        exit_code=stopped or ExitCode.INTERRUPTED,
        saved_index=None if start.checkpoint is None else start.checkpoint.index,
    )


@dataclass(slots=True, kw_only=True)
class Seat:
    """A run that is open: its trainer, ready for the next round."""

    trainer: VectorizedPPOTrainer
    keeper: CheckpointKeeper
    log_complete: bool = True
    """Known for good when the sitting is over."""

    def save_boundary(self) -> None:
        """Saves after a round was broken off: nothing the policy owns has changed since the last boundary."""
        self.trainer.offer_checkpoint(last=True)

    def finish(self, stopped: ExitCode | None) -> Finish:
        """How it ended, once the sitting is over.

        Args:
            stopped: What a signal asked for; None if there was none.
        """
        saved = self.keeper.saved_index
        if stopped is not None:
            code = stopped
        elif not self.log_complete:
            code = ExitCode.LOG_INCOMPLETE
        else:
            code = ExitCode.DONE if saved == self.trainer.next_round else ExitCode.STORAGE
        return Finish(history=tuple(self.trainer.history), exit_code=code, saved_index=saved)


@contextmanager
def sitting(
    start: Start, stop: StopRequest, listeners: Sequence[Backend] = (), *, data_dir: Path | None = None
) -> Iterator[Seat]:
    """Opens a run for this process: lock, log, workers. The log's last event says how the `with` block ended."""
    with start.run.lock():
        _check_still_newest(start)
        for difference in start.differences:
            complain(f"{difference}: {NOT_PROMISED}")
        try:
            attempt, hub = _open_hub(start, listeners)
        except BaseException:
            if start.checkpoint is None:
                start.run.discard()  # nothing has happened in it, and its name is to be free for the next try
            raise
        watch = LogWatch(stop, hub)
        seat: Seat | None = None
        try:
            with EndMarker(hub, watch) as marker:
                keeper = _keeper(start, attempt, hub)
                recorder = _recorder(start, keeper, hub)
                cache = start.run.path.parent / CALIBRATIONS_DIR
                with open_trainer(
                    start.config, recorder, watch, data_dir=data_dir, cache=cache, saved=start.saved
                ) as trainer:
                    marker.trainer = trainer
                    seat = Seat(trainer=trainer, keeper=keeper)
                    yield seat
        finally:
            report = hub.close(CLOSE_TIMEOUT_S)
            _tell_losses(start.run.path, report)
            if seat is not None:
                seat.log_complete = report.complete and watch.reason is None


def _check_still_newest(start: Start) -> None:
    """The checkpoint was chosen before the lock was ours; its owner may have gone on meanwhile."""
    newest = max(checkpoint_folders(start.run), default=0)
    if start.checkpoint is not None and newest > start.checkpoint.index and not start.rejected:
        raise RunBusy(
            f"{start.run.run_id} went on to round {newest} while this process started at {start.checkpoint.index}. "
            "Resume it again"
        )


def _open_hub(start: Start, listeners: Sequence[Backend]) -> tuple[int, Hub]:
    """The number of this sitting, and its log.

    Raises:
        StorageError: The log cannot be written.
    """
    path = start.run.path
    try:
        hub = open_hub(
            start.config.telemetry(),
            path,
            run_id=start.run.run_id,
            first_seq=start.next_seq,
            group=start.group,
            run_config=asdict(start.config),
            env_steps=None if start.saved is None else start.saved.counters["num_env_steps"],
            listeners=listeners,
        )
    except OSError as error:
        raise StorageError(str(path), error, needed_bytes=None, free_bytes=free_bytes(path)) from error
    if isinstance(hub, TelemetryHub):
        return hub.attempt, hub
    return 0 if start.checkpoint is None else start.checkpoint.facts.attempt + 1, hub


def _keeper(start: Start, attempt: int, hub: Hub) -> CheckpointKeeper:
    return CheckpointKeeper(
        start.run,
        hub,
        attempt=attempt,
        resumed_from=None if start.checkpoint is None else start.checkpoint.index,
        config=start.config,
    )


def _tell_losses(path: Path, report: HubReport) -> None:
    if not report.complete:
        complain(f"{path}: {what_is_lost(report.num_unwritten, report.num_dropped, report.log_error)}")
    for name, listener in report.backends.items():
        if listener.num_lost:
            why = listener.error or "too slow"
            complain(f"{name} missed {listener.num_lost:,} events ({why}). The log has everything")


def _recorder(start: Start, keeper: CheckpointKeeper, hub: Hub) -> RunRecorder:
    origin = Origin(
        checkpoint=start.checkpoint,
        rejected=start.rejected,
        differences=start.differences,
        log_state=None if start.saved is None else start.saved.log_state,
    )
    return RunRecorder(
        hub,
        start.config.telemetry(),
        keeper=keeper,
        origin=origin,
        reads=AgentReads,
        folder=start.run.path,
    )
