"""The numbers that exporters show: a table from fields of events to their names, and a collector per round.

Names follow Stable-Baselines3 (`rollout/`, `time/`, `train/`) and CleanRL (`charts/`, `losses/`), so that Esper's
curves lie beside theirs; the rest is under `host/`, `growth/`, `heads/`, `critic/`, `memory/`, `safety/` and `perf/`.
The x axis is the total number of env steps everywhere. What was not measured is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from esper.leyline import (
    BatchSummary,
    EpisodeCompleted,
    LoggedEvent,
    PPOUpdateCompleted,
    ProfileMeasured,
    TrendDetected,
    record,
)

NAMES: dict[type, dict[str, tuple[str, ...]]] = {
    BatchSummary: {
        "num_env_steps_total": ("time/total_timesteps",),
        "accuracy_mean_pct": ("host/accuracy_mean_pct",),
        "accuracy_best_pct": ("host/accuracy_best_pct",),
        "accuracy_worst_pct": ("host/accuracy_worst_pct",),
        "rolling_accuracy_pct": ("host/rolling_accuracy_pct",),
        "committed_accuracy_pct": ("host/committed_accuracy_pct",),
        "params_ratio_mean": ("growth/params_ratio_mean",),
        "num_ops.GERMINATE": ("growth/num_germinated",),
        "num_ops.FOSSILIZE": ("growth/num_fossilized",),
        "num_ops.PRUNE": ("growth/num_pruned",),
        "num_rollbacks": ("safety/num_rollbacks",),
        "duration_s": ("perf/round_s",),
    },
    EpisodeCompleted: {
        "components_sum.*": ("rollout/reward_{key}",),
        "return_raw": ("rollout/ep_rew_mean", "charts/episodic_return"),
        "num_epochs": ("rollout/ep_len_mean", "charts/episodic_length"),
        "num_alive": ("growth/num_alive",),
        "num_contributing_fossils": ("growth/num_contributing_fossils",),
    },
    PPOUpdateCompleted: {
        "metrics.approx_kl": ("train/approx_kl", "losses/approx_kl"),
        "metrics.clip_fraction": ("train/clip_fraction", "losses/clipfrac"),
        "metrics.clip_ratio": ("train/clip_range",),
        "metrics.entropy_loss": ("train/entropy_loss",),
        "metrics.explained_variance": ("train/explained_variance", "losses/explained_variance"),
        "metrics.learning_rate": ("train/learning_rate", "charts/learning_rate"),
        "metrics.total_loss": ("train/loss",),
        "metrics.policy_loss": ("train/policy_gradient_loss", "losses/policy_loss"),
        "metrics.value_loss": ("train/value_loss", "losses/value_loss"),
        "metrics.value_nrmse": ("critic/value_nrmse",),
        "metrics.return_corr": ("critic/return_corr",),
        "metrics.decision_share": ("rollout/decision_share",),
        "metrics.num_rewards_clipped": ("rollout/num_rewards_clipped",),
        "metrics.gradient_stats.grad_norm": ("train/grad_norm",),
        "metrics.gradient_stats.num_nonfinite": ("safety/num_nonfinite",),
        "metrics.lstm.h_rms": ("memory/h_rms",),
        "metrics.lstm.c_rms": ("memory/c_rms",),
        "metrics.lstm.saturated_share": ("memory/saturated_share",),
        "metrics.head_entropies.*": ("heads/{key}/entropy_share",),
        "metrics.heads.*.kl": ("heads/{key}/kl",),
        "metrics.heads.*.clip_fraction": ("heads/{key}/clip_fraction",),
        "metrics.heads.*.grad_norm": ("heads/{key}/grad_norm",),
    },
    ProfileMeasured: {
        "phases.*.wall_ms": ("perf/{key}_ms",),
        "env_steps_per_s": ("time/fps", "charts/SPS"),
        "host_samples_per_s": ("perf/host_samples_per_s",),
        "rss_bytes": ("perf/rss_bytes",),
        "wait_share": ("perf/wait_share",),
        "telemetry_cpu_ms": ("perf/telemetry_cpu_ms",),
    },
    TrendDetected: {"delta_pp": ("host/rolling_change_pp",)},
}
"""Payload -> path of a field -> its names in exporters. `*` takes every key of a mapping, `{key}` in the names."""


def scalars(line: LoggedEvent) -> dict[str, float]:
    """The numbers of one event by name; empty for events without curves."""
    found: dict[str, float | None] = {
        name.format(key=key): value
        for path, names in NAMES.get(type(line.data), {}).items()
        for key, value in _values(line.data, path.split("."))
        for name in names
    }
    num_rounds = None if line.round is None else line.round + 1
    if isinstance(line.data, BatchSummary):
        found |= {"time/time_elapsed": line.mono, "time/iterations": num_rounds}
    if isinstance(line.data, PPOUpdateCompleted):
        entropies = [value for _, value in _values(line.data, ["metrics", "head_entropies", "*"]) if value is not None]
        found |= {"train/n_updates": num_rounds, "losses/entropy": fmean(entropies) if entropies else None}
    return {name: float(value) for name, value in found.items() if value is not None}


def _values(part: Any, path: Sequence[str], key: str = "") -> Iterator[tuple[str, float | None]]:
    """The numbers at the end of a path, each with the key that `*` stands for there."""
    if part is None or not path:
        yield key, part
    elif path[0] == "*":
        for name, entry in part.items():
            yield from _values(entry, path[1:], name)
    else:
        step = part.get(path[0]) if isinstance(part, Mapping) else getattr(part, path[0])
        yield from _values(step, path[1:], key)


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
