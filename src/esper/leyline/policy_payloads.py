"""Payloads about the learner: its updates and its alarms. None means not measured, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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


@record
class PolicyLosses:
    """Means over the minibatches of an update."""

    policy: float | None
    """Clipped surrogate, all heads that had a choice weighing the same."""
    value: float | None
    """Mean squared error of the critic, in units of the normalised returns."""
    entropy: float | None
    """How far the policy is from its prior, 0 at the prior; what the entropy coefficient presses on."""
    total: float | None
    """What was minimised: the sum, value and entropy times their coefficients."""


@record
class JointRatios:
    """How far the policy moved, over the joint action."""

    approx_kl: float | None
    """In nats, from the policy that played the round (estimator r - 1 - ln r), in the last minibatch looked at."""
    clip_share: float | None
    """Share of decisions whose ratio left 1 ± `clip_range`, over all minibatches looked at."""
    ratio_mean: float | None
    """Probability of an action now over that when it was taken, over the same decisions."""
    ratio_min: float | None
    """The smallest of them."""
    ratio_max: float | None
    """The largest of them."""


@record
class CriticFit:
    """How well the values match the returns."""

    explained_variance: float | None
    """1 - Var(returns - values) / Var(returns). None where the returns hardly vary."""
    value_nrmse: float | None
    """Root mean square error of the values over the deviation of the returns, taken as 0.1 at least: 1 is no better
    than the mean."""
    return_corr: float | None
    """Pearson correlation of values and returns; None if one of them is constant."""


@record
class Moments:
    """Mean and standard deviation."""

    mean: float | None
    std: float | None


@record
class UpdateGradients:
    """Gradients over all parameters, before clipping."""

    norm_mean: float | None
    """Over the minibatches that were stepped on."""
    norm_max: float | None
    """The largest of them."""
    clip_norm: float
    """The norm that gradients are clipped to."""
    num_nonfinite: int
    """Minibatches without a step because a loss or gradient was not finite."""


@record
class HeadUpdate:
    """How one head fared in an update."""

    entropy_share: float | None
    """Mean over its usable decisions of the entropy as a share of ln(legal choices): 1 undecided, 0 collapsed; None
    without any."""
    kl: float | None
    """In nats, over the same decisions and all passes."""
    clip_share: float | None
    """Share of them whose own ratio left 1 ± `clip_range`."""
    grad_norm: float | None
    """Of the head's own parameters, mean over the steps; None if no gradient reached them."""
    num_usable: int
    """Steps on which the head mattered and had more than one legal choice."""
    grad_state: Literal["ok", "no_usable_steps", "missing", "nonfinite", "skipped"]
    """no_usable_steps: nothing to learn from; missing: usable steps but no gradient, a defect; skipped: no step was
    taken at all."""


@record
class LSTMHealth:
    """The policy's memory during an update."""

    h_rms: float
    """Root mean square of its outputs in the last forward pass."""
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
    """Observations of a round under the statistics that were in force."""

    outlier_share: float
    """Share of normalised values beyond 5 deviations."""
    clipped_share: float
    """Share of those beyond 10, where the policy sees the limit instead."""
    drift: float
    """Mean distance of the round's means from the statistics, in their deviations."""
    num_nonfinite: int
    """Values that are no numbers."""


@record
class PPOUpdateCompleted:
    """Is the policy learning or broken? Also told of updates that were skipped."""

    performed: bool
    """True if at least one step was taken."""
    skip_reason: str | None
    """Why there was none; None if there was."""
    num_optimizer_steps: int
    num_env_steps: int
    """Env steps that were learned from."""
    kl_stopped: bool
    """True if the passes ended early because `approx_kl` passed `target_kl`: the policy had moved far enough."""
    losses: PolicyLosses
    joint: JointRatios
    """Over whole actions, on steps where anything was decided."""
    critic: CriticFit
    returns: Moments
    """Discounted returns that the critic is to forecast, in scaled reward units."""
    advantages: Moments
    """Of steps where anything was decided, before they are normalised."""
    grad: UpdateGradients
    heads: Mapping[str, HeadUpdate]
    """By head: op, slot, blueprint, blend."""
    lstm: LSTMHealth | None
    """None for a skipped update."""
    observations: ObservationHealth | None
    """None for a skipped update."""
    decision_share: float | None
    """Share of steps with more than one legal joint choice; on the others there is nothing to learn for the policy."""
    num_rewards_clipped: int | None
    """Rewards that met the limit of ten times their usual size; a healthy run has none. None: not counted."""
    lr: float
    """The policy's learning rate in this update."""
    entropy_coef: float
    """Weight of the entropy term in this update."""
    clip_range: float
    """A ratio earns nothing beyond 1 ± this."""
    target_kl: float
    """The joint KL at which the passes stop."""
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
    """All of them, also those beyond the 100 that are told."""


@record
class AnomalyDetected:
    """An alarm was entered, got worse or cleared. Told on change only, so it cannot flood."""

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
    debug: AnomalyDebug | None
    """At level DEBUG, with alarms of the policy's update; about a host, EPOCH_COMPLETED has its gradients instead."""
