"""When to save a checkpoint, which ones stay on disk, and the writer that does both at every round boundary."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from esper.leyline import (
    CheckpointError,
    CheckpointRecorded,
    NumericFailure,
    Severity,
    StorageError,
    TelemetryEventType,
    make_event,
)
from esper.leyline.rundir import CHECKPOINTS_DIR, MANIFEST_FILE
from esper.nissa import Hub, complain
from esper.simic.run.checkpoint import (
    CheckpointFacts,
    LoadedCheckpoint,
    Rejection,
    SavedCheckpoint,
    checkpoint_folders,
    read_checkpoint_manifest,
    remove_checkpoint,
    save_checkpoint,
)
from esper.simic.run.environment import identity
from esper.simic.run.run_dir import RunDir, space_warning
from esper.simic.run.run_state import read_own
from esper.simic.training.config import TrainingConfig

FLUSH_TIMEOUT_S = 10.0
MAX_FAILED_SAVES = 5
MAX_SHARE = 0.01
"""Most of a run's time that saving may take, unless every round is to be saved."""
KEEP_EVERY = 50
"""Checkpoints whose index is a multiple of this stay, for looking back."""


@dataclass(slots=True, kw_only=True)
class CheckpointSchedule:
    """Decides at each boundary whether to save, from the times of the saves before.

    Times are seconds on any clock that does not go back.
    """

    started_s: float
    saved_index: int | None
    """What is on disk already: the checkpoint resumed from, later the last one saved."""
    min_interval_s: float = 10.0
    """From the end of one save to the next."""
    max_share: float = MAX_SHARE
    """Most of the run's time that saving may take."""
    failures: int = 0
    """Failed saves in a row."""
    _spent_s: float = 0.0
    _last_took_s: float = 0.0
    _last_end_s: float | None = None
    _not_before_s: float = float("-inf")

    def due(self, index: int, now_s: float, *, final: bool) -> bool:
        """Whether to save the boundary `index` now; at the final one, whatever is not on disk yet."""
        if index == self.saved_index:
            return False
        if final:
            return True
        if now_s < self._not_before_s:
            return False
        if self._last_end_s is None:
            return True
        share_s = self.max_share * (now_s - self.started_s)
        return now_s - self._last_end_s >= self.min_interval_s and self._spent_s + self._last_took_s <= share_s

    def saved(self, index: int, now_s: float, took_s: float) -> None:
        """Notes a save that has just ended."""
        self.saved_index = index
        self.failures = 0
        self._ended(now_s, took_s)

    def failed(self, now_s: float, took_s: float) -> None:
        """Notes a save that has just failed."""
        self.failures += 1
        self._ended(now_s, took_s)

    def withheld(self, now_s: float, took_s: float) -> None:
        """Notes a save that was not tried, because the event log did not allow it.

        It is neither a save nor a cost of one, so the next boundary is tried. Only a log that keeps the run waiting
        is not asked again before as much time has passed as it took, or it could hold up every short round.
        """
        self._not_before_s = now_s + took_s

    def _ended(self, now_s: float, took_s: float) -> None:
        self._spent_s += took_s
        self._last_took_s = took_s
        self._last_end_s = now_s


# ---- retention


def kept_indices(scores: Mapping[int, float | None], *, last: int, resumed_from: int | None) -> set[int]:
    """Which checkpoints stay: the newest, the best, every fiftieth, and the one the run was resumed from.

    Args:
        scores: Of all checkpoints there are, by index; None: not measured. Of equal ones the newest is the best.
        last: How many of the newest. More than one, so that damage to the newest costs a round and not the run.
        resumed_from: Where this attempt began.
    """
    measured = [(score, index) for index, score in scores.items() if score is not None]
    best = {max(measured)[1]} if measured else set()
    periodic = {index for index in scores if index % KEEP_EVERY == 0}
    return scores.keys() & ({*sorted(scores)[-last:], resumed_from} | best | periodic)


def remove_old_checkpoints(run: RunDir, *, last: int, resumed_from: int | None) -> tuple[Rejection, ...]:
    """Removes checkpoints that no rule keeps, and the rest of those that a killed process had begun to remove.

    To be called after a save, by the holder of the run's lock. Checkpoints of other runs neither go nor count.

    Returns:
        What should have gone and could not; the next call tries again.
    """
    folders = checkpoint_folders(run)
    scores: dict[int, float | None] = {}
    damaged, foreign = set(), set()
    for index, path in folders.items():
        try:
            facts = read_checkpoint_manifest(path).facts
            if facts.run_id == run.run_id:
                scores[index] = facts.score
            else:
                foreign.add(index)
        except (CheckpointError, OSError):
            if os.path.lexists(path / MANIFEST_FILE):
                damaged.add(index)
    oldest = min(sorted(scores)[-last:], default=0)
    kept = kept_indices(scores, last=last, resumed_from=resumed_from) | foreign
    kept |= {index for index in damaged if index >= oldest}  # newer than what would be used in its place
    stuck = []
    for path in (path for index, path in folders.items() if index not in kept):
        try:
            remove_checkpoint(path)
        except OSError as error:
            stuck.append(Rejection(name=path.name, reason=str(error)))
    return tuple(stuck)


