"""The round loop: hosts learn for an episode, then the policy learns from what happened. No envs, no tensors.

A run is at a round boundary whenever no episode is being played; that is what a checkpoint describes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from esper.leyline import (
    ActionExecutionResult,
    ActionSpec,
    BatchSummary,
    EventSink,
    HostLayout,
    PolicyProtocol,
    TelemetryEventType,
)
from esper.runtime.datasets import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.client import StepFacts
from esper.simic.rewards import Calibration
from esper.simic.training.accounts import EpisodeStats, total_ops
from esper.simic.training.action_execution import EnvPool
from esper.simic.training.config import TrainingConfig
from esper.simic.training.rollout import episode_seeds, run_episodes
from esper.simic.training.runner import run_ppo_updates
from esper.tolaria.governor import RollbackBudget

ROLLING_ROUNDS = 10


class Client(PolicyProtocol, Protocol):
    """The controller of a run, learned or fixed."""

    def update(self) -> PPOUpdateMetrics | None:
        """Learns from the round; None if there is nothing to learn."""

    def episode_stats(self) -> tuple[EpisodeStats, ...]:
        """The round's episodes."""


class Recorder(Protocol):
    """Who keeps the log and the checkpoints of a run. Nothing it does may change what is learned."""

    wanted: frozenset[TelemetryEventType]
    """Events that workers are to report."""
    sink: EventSink | None
    """Where workers' troubles are told."""

    def opened(
        self, trainer: VectorizedPPOTrainer, task: TaskSpec, data: Dataset, layout: HostLayout, workers: tuple[str, int]
    ) -> None:
        """Everything is in place, on workers of this kind and number; the next round has not begun."""

    def round_begins(self, round_idx: int) -> None:
        """The next round's episodes start."""

    def step(self, facts: StepFacts) -> None:
        """All envs finished a step."""

    def round_ends(
        self, summary: BatchSummary, metrics: PPOUpdateMetrics | None, episodes: Sequence[EpisodeStats]
    ) -> None:
        """The round is complete and counted."""

    def checkpoint(self, trainer: VectorizedPPOTrainer, *, last: bool) -> None:
        """Saves the run if it is time to, or if this was the last round."""


class Silent:
    """Keeps nothing."""

    wanted: frozenset[TelemetryEventType] = frozenset()
    sink: EventSink | None = None

    def opened(
        self, trainer: VectorizedPPOTrainer, task: TaskSpec, data: Dataset, layout: HostLayout, workers: tuple[str, int]
    ) -> None:
        """Nothing to keep."""

    def round_begins(self, round_idx: int) -> None:
        """Nothing to keep."""

    def step(self, facts: StepFacts) -> None:
        """Nothing to keep."""

    def round_ends(
        self, summary: BatchSummary, metrics: PPOUpdateMetrics | None, episodes: Sequence[EpisodeStats]
    ) -> None:
        """Nothing to keep."""

    def checkpoint(self, trainer: VectorizedPPOTrainer, *, last: bool) -> None:
        """Nothing to keep."""


class StopRequest(Protocol):
    """Tells whether somebody wants the run to end."""

    after_round: bool
    """True as soon as the run is to end at the next boundary."""
    round_s: float | None
    """Told how long a round takes, for whoever is asked to wait for one."""

    def watch(self, cancel: Callable[[], None]) -> None:
        """Takes what makes a running step stop at once."""


class NeverStop:
    """Nobody stops this run."""

    after_round = False
    round_s: float | None = None

    def watch(self, cancel: Callable[[], None]) -> None:
        """Nothing will be cancelled."""


