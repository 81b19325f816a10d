"""What the agent hands out: TypedDicts, all keys required. No behaviour, no torch.

A meta test compares the head keys with `HEADS`, so a new head fails until it is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from esper.leyline import GradientStats, HeadEntropies, HeadUpdate, LSTMHealth, ObservationHealth

__all__ = ["ActionDict", "GradientStats", "HeadEntropies", "HeadLogProbs", "PPOUpdateMetrics"]


class ActionDict(TypedDict):
    """One env's choice as indices. Heads the op does not use hold 0."""

    slot: int
    blueprint: int
    blend: int
    op: int


class HeadLogProbs(TypedDict):
    """Log-probability of each head's choice; exactly 0.0 where there was nothing to choose."""

    slot: float
    blueprint: float
    blend: float
    op: float


class PPOUpdateMetrics(TypedDict):
    """Everything measured in one update. `PPOUpdateCompleted`, its event, takes these names and explains them."""

    performed: bool
    skip_reason: str | None
    num_optimizer_steps: int
    kl_stopped: bool
    policy_loss: float | None
    value_loss: float | None
    entropy_loss: float | None
    total_loss: float | None
    approx_kl: float | None
    clip_fraction: float | None
    ratio_mean: float | None
    ratio_min: float | None
    ratio_max: float | None
    explained_variance: float | None
    value_nrmse: float | None
    return_corr: float | None
    return_mean: float | None
    return_std: float | None
    advantage_mean: float | None
    advantage_std: float | None
    decision_share: float | None
    num_rewards_clipped: int | None
    gradient_stats: GradientStats
    head_entropies: HeadEntropies
    heads: Mapping[str, HeadUpdate]
    lstm: LSTMHealth | None
    observations: ObservationHealth | None
    learning_rate: float
    entropy_coef: float
    clip_ratio: float
    target_kl: float
    env_steps: int
