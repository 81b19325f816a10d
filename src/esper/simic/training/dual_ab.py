"""Two configurations on the same hosts: paired episode by episode, trained in turns on the same machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from esper.leyline import BatchSummary, EpisodeCompleted, ExitCode
from esper.nissa import Backend
from esper.simic.run.session import RunStart, SessionEnd, end_unopened
from esper.simic.run.stop_signals import StopSignals
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_session
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer
from esper.tolaria.worker import StepCancelled

PAIRED: tuple[str, ...] = (
    "task",
    "seed",
    "rounds",
    "envs",
    "episode_length",
    "param_budget",
    "backend",
    "device",
    "amp",
    "calibration_runs",
)
"""What both must share: with these equal, episode e of env n is the same host on the same batches on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRounds:
    """What two configurations did on the same hosts, after as many rounds of both."""

    histories: tuple[tuple[BatchSummary, ...], tuple[BatchSummary, ...]] = ((), ())
    pairs: tuple[tuple[tuple[EpisodeCompleted, EpisodeCompleted], ...], ...] = ()
    """Per round: the episodes of each env on both sides."""

    def differences_pp(self, last_rounds: int) -> tuple[float, ...]:
        """B minus A in committed accuracy, per episode of the last rounds; a lost worker drops a pair."""
        return tuple(
            b.committed_accuracy_pct - a.committed_accuracy_pct
            for round_pairs in self.pairs[-last_rounds:]
            for a, b in round_pairs
            if a.committed_accuracy_pct is not None and b.committed_accuracy_pct is not None
        )


def check_pairable(a: TrainingConfig, b: TrainingConfig) -> None:
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


def paired_rounds(a: VectorizedPPOTrainer, b: VectorizedPPOTrainer) -> Iterator[PairedRounds]:
    """Trains two runs in turns until the last round or a stop, and yields what is known after each round of both.

    Raises:
        ValueError: They cannot be compared.
    """
    check_pairable(a.config, b.config)
    pairs: list[tuple[tuple[EpisodeCompleted, EpisodeCompleted], ...]] = []
    ends = a.next_round >= a.config.rounds
    while not ends:
        for side in (a, b):
            side.run_round()
        pairs.append(tuple(zip(a.client.episode_stats(), b.client.episode_stats(), strict=True)))
        yield PairedRounds(histories=(tuple(a.history), tuple(b.history)), pairs=tuple(pairs))
        ends = a.ends or b.ends
        for side in (a, b):
            side.offer_checkpoint(last=ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonEnd:
    """How two sessions ended."""

    found: PairedRounds
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
) -> ComparisonEnd:
    """Trains both runs in turns until the last round, a stop or an error, and leaves both so that they can be resumed.

    Raises:
        RunBusy: Another process works on one of them.
        Exception: Whatever went wrong, after both logs have their last events.
    """
    found = PairedRounds()
    try:
        with (
            open_session(starts[0], stop, (listeners[0],), data_dir=data_dir) as a,
            open_session(starts[1], stop, (listeners[1],), data_dir=data_dir) as b,
        ):
            try:
                for so_far in paired_rounds(a.trainer, b.trainer):
                    found = so_far
            except StepCancelled:  # one side may be a round ahead: both save the boundary they have
                a.save_boundary()
                b.save_boundary()
    except StepCancelled:  # before the first round, while the scale was measured
        unopened = end_unopened(starts[0], stop.exit_code), end_unopened(starts[1], stop.exit_code)
        return ComparisonEnd(found=found, sides=unopened)
    return ComparisonEnd(found=found, sides=(a.end(stop.exit_code), b.end(stop.exit_code)))
