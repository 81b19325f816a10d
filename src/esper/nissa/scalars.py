"""The numbers that exporters show: one pure function from an event to names and values, and a collector per round.

Names follow Stable-Baselines3 (`rollout/`, `time/`, `train/`) and CleanRL (`charts/`, `losses/`), so that Esper's
curves lie beside theirs; the rest is under `host/`, `growth/`, `heads/`, `critic/`, `memory/`, `safety/` and `perf/`.
The x axis is the total number of env steps everywhere. What was not measured is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from esper.leyline import (
    BatchSummary,
    EpisodeCompleted,
    LoggedEvent,
    PPOUpdateCompleted,
    ProfileMeasured,
    TrendDetected,
    record,
)


def scalars(line: LoggedEvent) -> dict[str, float]:
    """The numbers of one event by name; empty for events without curves."""
    match line.data:
        case BatchSummary():
            found = _of_round(line.data) | {"time/time_elapsed": line.mono, "time/iterations": _count(line)}
        case EpisodeCompleted():
            found = _of_episode(line.data)
        case PPOUpdateCompleted():
            found = _of_update(line.data) | {"train/n_updates": _count(line)}
        case ProfileMeasured():
            found = _of_profile(line.data)
        case TrendDetected():
            found = {"host/rolling_change_pp": line.data.delta_pp}
        case _:
            return {}
    return {name: float(value) for name, value in found.items() if value is not None}


Found = dict[str, float | None]


def _count(line: LoggedEvent) -> int | None:
    """Rounds up to and with that of a line."""
    return None if line.round is None else line.round + 1


def _of_round(data: BatchSummary) -> Found:
    return {
        "time/total_timesteps": data.num_env_steps_total,
        "host/accuracy_mean_pct": data.accuracy_mean_pct,
        "host/accuracy_best_pct": data.accuracy_best_pct,
        "host/accuracy_worst_pct": data.accuracy_worst_pct,
        "host/rolling_accuracy_pct": data.rolling_accuracy_pct,
        "host/committed_accuracy_pct": data.committed_accuracy_pct,
        "growth/params_ratio_mean": data.params_ratio_mean,
        "growth/num_germinated": data.num_ops.get("GERMINATE"),
        "growth/num_fossilized": data.num_ops.get("FOSSILIZE"),
        "growth/num_pruned": data.num_ops.get("PRUNE"),
        "safety/num_rollbacks": data.num_rollbacks,
        "perf/round_s": data.duration_s,
    }


def _of_episode(data: EpisodeCompleted) -> Found:
    terms: Found = {f"rollout/reward_{term}": amount for term, amount in data.components_sum.items()}
    return terms | {
        "rollout/ep_rew_mean": data.return_raw,
        "rollout/ep_len_mean": data.num_epochs,
        "charts/episodic_return": data.return_raw,
        "charts/episodic_length": data.num_epochs,
        "growth/num_alive": data.num_alive,
        "growth/num_contributing_fossils": data.num_contributing_fossils,
    }


def _of_update(data: PPOUpdateCompleted) -> Found:
    entropies = [head.entropy_share for head in data.heads.values() if head.entropy_share is not None]
    found: Found = {
        "train/approx_kl": data.joint.approx_kl,
        "train/clip_fraction": data.joint.clip_share,
        "train/clip_range": data.clip_range,
        "train/entropy_loss": data.losses.entropy,
        "train/explained_variance": data.critic.explained_variance,
        "train/learning_rate": data.lr,
        "train/loss": data.losses.total,
        "train/policy_gradient_loss": data.losses.policy,
        "train/value_loss": data.losses.value,
        "train/grad_norm": data.grad.norm_mean,
        "charts/learning_rate": data.lr,
        "losses/value_loss": data.losses.value,
        "losses/policy_loss": data.losses.policy,
        "losses/entropy": fmean(entropies) if entropies else None,
        "losses/approx_kl": data.joint.approx_kl,
        "losses/clipfrac": data.joint.clip_share,
        "losses/explained_variance": data.critic.explained_variance,
        "critic/value_nrmse": data.critic.value_nrmse,
        "critic/return_corr": data.critic.return_corr,
        "rollout/decision_share": data.decision_share,
        "rollout/num_rewards_clipped": data.num_rewards_clipped,
        "safety/num_nonfinite": data.grad.num_nonfinite,
    }
    if data.lstm is not None:
        found |= {
            "memory/h_rms": data.lstm.h_rms,
            "memory/c_rms": data.lstm.c_rms,
            "memory/saturated_share": data.lstm.saturated_share,
        }
    for name, head in data.heads.items():
        found |= {
            f"heads/{name}/entropy_share": head.entropy_share,
            f"heads/{name}/kl": head.kl,
            f"heads/{name}/clip_share": head.clip_share,
            f"heads/{name}/grad_norm": head.grad_norm,
        }
    return found


def _of_profile(data: ProfileMeasured) -> Found:
    phases: Found = {f"perf/{phase}_ms": time.wall_ms for phase, time in data.phases.items()}
    return phases | {
        "time/fps": data.env_steps_per_s,
        "charts/SPS": data.env_steps_per_s,
        "perf/host_samples_per_s": data.host_samples_per_s,
        "perf/rss_bytes": data.rss_bytes,
        "perf/wait_share": data.wait_share,
        "perf/telemetry_cpu_ms": data.telemetry_cpu_ms,
    }


@record
class RoundScalars:
    """All numbers of one round, at its place on the x axis."""

    env_steps: int
    wall: float
    values: Mapping[str, float]


class RoundCollector:
    """Gathers the numbers of a round. Several events with the same name, such as one per episode, are averaged."""

    def __init__(self) -> None:
        self._round: int | None = None
        self._values: dict[str, list[float]] = {}
        self._place: tuple[int, float] | None = None

    def add(self, line: LoggedEvent) -> Iterator[RoundScalars]:
        """Takes an event, and yields the round before it if that is over."""
        if line.round is not None and line.round != self._round:
            yield from self.take()
            self._round, self._values, self._place = line.round, {}, None
        for name, value in scalars(line).items():
            self._values.setdefault(name, []).append(value)
        if isinstance(line.data, BatchSummary):
            self._place = line.data.num_env_steps_total, line.wall

    def take(self) -> Iterator[RoundScalars]:
        """What is not taken yet of the round at hand. Until it is completed it has no place on the axis."""
        if self._place is not None and self._values:
            values = {name: fmean(given) for name, given in self._values.items()}
            self._values = {}
            yield RoundScalars(env_steps=self._place[0], wall=self._place[1], values=values)
