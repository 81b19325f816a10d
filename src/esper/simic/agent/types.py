"""What the agent hands out: TypedDicts keyed by head, all keys required. No behaviour.

A meta test compares the head keys with `HEADS`, so a new head fails until it is added here.
"""

from __future__ import annotations

from typing import Literal, TypedDict

GradState = Literal["ok", "no_usable_steps", "missing", "nonfinite", "skipped"]
"""Tells a head that had nothing to learn from one that is broken; `skipped`: the update took no step at all."""


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


class HeadEntropies(TypedDict):
    """Entropy of each head as a share of its maximum; None where there was nothing to choose."""

    slot: float | None
    blueprint: float | None
    blend: float | None
    op: float | None


class HeadStats(TypedDict):
    """How one head fared in an update. None: no usable step, so nothing was measured."""

    kl: float | None
    clip_fraction: float | None
    grad_norm: float | None
    num_usable: int
    """Steps on which the head mattered and had more than one legal choice."""
    grad_state: GradState


class HeadUpdates(TypedDict):
    """Update statistics by head."""

    slot: HeadStats
    blueprint: HeadStats
    blend: HeadStats
    op: HeadStats


class GradientStats(TypedDict):
    """Gradients over all parameters, before clipping. Norms are of finite minibatches; None if there were none."""

    norm_mean: float | None
    norm_max: float | None
    clip_norm: float
    num_nonfinite: int
    """Minibatches whose gradient or loss was not finite; no step was taken on them."""


class LSTMStats(TypedDict):
    """The memory in the update's last forward pass."""

    h_rms: float
    c_rms: float
    """Of the cells at the end of the sequences."""
    saturated_share: float
    """Share of outputs beyond 0.99 in size."""
    dead_share: float
    """Share of units that never changed (standard deviation over envs and time below 1e-4)."""
    num_nonfinite: int


class ObservationStats(TypedDict):
    """Observations of the round under the statistics that were in force."""

    outlier_share: float
    """Share of normalised values beyond 5 deviations."""
    clipped_share: float
    """Share of normalised values that met the limit of 10 deviations."""
    drift: float
    """Mean distance of this round's means from the statistics, in their deviations."""
    num_nonfinite: int


class PPOUpdateMetrics(TypedDict):
    """Everything known about one update. KL, ratios and clip fraction are those of the joint action."""

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
    """None where the returns hardly vary."""
    value_nrmse: float | None
    return_corr: float | None
    return_mean: float | None
    return_std: float | None
    advantage_mean: float | None
    advantage_std: float | None
    decision_share: float | None
    """Share of steps with more than one legal joint choice."""
    num_rewards_clipped: int | None
    """Rewards of the round that met the limit of the reward scale; None where nobody scales rewards."""
    gradient_stats: GradientStats
    head_entropies: HeadEntropies
    heads: HeadUpdates
    lstm: LSTMStats | None
    observations: ObservationStats | None
    learning_rate: float
    entropy_coef: float
    clip_ratio: float
    target_kl: float
    env_steps: int
    """Valid steps in this update."""
