"""Two configurations on the same hosts: paired episode by episode, trained in turns so that both see the same machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from esper.leyline import BatchSummary
from esper.simic.training.accounts import EpisodeStats
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_trainer
from esper.simic.training.vectorized_trainer import NeverStop, Recorder, Silent

PAIRED: tuple[str, ...] = (
    "task",
    "seed",
    "rounds",
    "envs",
    "episode_length",
    "param_budget",
    "device",
    "amp",
    "calibration_runs",
)
"""What both must share: with these equal, episode e of env n is the same host on the same batches on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One episode on both sides."""

    round_idx: int
    env_id: int
    accuracy_pct_a: float
    accuracy_pct_b: float
    params_ratio_a: float
    params_ratio_b: float

    @property
    def difference_pp(self) -> float:
        """B minus A."""
        return self.accuracy_pct_b - self.accuracy_pct_a


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two configurations did on the same hosts."""

    histories: tuple[tuple[BatchSummary, ...], tuple[BatchSummary, ...]]
    pairs: tuple[Pair, ...]

    def differences_pp(self, last_rounds: int) -> tuple[float, ...]:
        """B minus A in committed accuracy, per episode of the last rounds."""
        first = len(self.histories[0]) - last_rounds
        return tuple(pair.difference_pp for pair in self.pairs if pair.round_idx >= first)


def check_comparable(a: TrainingConfig, b: TrainingConfig) -> None:
    """Refuses two configurations whose episodes would not be pairs.

    Raises:
        ValueError: Names what differs, or says that nothing does.
    """
    differing = [name for name in PAIRED if getattr(a, name) != getattr(b, name)]
    if differing:
        shown = "; ".join(f"{name} {getattr(a, name)} and {getattr(b, name)}" for name in differing)
        raise ValueError(f"the two configurations cannot be compared, because they differ in {shown}. Make these equal")
    if a == b:
        raise ValueError("the two configurations are the same; there is nothing to compare")


def differing_fields(a: TrainingConfig, b: TrainingConfig) -> tuple[str, ...]:
    """The fields the comparison is about."""
    return tuple(entry.name for entry in fields(TrainingConfig) if getattr(a, entry.name) != getattr(b, entry.name))


class _Episodes(Silent):
    """Remembers the episodes of the last round, on the way to another recorder."""

    def __init__(self, inner: Recorder) -> None:
        self.inner = inner
        self.wanted, self.sink = inner.wanted, inner.sink
        self.opened, self.round_begins, self.step, self.checkpoint = (  # type: ignore[method-assign]
            inner.opened,
            inner.round_begins,
            inner.step,
            inner.checkpoint,
        )
        self.episodes: tuple[EpisodeStats, ...] = ()

    def round_ends(self, summary, metrics, episodes) -> None:  # type: ignore[no-untyped-def]
        self.episodes = tuple(episodes)
        self.inner.round_ends(summary, metrics, episodes)
