"""The round loop: hosts learn for an episode, then the policy learns from what happened. No envs, no tensors.

A run is at a round boundary whenever no episode is being played; that is what a checkpoint describes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esper.leyline import (
    ActionExecutionResult,
    ActionSpec,
    BatchSummary,
    EpisodeCompleted,
    EpisodeSeed,
    PhaseTime,
    derive_seed,
)
from esper.leyline.run_payloads import PHASES
from esper.runtime.data.splits import Dataset
from esper.runtime.nursery import VALIDATION
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.client import Client
from esper.simic.rewards import Calibration
from esper.simic.run.stop_signals import StopSignals
from esper.simic.training.config import NURSERY, TrainingConfig
from esper.simic.training.episode_rewards import total_ops
from esper.simic.training.rollout import StepObserver, episode_seeds, grouped_seeds, run_episodes
from esper.simic.training.runner import check_updates, run_ppo_updates
from esper.tolaria.governor import RollbackBudget
from esper.tolaria.pool import EnginePool

if TYPE_CHECKING:
    from esper.simic.training.vectorized import AgentReads

ROLLING_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of."""

    config: TrainingConfig
    task: TaskSpec
    data: Dataset
    pool: EnginePool
    client: Client
    reads: AgentReads
    calibration: Calibration | None
    """For checkpoints; None where none was measured."""


class Recorder(StepObserver):
    """Writes the log and the checkpoints of a run; this one writes nothing. It may not change what is learned."""

    log_trouble: str | None = None
    """Why the log ended the run; None if it did not."""

    def must_stop(self) -> bool:
        """True if the run has to end at this boundary, because its log is not good enough."""
        return False

    def round_begins(self, round_idx: int) -> None:
        """The next round's episodes start."""

    def round_ends(
        self,
        round_idx: int,
        summary: BatchSummary,
        metrics: PPOUpdateMetrics | None,
        episodes: Sequence[EpisodeCompleted],
        phases: Mapping[str, PhaseTime],
    ) -> None:
        """The round is complete and counted."""

    def checkpoint(self, trainer: VectorizedPPOTrainer, *, last: bool) -> None:
        """Saves the run if it is time to, or if this was the last round."""


