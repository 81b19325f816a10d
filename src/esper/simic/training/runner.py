"""Between the loop and the agent: PPO updates per rollout, schedule lengths, when failed updates end a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.leyline import THRESHOLDS, NumericFailure, Severity
from esper.simic.telemetry.aggregation import aggregate_ppo_metrics

if TYPE_CHECKING:
    from esper.simic.agent.types import PPOUpdateMetrics
    from esper.simic.client import Client


class UpdatesFailed(NumericFailure):
    """Several updates in a row could not be performed: the policy no longer learns."""


def run_ppo_updates(learner: Client, num_skipped: int, num_updates: int = 1) -> tuple[PPOUpdateMetrics | None, int]:
    """Updates the policy on one rollout, and counts the rounds in a row without an update.

    Fewer than `num_updates` follow if one is skipped or stopped by the KL limit.

    Returns:
        The metrics of the updates as one, None for a controller that does not learn; and the new count.
    """
    updates: list[PPOUpdateMetrics] = []
    while len(updates) < num_updates and (metrics := learner.update()) is not None:
        updates.append(metrics)
        if metrics["kl_stopped"] or not metrics["performed"]:
            break
    learner.end_round()
    if not updates:
        return None, 0
    merged = aggregate_ppo_metrics(updates)
    return merged, 0 if merged["performed"] else num_skipped + 1


def check_updates(metrics: PPOUpdateMetrics | None, num_skipped: int) -> None:
    """Ends a run whose policy no longer learns, at the limit at which the alarm becomes critical.

    Raises:
        UpdatesFailed: Too many updates in a row were skipped, the last one included.
    """
    if metrics is not None and THRESHOLDS["skipped_updates"].severity_of(num_skipped) is Severity.CRITICAL:
        raise UpdatesFailed(
            f"{num_skipped} updates in a row were skipped, the last because {metrics['skip_reason']}. The last "
            "checkpoint is intact; look at the rewards and observations of the last rounds"
        )


def calculate_entropy_anneal_steps(
    total_episodes: int, batches_per_episode: int, epochs_per_batch: int, anneal_fraction: float
) -> int:
    """Env steps over which the schedules of a run come to their end.

    Args:
        total_episodes: Rounds of the run.
        batches_per_episode: Envs that play a round side by side.
        epochs_per_batch: Steps of an episode.
        anneal_fraction: Share of the run, in (0, 1].

    Raises:
        ValueError: A count is below 1 or the share is out of its range.
    """
    counts = {
        "total_episodes": total_episodes,
        "batches_per_episode": batches_per_episode,
        "epochs_per_batch": epochs_per_batch,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not 0.0 < anneal_fraction <= 1.0:
        raise ValueError(f"anneal_fraction must be in (0, 1], got {anneal_fraction}")
    return max(1, round(total_episodes * batches_per_episode * epochs_per_batch * anneal_fraction))
