"""Which checkpoints stay: the last few, the best, every so-manyth, and the one the run was resumed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from esper.leyline import CheckpointError, record
from esper.leyline.rundir import MANIFEST_FILE
from esper.simic.training.checkpoint import Rejection, checkpoint_folders, read_manifest, remove_checkpoint
from esper.simic.training.run_dir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many checkpoints to keep."""

    last: int = 3
    """The newest ones. More than one, so that damage to the newest costs a round and not the run."""
    best: int = 1
    """Those of the highest score; of equal ones, the newest."""
    every: int = 50
    """Those whose index is a multiple of this, for looking back."""

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("best", 0), ("every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"retention {name} must be at least {least}, got {getattr(self, name)}")

    def keeps(self, scores: Mapping[int, float | None], resumed_from: int | None) -> frozenset[int]:
        """The indices that stay.

        Args:
            scores: Of all checkpoints there are, by index; None: not measured.
            resumed_from: Where this attempt began.
        """
        by_score = sorted((score, index) for index, score in scores.items() if score is not None)
        best = {index for _, index in by_score[len(by_score) - min(self.best, len(by_score)) :]}
        periodic = {index for index in scores if index % self.every == 0}
        return frozenset(scores) & ({*sorted(scores)[-self.last :], resumed_from} | best | periodic)


@record
class Retained:
    """What a clearing changed."""

    removed: tuple[str, ...]
    stuck: tuple[Rejection, ...]
    """What should have gone and could not; the next clearing tries again."""


def retain(run: RunDir, rules: Retention, *, resumed_from: int | None) -> Retained:
    """Removes checkpoints that no rule keeps, and the rest of those that a killed process had begun to remove.

    To be called after a save, by the holder of the run's lock.
    """
    folders = checkpoint_folders(run)
    scores = {index: _score(path) for index, path in folders.items() if (path / MANIFEST_FILE).exists()}
    kept = rules.keeps(scores, resumed_from)
    removed, stuck = [], []
    for path in (path for index, path in folders.items() if index not in kept):
        try:
            remove_checkpoint(path)
            removed.append(path.name)
        except OSError as error:
            stuck.append(Rejection(name=path.name, reason=str(error)))
    return Retained(removed=tuple(removed), stuck=tuple(stuck))


def _score(path: Path) -> float | None:
    try:
        return read_manifest(path).facts.score
    except (CheckpointError, OSError):
        return None  # A damaged checkpoint is not the best one.