class VectorizedPPOTrainer:
    """One run, from its next round to its last."""

    def __init__(self, parts: RunParts, recorder: Recorder, stop: StopSignals) -> None:
        self.config, self.horizon, self.calibration = parts.config, parts.task.horizon, parts.calibration
        self.pool, self.client = parts.pool, parts.client
        self.recorder = recorder
        self.stop = stop
        self.history: list[BatchSummary] = []
        self.next_round = 0
        self.num_env_steps = 0
        self.num_skipped = 0
        self._clock = _PhaseClock()
        self.rollbacks = RollbackBudget(self.config.rounds * self.config.envs)

    def run(self) -> list[BatchSummary]:
        """Plays and learns until the last round is done or a stop is asked for.

        Raises:
            RollbackLimitReached: Hosts keep diverging.
            UpdatesFailed: Too many updates in a row could not be performed.
        """
        while self.next_round < self.config.rounds:
            self.run_round()
            ends = self.ends
            self.offer_checkpoint(last=ends)
            if ends:
                break
        return self.history

    @property
    def ends(self) -> bool:
        """True where the run ends at this boundary: all rounds are done, somebody asked for it, or its log has to."""
        return self.next_round >= self.config.rounds or self.stop.after_round or self.recorder.must_stop()

    def offer_checkpoint(self, *, last: bool) -> None:
        """Saves the boundary if it is due, or if the run ends here. Its time counts as that of the next round."""
        self._clock.restart()
        self.recorder.checkpoint(self, last=last)
        self._clock.note("other")

    def run_round(self) -> BatchSummary:
        """One episode in every env, one update, one summary.

        Raises:
            RollbackLimitReached: Hosts keep diverging.
            UpdatesFailed: Too many updates in a row could not be performed.
        """
        round_idx, clock = self.next_round, self._clock
        clock.restart()
        seeds, horizon = round_seeds(self.config, round_idx), self.horizon
        if self.config.task == NURSERY:
            horizon = max(get_task_spec(seed.task).horizon for seed in seeds if seed.task is not None)
        self.recorder.round_begins(round_idx)
        final = run_episodes(self.pool, self.client, seeds, horizon, (self.recorder, clock))  # hosts learn
        num_updates = self.config.ppo_updates_per_batch
        metrics, self.num_skipped = run_ppo_updates(self.client, self.num_skipped, num_updates)  # the policy learns
        clock.note("update")
        episodes = self.client.episode_stats()
        self.num_env_steps += sum(episode.num_epochs for episode in episodes)
        phases = clock.take()
        duration_s = sum(phase.wall_ms for phase in phases.values()) / 1e3
        summary = self._summarize(final, episodes, metrics, duration_s)
        self.history.append(summary)
        self.next_round = round_idx + 1
        self.stop.round_s = duration_s
        self.recorder.round_ends(round_idx, summary, metrics, episodes, phases)
        clock.note("other")
        # After the round's events, so that the log says why the run ends here.
        self.rollbacks.note_round(summary.num_rollbacks, len(episodes))
        check_updates(metrics, self.num_skipped)
        return summary

    def _summarize(
        self,
        final: ActionExecutionResult,
        episodes: Sequence[EpisodeCompleted],
        metrics: PPOUpdateMetrics | None,
        duration_s: float,
    ) -> BatchSummary:
        accuracies = [report.val_accuracy_pct for report in final.reports]
        committed = [report.committed_accuracy_pct for report in final.reports]
        measured = [accuracy for accuracy in committed if accuracy is not None]
        returns = [episode.return_raw for episode in episodes]
        mean = statistics.fmean(accuracies)
        recent = [summary.accuracy_mean_pct for summary in self.history[-(ROLLING_ROUNDS - 1) :]]
        return BatchSummary(
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
            duration_s=duration_s,
        )

    def counters(self) -> dict[str, Any]:
        """What counts on after a resume, as JSON values."""
        return {
            "next_round": self.next_round,
            "num_env_steps": self.num_env_steps,
            "num_skipped": self.num_skipped,
            "rollbacks": self.rollbacks.state_dict(),
        }

    def restore(self, counters: Mapping[str, Any], history: Sequence[BatchSummary]) -> None:
        """Goes on from a boundary."""
        self.next_round = counters["next_round"]
        self.num_env_steps = counters["num_env_steps"]
        self.num_skipped = counters["num_skipped"]
        self.rollbacks.load_state_dict(counters["rollbacks"])
        self.history = list(history)


def round_seeds(config: TrainingConfig, round_idx: int) -> tuple[EpisodeSeed, ...]:
    """The episodes of a round; over the nursery, a new draw for every group."""
    if config.task == NURSERY:
        draws = (derive_seed(config.seed, group, round_idx, None, NURSERY) for group in range(config.groups))
        tasks: list[str | None] = [f"{NURSERY}:{draw % VALIDATION}" for draw in draws]
        return grouped_seeds(config.seed, round_idx, config.envs, tasks)
    if config.relative_to != "nothing":
        return grouped_seeds(config.seed, round_idx, config.envs, [None] * config.groups)
    return episode_seeds(config.seed, round_idx, config.envs)


class _PhaseClock(StepObserver):
    """Counts all time under the phase that has just ended: nothing is counted twice or not at all."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        self.restart()

    def restart(self) -> None:
        """Leaves out the time since the last call: another run may have had its turn."""
        self._last = time.perf_counter(), time.process_time()

    def note(self, phase: str) -> None:
        """Counts the time since the last call under this phase."""
        now = time.perf_counter(), time.process_time()
        self._wall_s[phase] += now[0] - self._last[0]
        self._cpu_s[phase] += now[1] - self._last[1]
        self._last = now

    def take(self) -> dict[str, PhaseTime]:
        """Time by phase; all start anew."""
        taken = {
            name: PhaseTime(wall_ms=1e3 * wall_s, cpu_ms=1e3 * self._cpu_s[name])
            for name, wall_s in self._wall_s.items()
        }
        self._wall_s, self._cpu_s = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        return taken

    def reset(self, state: ActionExecutionResult) -> None:
        self.note("execute")

    def acted(self, state: ActionExecutionResult, specs: Sequence[ActionSpec]) -> None:
        self.note("act")

    def executed(self, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        self.note("execute")

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        self.note("reward")
