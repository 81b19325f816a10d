"""Payloads about the learner: its updates and its alarms. None means not measured, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from esper.leyline.record import record


@record
class LayerGradientStats:
    """The gradient of one tensor. Moments and shares are of its finite elements."""

    name: str
    """Of the parameter."""
    num_elements: int
    norm: float
    """Euclidean."""
    mean: float
    std: float
    max_abs: float
    """The largest in size."""
    zero_share: float
    """Share of elements that are exactly 0; a layer is dead above 0.9."""
    large_share: float
    """Share of elements beyond 10 in size; a layer explodes above 0.1."""
    num_nan: int
    num_inf: int


@record
class LayerHealth:
    """A list of layers in one line."""

    num_layers: int
    num_dead: int
    """Layers with more than 0.9 zeros."""
    num_exploding: int
    """Layers with more than 0.1 elements beyond 10."""
    num_nonfinite: int
    """Layers with an element that is no number."""
    min_norm: float
    max_norm: float
    worst_layer: str
    """The first by these: not finite, exploding, largest norm."""


class GradientStats(TypedDict):
    """Norms of the gradient over all parameters before clipping, in the minibatches stepped on; None without any."""

    grad_norm: float | None
    """Mean of the norms."""
    max_grad: float | None
    """The largest norm."""
    min_grad: float | None
    """The smallest norm."""
    clip_norm: float
    """The norm that gradients are clipped to."""
    num_nonfinite: int
    """Minibatches without a step because a loss or gradient was not finite."""


class HeadEntropies(TypedDict):
    """Entropy of each head as a share of its maximum, ln(legal choices): 1 undecided, 0 collapsed.

    Mean over the steps on which the head had a choice; None without any.
    """

    slot: float | None
    blueprint: float | None
    blend: float | None
    op: float | None


GradState = Literal["ok", "no_usable_steps", "missing", "nonfinite", "skipped"]


@record
class HeadUpdate:
    """One head in an update. None: no usable step, so nothing was measured."""

    kl: float | None
    """In nats, over its usable decisions and all passes."""
    clip_fraction: float | None
    """Share of them whose own ratio left 1 ± `clip_ratio`."""
    grad_norm: float | None
    """Of the head's own parameters, mean over the steps; None if no gradient reached them."""
    num_usable: int
    """Steps on which the head mattered and had more than one legal choice."""
    grad_state: GradState
    """no_usable_steps: nothing to learn from; missing: usable steps but no gradient, a defect; skipped: no step was
    taken at all."""


@record
class LSTMHealth:
    """The policy's LSTM in the last forward pass of an update."""

    h_rms: float
    """Root mean square of its outputs."""
    c_rms: float
    """Of its cells at the end of the sequences."""
    saturated_share: float
    """Share of outputs beyond 0.99 in size."""
    dead_share: float
    """Share of units that never changed: deviation over envs and time below 1e-4."""
    num_nonfinite: int
    """Outputs and cells that are no numbers."""


@record
class ObservationHealth:
    """Observations of a rollout under the normalisation statistics that were in force."""

    outlier_share: float
    """Share of normalised values beyond 5 deviations."""
    clipped_share: float
    """Share of those beyond 10, where the policy sees the limit instead."""
    drift: float
    """Mean distance of the rollout's means from the statistics, in their deviations."""
    num_nonfinite: int
    """Values that are no numbers."""


