"""Several updates of a round as one. Each field names its reducer; a field without one fails when this is imported.

What was not measured is left out, never averaged as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, cast, get_type_hints

from esper.leyline import HEAD_NAMES
from esper.simic.agent.types import GradientStats, HeadStats, LSTMStats, ObservationStats, PPOUpdateMetrics

Reducer = Callable[[Sequence[Any], Sequence[float]], Any]
"""From the measured values and their weights, both in order and never empty, to one value."""

_BADNESS = ("ok", "no_usable_steps", "skipped", "missing", "nonfinite")


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return fmean(values)


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """Mean by usable steps. A value without weight counts only if nothing has any."""
    return fmean(values, weights) if any(weights) else fmean(values)


def _sum(values: Sequence[int], weights: Sequence[float]) -> int:
    return sum(values)


def _min(values: Sequence[float], weights: Sequence[float]) -> float:
    return min(values)


def _max(values: Sequence[float], weights: Sequence[float]) -> float:
    return max(values)


def _last(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return values[-1]


def _any(values: Sequence[bool], weights: Sequence[float]) -> bool:
    return any(values)


def _worst(values: Sequence[str], weights: Sequence[float]) -> str:
    return max(values, key=_BADNESS.index)


_GRADIENTS: dict[str, Reducer] = {"norm_mean": _mean, "norm_max": _max, "clip_norm": _last, "num_nonfinite": _sum}
_HEAD: dict[str, Reducer] = {
    "kl": _weighted,
    "clip_fraction": _weighted,
    "grad_norm": _mean,
    "num_usable": _sum,
    "grad_state": _worst,
}
_LSTM: dict[str, Reducer] = {
    "h_rms": _mean,
    "c_rms": _mean,
    "saturated_share": _mean,
    "dead_share": _mean,
    "num_nonfinite": _sum,
}
_OBSERVATIONS: dict[str, Reducer] = {
    "outlier_share": _mean,
    "clipped_share": _mean,
    "drift": _mean,
    "num_nonfinite": _sum,
}
_PARTS = ("gradient_stats", "head_entropies", "heads", "lstm", "observations")
"""Fields with fields of their own."""
_UPDATE: dict[str, Reducer] = {
    "performed": _any,
    "skip_reason": _last,
    "num_optimizer_steps": _sum,
    "kl_stopped": _any,
    "policy_loss": _mean,
    "value_loss": _mean,
    "entropy_loss": _mean,
    "total_loss": _mean,
    "approx_kl": _mean,
    "clip_fraction": _mean,
    "ratio_mean": _mean,
    "ratio_min": _min,
    "ratio_max": _max,
    "explained_variance": _mean,
    "value_nrmse": _mean,
    "return_corr": _mean,
    "return_mean": _mean,
    "return_std": _mean,
    "advantage_mean": _mean,
    "advantage_std": _mean,
    "decision_share": _mean,
    "num_rewards_clipped": _sum,
    "learning_rate": _last,
    "entropy_coef": _last,
    "clip_ratio": _last,
    "target_kl": _last,
    "env_steps": _sum,
}


def aggregate_ppo_metrics(updates: Sequence[PPOUpdateMetrics]) -> PPOUpdateMetrics:
    """One update that stands for several, oldest first.

    Raises:
        ValueError: There is none.
    """
    if not updates:
        raise ValueError("no update to aggregate: expected at least one")
    rows = cast(Sequence[Mapping[str, Any]], updates)
    merged = _reduce(rows, _UPDATE)
    merged["gradient_stats"] = _reduce([row["gradient_stats"] for row in rows], _GRADIENTS)
    merged["lstm"] = _reduce_measured([row["lstm"] for row in rows], _LSTM)
    merged["observations"] = _reduce_measured([row["observations"] for row in rows], _OBSERVATIONS)
    merged["heads"], merged["head_entropies"] = {}, {}
    for head in HEAD_NAMES:
        stats = [row["heads"][head] for row in rows]
        usable = [each["num_usable"] for each in stats]
        merged["heads"][head] = _reduce(stats, _HEAD, usable)
        merged["head_entropies"][head] = _one([row["head_entropies"][head] for row in rows], _weighted, usable)
    return cast(PPOUpdateMetrics, merged)


def _reduce(
    rows: Sequence[Mapping[str, Any]], reducers: Mapping[str, Reducer], weights: Sequence[float] | None = None
) -> dict[str, Any]:
    shares = [1.0] * len(rows) if weights is None else weights
    return {name: _one([row[name] for row in rows], reducer, shares) for name, reducer in reducers.items()}


def _reduce_measured(
    rows: Sequence[Mapping[str, Any] | None], reducers: Mapping[str, Reducer]
) -> dict[str, Any] | None:
    measured = [row for row in rows if row is not None]
    return _reduce(measured, reducers) if measured else None


def _one(values: Sequence[Any], reducer: Reducer, weights: Sequence[float]) -> Any:
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    if not pairs:
        return None
    return reducer([value for value, _ in pairs], [weight for _, weight in pairs])


def _require_reducers(record: type, reducers: Mapping[str, Reducer], parts: Sequence[str] = ()) -> None:
    missing = set(get_type_hints(record)) ^ {*reducers, *parts}
    assert not missing, f"{record.__name__}: fields and reducers differ in {', '.join(sorted(missing))}"


_require_reducers(PPOUpdateMetrics, _UPDATE, _PARTS)
_require_reducers(GradientStats, _GRADIENTS)
_require_reducers(HeadStats, _HEAD)
_require_reducers(LSTMStats, _LSTM)
_require_reducers(ObservationStats, _OBSERVATIONS)
