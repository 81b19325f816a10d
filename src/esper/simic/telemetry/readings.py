"""What the detector looks at: one number per row of the threshold table, taken from an update or an epoch.

A reading that was not measured is absent. Rows that are measured several times, per head or per seed, carry the name
of their subject behind a colon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

from esper.leyline import ChoiceStats, EpochReport, LifecycleOp, record
from esper.leyline.thresholds import MIN_RATE_EPISODES, MIN_USABLE
from esper.simic.agent.types import PPOUpdateMetrics

Readings = dict[str, float]


@record
class EnvContext:
    """One epoch of one env: the four ids of its events."""

    round: int
    episode: int
    env: int
    epoch: int


Clock = EnvContext | int
"""When something happened: an epoch of an env, or the policy's update at the end of a round."""


@record
class UpdateInputs:
    """What is known at the end of a round."""

    metrics: PPOUpdateMetrics | None
    """Of the policy's update; None for a controller that does not learn, which is judged by what it does to hosts."""
    ops: ChoiceStats | None
    """Counts of the op head in the round."""
    num_rollbacks_total: int
    num_episodes_total: int
    shaping_share: float | None
    """Size of all shaping terms of the round over the size of all terms; None where nothing was paid."""


def update_readings(inputs: UpdateInputs) -> Readings:
    """The readings of a round that need no history."""
    outcome = {"shaping_share": inputs.shaping_share}
    if inputs.num_episodes_total >= MIN_RATE_EPISODES:
        outcome["rollbacks_per_100_episodes"] = 100.0 * inputs.num_rollbacks_total / inputs.num_episodes_total
    learned = {} if inputs.metrics is None else _policy_readings(inputs.metrics, inputs.ops)
    return _measured((learned | outcome).items())


def epoch_readings(report: EpochReport) -> Readings:
    """The readings of an epoch that need no history: the gradients of live seeds."""
    found: dict[str, float | None] = {}
    for slot in report.slots:
        if slot.stage.is_live:
            found[f"seed_grad_health:{slot.slot_id}"] = slot.grad_health
            found[f"seed_grad_ratio:{slot.slot_id}"] = slot.grad_ratio
    return _measured(found.items())


def num_nonfinite(metrics: PPOUpdateMetrics) -> int | None:
    """Everything in an update that is not a number: minibatches, memory, observations, losses and ratios.

    The only count there is: the verdict reads it from the alarm. Heads are not counted again; their gradients are not
    finite in minibatches that are. None for an update that was skipped before it looked at anything.
    """
    lstm, seen = metrics["lstm"], metrics["observations"]
    if seen is None:
        return None
    counted = metrics["gradient_stats"]["num_nonfinite"] + seen.num_nonfinite
    counted += lstm.num_nonfinite if lstm else 0
    losses = (metrics["policy_loss"], metrics["value_loss"], metrics["entropy_loss"], metrics["total_loss"])
    ratios = (metrics["approx_kl"], metrics["ratio_mean"], metrics["ratio_min"], metrics["ratio_max"])
    return counted + sum(value is not None and not math.isfinite(value) for value in (*losses, *ratios))


def wait_share(ops: ChoiceStats | None) -> float | None:
    """Share of WAIT among the decisions where another op was legal; None if there were none."""
    if ops is None or ops.num_decisions == ops.num_forced:
        return None
    free = ops.num_decisions - ops.num_forced
    return (ops.choices[LifecycleOp.WAIT.name].num_chosen - ops.num_forced) / free


def _policy_readings(metrics: PPOUpdateMetrics, ops: ChoiceStats | None) -> dict[str, float | None]:
    grad, lstm, seen = metrics["gradient_stats"], metrics["lstm"], metrics["observations"]
    norm, kl, target = grad["grad_norm"], metrics["approx_kl"], metrics["target_kl"]
    found: dict[str, float | None] = {
        "num_nonfinite": num_nonfinite(metrics),
        "kl_over_target": None if kl is None or target <= 0 else kl / target,
        "approx_kl": kl,
        "clip_fraction": metrics["clip_fraction"],
        "ratio_max": metrics["ratio_max"],
        "ratio_min": metrics["ratio_min"],
        "value_nrmse": metrics["value_nrmse"],
        "return_corr": metrics["return_corr"],
        "grad_norm_over_clip": None if norm is None else norm / grad["clip_norm"],
        "lstm_saturated_share": lstm.saturated_share if lstm else None,
        "lstm_c_rms": lstm.c_rms if lstm else None,
        "lstm_h_rms": lstm.h_rms if lstm else None,
        "observation_outlier_share": seen.outlier_share if seen else None,
        "observation_clipped_share": seen.clipped_share if seen else None,
        "observation_drift": seen.drift if seen else None,
        "decision_share": metrics["decision_share"],
        "wait_share": wait_share(ops),
    }
    entropies = cast(Mapping[str, float | None], metrics["head_entropies"])
    for head, stats in metrics["heads"].items():
        if stats.num_usable >= MIN_USABLE:
            found[f"entropy_share:{head}"] = entropies[head]
    return found


def _measured(found: Iterable[tuple[str, float | None]]) -> Readings:
    return {name: float(value) for name, value in found if value is not None}