class PPOUpdateMetrics(TypedDict):
    """Everything measured in one update."""

    performed: bool
    """True if at least one step was taken."""
    skip_reason: str | None
    """Why there was none; None if there was."""
    num_optimizer_steps: int
    kl_stopped: bool
    """True if the passes ended early because `approx_kl` passed `target_kl`: the policy had moved far enough."""
    policy_loss: float | None
    """Clipped surrogate, all heads that had a choice weighing the same. Losses are means over the minibatches."""
    value_loss: float | None
    """Mean squared error of the critic, in units of the normalised returns."""
    entropy_loss: float | None
    """KL penalty to the prior (for heads without one: 1 - entropy share); what `entropy_coef` weighs."""
    total_loss: float | None
    """What was minimised: the sum, value and entropy times their coefficients."""
    approx_kl: float | None
    """In nats, of the joint action from the rollout's policy (estimator r - 1 - ln r), in the last minibatch."""
    clip_fraction: float | None
    """Share of decisions whose joint ratio left 1 ± `clip_ratio`, over all minibatches."""
    ratio_mean: float | None
    """Probability of a joint action now over that when it was taken, over the same decisions."""
    ratio_min: float | None
    """The smallest of them."""
    ratio_max: float | None
    """The largest of them."""
    explained_variance: float | None
    """1 - Var(returns - values) / Var(returns). None where the returns hardly vary."""
    value_nrmse: float | None
    """Root mean square error of the values over the deviation of the returns, taken as 0.1 at least: 1 is no better
    than the mean."""
    return_corr: float | None
    """Pearson correlation of values and returns; None if one of them is constant."""
    return_mean: float | None
    """Discounted returns that the critic is to predict, in scaled reward units."""
    return_std: float | None
    """Their standard deviation."""
    advantage_mean: float | None
    """Of steps where anything was decided, before normalisation."""
    advantage_std: float | None
    """Their standard deviation."""
    decision_share: float | None
    """Share of steps with more than one legal joint choice; on the others there is nothing to learn for the policy."""
    num_rewards_clipped: int | None
    """Rewards that met the limit of ten times their usual size; a healthy run has none. None: not counted."""
    gradient_stats: GradientStats
    head_entropies: HeadEntropies
    heads: Mapping[str, HeadUpdate]
    """By head: slot, blueprint, blend, op."""
    lstm: LSTMHealth | None
    """None for a skipped update."""
    observations: ObservationHealth | None
    """None for a skipped update."""
    learning_rate: float
    """The policy's learning rate in this update."""
    entropy_coef: float
    """Weight of the entropy term in this update."""
    clip_ratio: float
    """A ratio earns nothing beyond 1 ± this."""
    target_kl: float
    """The joint KL at which the passes stop."""
    env_steps: int
    """Valid env steps of the rollout that was learned from."""


@record
class PPOUpdateCompleted:
    """Is the policy learning or broken? Also sent for updates that were skipped."""

    metrics: PPOUpdateMetrics
    """What the update measured."""
    layers: tuple[LayerGradientStats, ...] | None
    """The policy's gradients, tensor by tensor, at level DEBUG."""


@record
class NumericalStability:
    """Whether a model's weights and gradients are numbers, and how large they are."""

    num_tensors: int
    num_nonfinite_weights: int
    """Elements, over all tensors."""
    num_nonfinite_gradients: int
    """Elements, over all tensors."""
    max_abs_weight: float | None
    """Of the finite elements."""
    max_abs_gradient: float | None
    """Of the finite elements; None where there is no gradient."""
    nonfinite_tensors: tuple[str, ...]
    """Names of those with either."""


@record
class AnomalyDebug:
    """What was looked at closer because of an alarm."""

    layers: LayerHealth | None
    stability: NumericalStability | None
    ratios: tuple[float, ...] | None
    """Up to 100 probability ratios out of range; None if the update looked at none."""
    num_ratios_out_of_range: int | None
    """All of them, also those beyond the 100 that are listed."""
    grad_norm: float | None = None
    """L2 norm of all gradients of the last minibatch, as clipping left them; None if the update looked at none."""


@record
class AnomalyDetected:
    """An alarm was entered, got worse or cleared. Sent on change only, so it cannot flood."""

    kind: str
    """The metric of a row of the table of limits (THRESHOLDS)."""
    state: Literal["entered", "worsened", "cleared"]
    metric: str
    """`kind`, with the head or slot it was measured on: "entropy_share:op"."""
    value: float
    """What was read; of an alarm that was cleared, the reading that cleared it or its last one."""
    limit: float
    """Of the row, for the severity of the alarm."""
    num_consecutive: int
    """Readings in a row beyond a limit, this one included; 0 when it clears."""
    detail: str
    """More about it in words; may be empty."""
    debug: AnomalyDebug | None = None
    """At level DEBUG, with alarms of the policy's update; about a host, EPOCH_COMPLETED has its gradients instead."""