# ---- writing


class CheckpointWriter:
    """Writes the checkpoints of one run. The caller holds the run's lock.

    The log gets an event for every save and is made durable before it. If the configuration needs it complete, nothing
    is saved once it has lost an event, so that a resume repeats what is lost.
    """

    def __init__(
        self,
        run: RunDir,
        log: Hub,
        *,
        attempt: int,
        resumed_from: int | None,
        config: TrainingConfig,
        bitwise: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._log = run, log
        self._attempt, self._resumed_from = attempt, resumed_from
        self._config, self._bitwise = config, bitwise
        self._clock = clock
        self._warned = self._withheld = False
        self._schedule = CheckpointSchedule(
            started_s=clock(),
            saved_index=resumed_from,
            min_interval_s=config.checkpoint_s,
            max_share=MAX_SHARE if config.checkpoint_s > 0.0 else 1.0,
        )

    @property
    def saved_index(self) -> int | None:
        """Rounds of the newest checkpoint; None if there is none."""
        return self._schedule.saved_index

    def offer(
        self,
        index: int,
        files: Callable[[], Mapping[str, bytes]],
        *,
        score: float | None,
        last: bool,
        bitwise: bool = True,
    ) -> SavedCheckpoint | None:
        """Saves the boundary after `index` rounds if it is due, or if the run ends here (`last`) and it is not saved.

        Once `bitwise` was False, all later checkpoints of the run say so.

        Raises:
            StorageError: Saving has failed five times in a row, or at the end of the run.
            NumericFailure: The run's numbers are not finite. Nothing was saved; what was before is as it was.
        """
        started = self._clock()
        self._bitwise &= bitwise
        if not self._schedule.due(index, started, final=last):
            return None
        if (why := self._log_trouble()) is not None:
            self._schedule.withheld(self._clock(), self._clock() - started)
            # Not among the failed saves that end a run: the log has rules of its own for how long training goes on.
            self._not_saved(index, why, quiet=self._withheld and not last)
            self._withheld = True
            return None
        self._withheld = False
        try:
            saved = self._save(index, files, score)
        except NumericFailure as error:
            self._not_saved(index, str(error))
            raise
        except StorageError as error:
            self._schedule.failed(self._clock(), self._clock() - started)
            self._not_saved(index, str(error))
            if last or self._schedule.failures >= MAX_FAILED_SAVES:
                raise
            return None
        self._schedule.saved(index, self._clock(), self._clock() - started)
        self._emit("saved", saved.path.name, index, saved=saved)
        self._make_room(saved)
        return saved

    def _save(self, index: int, files: Callable[[], Mapping[str, bytes]], score: float | None) -> SavedCheckpoint:
        facts = CheckpointFacts(
            index=index,
            run_id=self._run.run_id,
            attempt=self._attempt,
            next_seq=self._log.next_seq,
            score=score,
            identity=identity(),
            bitwise=self._bitwise,
        )
        content = files()
        if score is not None and not math.isfinite(score):
            raise NumericFailure(f"the score of round {index} is {score}")
        return save_checkpoint(self._run, facts, content, read=partial(read_own, self._run.run_id))

    def _make_room(self, saved: SavedCheckpoint) -> None:
        """Removes what is no longer needed, and warns once if there is little space left."""
        last_kept = self._config.keep_checkpoints
        for stuck in remove_old_checkpoints(self._run, last=last_kept, resumed_from=self._resumed_from):
            complain(f"old checkpoint {stuck.name} cannot be removed: {stuck.reason}")
        if not self._warned and (warning := space_warning(self._run, saved.size_bytes)) is not None:
            self._warned = True
            complain(warning)

    def _log_trouble(self) -> str | None:
        """Why the log does not allow a save; None if it does.

        A checkpoint that counts events which are not on disk would lose them on resume.
        """
        if not self._log.flush(FLUSH_TIMEOUT_S, fsync=True):
            return "the event log cannot be made durable"
        if self._config.require_complete and self._log.health().num_dropped:
            return "the event log has lost events, and this run needs them all"
        return None

    def _not_saved(self, index: int, why: str, *, quiet: bool = False) -> None:
        if not quiet:
            rest = "There is no earlier one" if self.saved_index is None else "The earlier ones are intact"
            complain(f"checkpoint of round {index} not saved: {why}. {rest}")
        self._emit("save_failed", f"round {index}", index, error=why)

    def loaded(self, checkpoint: LoadedCheckpoint, rejected: tuple[Rejection, ...]) -> None:
        """Logs where the run goes on from, and what could not be used."""
        for one in rejected:
            self._emit("rejected", one.name, None, error=one.reason)
        self._emit("loaded", checkpoint.path.name, checkpoint.facts.index)

    def _emit(
        self,
        action: Literal["saved", "loaded", "rejected", "save_failed"],
        name: str,
        index: int | None,
        *,
        saved: SavedCheckpoint | None = None,
        error: str | None = None,
    ) -> None:
        payload = CheckpointRecorded(
            action=action,
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