class VectorizedPPOTrainer:
    """One run, from its next round to its last.

    Args:
        config: What was asked for.
        horizon: Steps of an episode.
        pool: The hosts.
        client: The controller.
        recorder: Log and checkpoints.
        stop: Whether to stop early.
        calibration: The scale of scores, for checkpoints; None where none was measured.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        horizon: int,
        pool: EnvPool,
        client: Client,
        recorder: Recorder,
        stop: StopRequest,
        calibration: Calibration | None,
    ) -> None:
        self.config = config
        self.horizon = horizon
        self.pool = pool
        self.client = client
        self.recorder = recorder
        self.stop = stop
        self.calibration = calibration
        self.history: list[BatchSummary] = []
        self.next_round = 0
        self.num_env_steps = 0
        self.num_skipped = 0
        self.rollbacks = RollbackBudget.for_training(config.rounds * config.envs)

    def run(self) -> list[BatchSummary]:
        """Plays and learns until the last round is done or a stop is asked for.

        Raises:
            RollbackLimitReached: Hosts keep diverging.
            UpdatesFailed: Three updates in a row could not be performed.
        """
        while self.next_round < self.config.rounds:
            self.run_round()
            ends = self.stop.after_round or self.next_round == self.config.rounds
            self.recorder.checkpoint(self, last=ends)
            if ends:
                break
        return self.history

    def run_round(self) -> BatchSummary:
        """One episode in every env, one update, one summary."""
        round_idx, started = self.next_round, time.perf_counter()
        seeds = episode_seeds(self.config.seed, round_idx, self.config.envs)
        self.recorder.round_begins(round_idx)
        timed = _Timed(self.client)
        final = run_episodes(self.pool, timed, seeds, self.horizon)  # hosts learn
        played = time.perf_counter()
        metrics, self.num_skipped = run_ppo_updates(self.client, self.num_skipped)  # the policy learns
        updated = time.perf_counter()
        episodes = self.client.episode_stats()
        self.num_env_steps += sum(episode.num_epochs for episode in episodes)
        execute_s = played - started - timed.act_s - timed.store_s
        phases = {"act": timed.act_s, "execute": execute_s, "reward": timed.store_s, "update": updated - played}
        summary = self._summarize(final, episodes, metrics, phases)
        self.history.append(summary)
        self.next_round = round_idx + 1
        self.stop.round_s = summary.duration_s
        self.recorder.round_ends(summary, metrics, episodes)
        self.rollbacks.note_round(summary.num_rollbacks, len(episodes))
        return summary

    def _summarize(
        self,
        final: ActionExecutionResult,
        episodes: Sequence[EpisodeStats],
        metrics: PPOUpdateMetrics | None,
        phases_s: dict[str, float],
    ) -> BatchSummary:
        accuracies = [report.val_accuracy_pct for report in final.reports]
        committed = [report.committed_accuracy_pct for report in final.reports]
        measured = [accuracy for accuracy in committed if accuracy is not None]
        returns = [episode.return_raw for episode in episodes]
        mean = statistics.fmean(accuracies)
        recent = [summary.accuracy_mean_pct for summary in self.history[-(ROLLING_ROUNDS - 1) :]]
        return BatchSummary(
            round_idx=self.next_round,
            num_episodes_total=(self.next_round + 1) * self.config.envs,
            num_env_steps_total=self.num_env_steps,
            accuracy_mean_pct=mean,
            accuracy_best_pct=max(accuracies),
            accuracy_worst_pct=min(accuracies),
            rolling_accuracy_pct=statistics.fmean([*recent, mean]),
            committed_accuracy_pct=statistics.fmean(measured) if measured else None,
            params_ratio_mean=statistics.fmean(episode.params_ratio for episode in episodes),
            return_mean=statistics.fmean(returns),
            return_std=statistics.pstdev(returns),
            num_rollbacks=sum(episode.end == "rolled_back" for episode in episodes),
            num_ops=total_ops(episodes),
            update_performed=metrics is not None and metrics["performed"],
            ppo={} if metrics is None else scalar_metrics(metrics),
            phases_ms={name: 1e3 * seconds for name, seconds in phases_s.items()},
            duration_s=sum(phases_s.values()),
        )

    def counters(self) -> dict[str, Any]:
        """What counts on after a resume, as JSON values."""
        return {
            "next_round": self.next_round,
            "num_env_steps": self.num_env_steps,
            "num_skipped": self.num_skipped,
            "rollbacks": self.rollbacks.state_dict(),
        }

    def restore(self, counters: dict[str, Any], history: Sequence[BatchSummary]) -> None:
        """Goes on from a boundary."""
        self.next_round = counters["next_round"]
        self.num_env_steps = counters["num_env_steps"]
        self.num_skipped = counters["num_skipped"]
        self.rollbacks.load_state_dict(counters["rollbacks"])
        self.history = list(history)


class _Timed:
    """A controller on a watch: how long it thinks, and how long it takes notes."""

    def __init__(self, policy: PolicyProtocol) -> None:
        self.act_s = 0.0
        self.store_s = 0.0
        self._policy = policy

    def begin(self, state: ActionExecutionResult) -> None:
        self._policy.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        started = time.perf_counter()
        specs = self._policy.act(state)
        self.act_s += time.perf_counter() - started
        return specs

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        started = time.perf_counter()
        self._policy.store(before, after)
        self.store_s += time.perf_counter() - started


def scalar_metrics(metrics: PPOUpdateMetrics) -> dict[str, float]:
    """The measured numbers of an update, by name; head entropies as `entropy_<head>`."""
    flat = {name: value for name, value in metrics.items() if isinstance(value, float)}
    entropies = {f"entropy_{head}": value for head, value in metrics["head_entropies"].items() if value is not None}
    norm = metrics["gradient_stats"]["norm_mean"]
    return {**flat, **entropies, **({} if norm is None else {"grad_norm": norm})}  # type: ignore[dict-item]
