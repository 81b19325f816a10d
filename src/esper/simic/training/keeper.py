"""Saves a run at its boundaries, and finds where to go on: checkpoints as a policy, without the run's contents."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from esper.leyline import (
    CheckpointRecorded,
    ModelFileError,
    Severity,
    StorageError,
    TelemetryEventType,
    make_event,
)
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.nissa import Hub, complain
from esper.simic.training.cadence import Cadence
from esper.simic.training.checkpoint import LoadedCheckpoint, Rejection, SavedCheckpoint, newest_valid, save_checkpoint
from esper.simic.training.config import TrainingConfig
from esper.simic.training.identity import identity
from esper.simic.training.manifest import CheckpointFacts
from esper.simic.training.retention import Retention, retain
from esper.simic.training.run_dir import RunDir, space_warning
from esper.simic.training.run_state import RunState, read_run_files

FLUSH_TIMEOUT_S = 10.0
MAX_FAILED_SAVES = 5
MAX_SHARE = 0.01
"""Most of a run's time that saving may take, unless every round is to be saved."""


class CheckpointKeeper:
    """Writes the checkpoints of one run. The caller holds the run's lock.

    Args:
        run: Where to.
        log: Told of every save, and made durable before it.
        attempt: How often the run was resumed.
        resumed_from: Index of the checkpoint it goes on from; None for a new run.
        config: How many to keep, how often to save, and whether the log has to be complete: if so, nothing is saved
            once it has lost an event, so that a resume repeats what is lost.
        clock: Seconds; does not go back.
    """

    def __init__(
        self,
        run: RunDir,
        log: Hub,
        *,
        attempt: int,
        resumed_from: int | None,
        config: TrainingConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._log = run, log
        self._attempt, self._resumed_from = attempt, resumed_from
        self._config = config
        self._clock = clock
        self._warned = self._withheld = False
        self._retention = Retention(last=config.keep_checkpoints)
        self._cadence = Cadence(
            started_s=clock(),
            saved_index=resumed_from,
            min_interval_s=config.checkpoint_s,
            max_share=MAX_SHARE if config.checkpoint_s > 0.0 else 1.0,
        )

    @property
    def saved_index(self) -> int | None:
        """Rounds of the newest checkpoint; None if there is none."""
        return self._cadence.saved_index

    def offer(
        self, index: int, files: Callable[[], Mapping[str, bytes]], *, score: float | None, last: bool
    ) -> SavedCheckpoint | None:
        """Saves the boundary after `index` rounds if it is due.

        Args:
            index: Rounds that are done.
            files: Makes the contents.
            score: Higher is better; None: not measured.
            last: The run ends here, so what is not saved yet is saved now.

        Raises:
            StorageError: Saving has failed five times in a row, or at the end of the run.
        """
        if not self._cadence.due(index, self._clock(), final=last):
            return None
        started = self._clock()
        if (why := self._log_trouble()) is not None:
            self._cadence.withheld(self._clock(), self._clock() - started)
            self._withhold(index, why, last=last)
            return None
        self._withheld = False
        try:
            saved = self._save(index, files(), score)
        except StorageError as error:
            self._cadence.failed(self._clock(), self._clock() - started)
            self._failed(index, error)
            if last or self._cadence.failures >= MAX_FAILED_SAVES:
                raise
            return None
        self._cadence.saved(index, self._clock(), self._clock() - started)
        self._tell("saved", saved.path.name, index, saved=saved)
        for stuck in retain(self._run, self._retention, resumed_from=self._resumed_from).stuck:
            complain(f"old checkpoint {stuck.name} cannot be removed: {stuck.reason}")
        if not self._warned and (warning := space_warning(self._run, saved.size_bytes)) is not None:
            self._warned = True
            complain(f"{warning}")
        return saved

    def _save(self, index: int, files: Mapping[str, bytes], score: float | None) -> SavedCheckpoint:
        facts = CheckpointFacts(
            run_id=self._run.run_id,
            attempt=self._attempt,
            round=index,
            epoch=None,
            next_seq=self._log.next_seq,
            score=score,
            config=json.loads(self._config.to_json()),
            identity=identity(),
        )
        return save_checkpoint(self._run, kind="round", index=index, files=files, facts=facts)

    def _log_trouble(self) -> str | None:
        """Why the log does not allow a save; None if it does."""
        if not self._log.flush(FLUSH_TIMEOUT_S, fsync=True):
            return "the event log cannot be made durable"
        if self._config.require_complete and self._log.health().num_dropped:
            return "the event log has lost events, and this run needs them all"
        return None

    def _withhold(self, index: int, why: str, *, last: bool) -> None:
        """Commits nothing, because a checkpoint that counts events which are not on disk would lose them on resume.

        This is a failure of the log, which has rules of its own for how long training goes on, so it does not count
        among the failed saves that end a run.
        """
        if last or not self._withheld:
            complain(f"checkpoint of round {index} not saved: {why}. The earlier ones are intact")
        self._withheld = True
        self._tell("save_failed", f"round {index}", index, error=why)

    def _failed(self, index: int, error: StorageError) -> None:
        complain(f"checkpoint of round {index} not saved: {error}. The earlier ones are intact")
        self._tell("save_failed", f"round {index}", index, error=str(error))

    def loaded(self, checkpoint: LoadedCheckpoint, rejected: tuple[Rejection, ...]) -> None:
        """Logs where the run goes on from, and what could not be used."""
        for one in rejected:
            self._tell("rejected", one.name, None, error=one.reason)
        self._tell("loaded", checkpoint.path.name, checkpoint.index)

    def _tell(
        self,
        action: str,
        name: str,
        index: int | None,
        *,
        saved: SavedCheckpoint | None = None,
        error: str | None = None,
    ) -> None:
        payload = CheckpointRecorded(
            action=action,  # type: ignore[arg-type]
            path=f"{CHECKPOINTS_DIR}/{name}",
            round=index,
            next_seq=self._log.next_seq,
            size_bytes=None if saved is None else saved.size_bytes,
            save_ms=None if saved is None else saved.save_ms,
            manifest_sha256=None if saved is None else saved.manifest_sha256,
            error=error,
        )
        severity = Severity.INFO if error is None else Severity.ERROR
        self._log.emit(make_event(TelemetryEventType.CHECKPOINT_RECORDED, payload, severity))


def find_checkpoint(run: RunDir) -> tuple[LoadedCheckpoint, RunState, tuple[Rejection, ...]]:
    """The newest checkpoint of a run that proves valid, read; says on stderr which newer ones do not.

    Raises:
        CheckpointError: None is valid.
    """
    loaded, rejected = newest_valid(run, check=lambda found: _check_ours(run, found))
    for one in rejected:
        complain(f"{one.name} rejected: {one.reason}. Using {loaded.path.name}")
    return loaded, read_run_files(loaded.files), rejected


def _check_ours(run: RunDir, found: LoadedCheckpoint) -> None:
    """Refuses a checkpoint that is whole but not of this run."""
    if found.kind != "round" or found.facts.run_id != run.run_id:
        raise ModelFileError(
            f"it is a {found.kind} checkpoint of run {found.facts.run_id}; expected a round of {run.run_id}"
        )
    read_run_files(found.files)
