"""Two configurations on the same hosts: paired episode by episode, trained in turns on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from esper.leyline import BatchSummary, EpisodeCompleted, ExitCode
from esper.nissa import Backend
from esper.simic.run.session import RunStart, SessionEnd, end_unopened
from esper.simic.run.stop_signals import StopSignals
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_session
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer
from esper.tolaria.messages import StepCancelled

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


NOTHING_YET = Comparison(histories=((), ()), pairs=())


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


def compare(
    a: VectorizedPPOTrainer, b: VectorizedPPOTrainer, after_round: Callable[[Comparison], None] = lambda so_far: None
) -> Comparison:
    """Trains both in turns, round by round, until the last round or a stop, and pairs their episodes.

    Args:
        a: One side, at the same boundary as the other.
        b: The other side.
        after_round: Told what is known after each round of both.

    Raises:
        ValueError: They cannot be compared.
    """
    check_comparable(a.config, b.config)
    pairs: list[Pair] = []
    found = NOTHING_YET
    while a.next_round < a.config.rounds:
        for side in (a, b):
            side.run_round()
        pairs += _pairs(a.next_round - 1, a.client.episode_stats(), b.client.episode_stats())
        found = Comparison(histories=(tuple(a.history), tuple(b.history)), pairs=tuple(pairs))
        after_round(found)
        ends = a.next_round == a.config.rounds or a.stop.after_round or b.stop.after_round
        for side in (a, b):
            side.offer_checkpoint(last=ends)
        if ends:
            break
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFinish:
    """How two sessions ended."""

    found: Comparison
    sides: tuple[SessionEnd, SessionEnd]

    @property
    def exit_code(self) -> ExitCode:
        """What is wrong with either side; a log that lacks something comes first."""
        codes = {side.exit_code for side in self.sides}
        first = (ExitCode.LOG_INCOMPLETE, ExitCode.STORAGE)
        return next((code for code in first if code in codes), max(codes))


def run_comparison(
    starts: tuple[RunStart, RunStart],
    stop: StopSignals,
    listeners: tuple[Backend, Backend],
    *,
    data_dir: Path | None = None,
) -> ComparisonFinish:
    """Trains both runs in turns until the last round, a stop or an error, and leaves both so that they can be resumed.

    Raises:
        RunBusy: Another process works on one of them.
        Exception: Whatever went wrong, after both logs have their last events.
    """
    so_far = [NOTHING_YET]
    try:
        with (
            open_session(starts[0], stop, (listeners[0],), data_dir=data_dir) as a,
            open_session(starts[1], stop, (listeners[1],), data_dir=data_dir) as b,
        ):
            try:
                compare(a.trainer, b.trainer, so_far.append)
            except StepCancelled:  # one side may be a round ahead: both save the boundary they have
                a.save_boundary()
                b.save_boundary()
    except StepCancelled:  # before the first round, while the scale was measured
        unopened = end_unopened(starts[0], stop.exit_code), end_unopened(starts[1], stop.exit_code)
        return ComparisonFinish(found=NOTHING_YET, sides=unopened)
    return ComparisonFinish(found=so_far[-1], sides=(a.end(stop.exit_code), b.end(stop.exit_code)))


def _pairs(round_idx: int, a: Sequence[EpisodeCompleted], b: Sequence[EpisodeCompleted]) -> list[Pair]:
    rows = []
    for env_id, (left, right) in enumerate(zip(a, b, strict=True)):
        if left.committed_accuracy_pct is None or right.committed_accuracy_pct is None:
            continue  # a lost worker: the pair is dropped on both sides
        rows.append(
            Pair(
                round_idx=round_idx,
                env_id=env_id,
                accuracy_pct_a=left.committed_accuracy_pct,
                accuracy_pct_b=right.committed_accuracy_pct,
                params_ratio_a=left.params_ratio,
                params_ratio_b=right.params_ratio,
            )
        )
    return rows
