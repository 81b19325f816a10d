"""Several PPO updates over one rollout as one. What was not measured is left out, never averaged as 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from esper.simic.agent.types import PPOUpdateMetrics

_BADNESS = ("ok", "no_usable_steps", "skipped", "missing", "nonfinite")


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _worst(states: Sequence[str]) -> str:
    return max(states, key=_BADNESS.index)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


REDUCERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("performed", "kl_stopped"), any),
    **dict.fromkeys(("num_optimizer_steps", "num_nonfinite"), sum),
    **dict.fromkeys(("ratio_min", "min_grad"), min),
    **dict.fromkeys(("ratio_max", "max_grad"), max),
    # Facts of the rollout and of the schedules are the same in all of its updates.
    **dict.fromkeys(("skip_reason", "env_steps", "num_usable", "num_rewards_clipped"), _last),
    **dict.fromkeys(("learning_rate", "entropy_coef", "clip_ratio", "target_kl", "clip_norm"), _last),
    "grad_state": _worst,
}
"""By name of a field, wherever it is; every other field is a mean."""


def aggregate_ppo_metrics(updates: Sequence[PPOUpdateMetrics]) -> PPOUpdateMetrics:
    """One set of metrics for several updates over the same rollout, oldest first.

    Raises:
        ValueError: There is none.
    """
    if not updates:
        raise ValueError("no update to aggregate: expected at least one")
    return cast(PPOUpdateMetrics, _combine("", updates))


def _combine(name: str, values: Sequence[Any]) -> Any:
    measured = [value for value in values if value is not None]
    if len(measured) <= 1:
        return measured[0] if measured else None
    first = measured[0]
    if isinstance(first, Mapping):
        return {key: _combine(key, [value[key] for value in measured]) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        parts = [field.name for field in fields(first)]
        return replace(first, **{part: _combine(part, [getattr(value, part) for value in measured]) for part in parts})
    return REDUCERS.get(name, _mean)(measured)
