"""Payloads about the learner: its updates and its alarms. None means not measured, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from esper.leyline.record import record


@record
class LayerGradientStats:
    """The gradient of one tensor. Moments and shares are of its finite elements."""

    name: str
    num_elements: int
    norm: float
    mean: float
    std: float
    max_abs: float
    zero_share: float
    large_share: float
    """Share of elements beyond 10 in size."""
    num_nan: int
    num_inf: int


@record
class LayerHealth:
    """A list of layers in one line."""

    num_layers: int
    num_dead: int
    num_exploding: int
    num_nonfinite: int
    min_norm: float
    max_norm: float
    worst_layer: str


@record
class PolicyLosses:
    """Means over the minibatches of an update."""

    policy: float | None
    value: float | None
    entropy: float | None
    total: float | None


@record
class JointRatios:
    """How far the policy moved, over the joint action."""

    approx_kl: float | None
    clip_share: float | None
    ratio_mean: float | None
    ratio_min: float | None
    ratio_max: float | None


@record
class CriticFit:
    """How well the values match the returns."""

    explained_variance: float | None
    """None where the returns hardly vary."""
    value_nrmse: float | None
    return_corr: float | None


@record
class Moments:
    """Mean and standard deviation."""

    mean: float | None
    std: float | None


@record
class UpdateGradients:
    """Gradients over all parameters, before clipping."""

    norm_mean: float | None
    norm_max: float | None
    clip_norm: float
    num_nonfinite: int
    """Minibatches without a step because a loss or gradient was not finite."""


@record
class HeadUpdate:
    """How one head fared in an update."""

    entropy_share: float | None
    kl: float | None
    clip_share: float | None
    grad_norm: float | None
    num_usable: int
    """Steps on which the head mattered and had more than one legal choice."""
    grad_state: Literal["ok", "no_usable_steps", "missing", "nonfinite", "skipped"]


@record
class LSTMHealth:
    """The policy's memory during an update."""

    h_rms: float
    c_rms: float
    saturated_share: float
    dead_share: float
    num_nonfinite: int


@record
class ObservationHealth:
    """Observations of a round under the statistics that were in force."""

    outlier_share: float
    clipped_share: float
    drift: float
    num_nonfinite: int


@record
class PPOUpdateCompleted:
    """Is the policy learning or broken? Also told of updates that were skipped."""

    performed: bool
    skip_reason: str | None
    num_optimizer_steps: int
    num_env_steps: int
    kl_stopped: bool
    losses: PolicyLosses
    joint: JointRatios
    critic: CriticFit
    returns: Moments
    advantages: Moments
    grad: UpdateGradients
    heads: Mapping[str, HeadUpdate]
    lstm: LSTMHealth | None
    observations: ObservationHealth | None
    decision_share: float | None
    """Share of steps with more than one legal joint choice."""
    num_rewards_clipped: int | None
    """Rewards that met the limit of ten times their usual size; a healthy run has none."""
    lr: float
    entropy_coef: float
    clip_range: float
    target_kl: float
    layers: tuple[LayerGradientStats, ...] | None
    """At level DEBUG."""


@record
class NumericalStability:
    """Whether a model's weights and gradients are numbers, and how large they are."""

    num_tensors: int
    num_nonfinite_weights: int
    num_nonfinite_gradients: int
    max_abs_weight: float | None
    max_abs_gradient: float | None
    """Of the finite elements; None where there is no gradient."""
    nonfinite_tensors: tuple[str, ...]


@record
class AnomalyDebug:
    """What was looked at closer because of an alarm."""

    layers: LayerHealth | None
    stability: NumericalStability | None
    ratios: tuple[float, ...] | None
    """Up to 100 probability ratios out of range; None if the update looked at none."""
    num_ratios_out_of_range: int | None


@record
class AnomalyDetected:
    """An alarm was entered, got worse or cleared. Told on change only, so it cannot flood."""

    kind: str
    """The metric of a row of THRESHOLDS."""
    state: Literal["entered", "worsened", "cleared"]
    metric: str
    """`kind`, with the head or slot it was measured on: "entropy_share:op"."""
    value: float
    limit: float
    num_consecutive: int
    detail: str
    debug: AnomalyDebug | None
    """At level DEBUG, with alarms of the policy's update; about a host, EPOCH_COMPLETED has its gradients instead."""
