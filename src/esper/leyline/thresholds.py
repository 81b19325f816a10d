"""The one table of alarm limits. Detector, diagnosis, views and the operators' page read it; nobody else has limits.

Fitted means: held against three runs that learned well (`digits_blind` twice, `digits_saturated` once; 140 rounds, 2160
episodes, 43,200 epochs) so that a healthy run ends without a critical alarm and is warned in few of its rounds. All
other values are first guesses that hardly ever spoke on those runs.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from esper.leyline.record import record
from esper.leyline.telemetry import Severity

WARMUP_UPDATES = 5
"""Updates at the start of a run during which only rows without a warm-up of their own apply."""
MIN_USABLE = 20
"""Decisions below which the entropy of a head is not judged."""
GRAD_WINDOW = 20
GRAD_MIN_HISTORY = 10
"""Updates of gradient norms that are remembered, and needed, to speak of drift."""
LOSS_WINDOW = 10
LOSS_MIN_HISTORY = 3
"""Epochs of validation loss that are remembered, and needed, to speak of a jump."""
MIN_RATE_EPISODES = 50
"""Episodes below which the rate of rollbacks is not judged."""
TREND_WINDOW_ROUNDS = 10
MIN_TREND_SHARE = 0.1
"""Share of the rounds after which a trend is worth reporting."""
RECENT_ROUNDS = 2
"""Rounds for which a rollback stays news."""
MIN_PROGRESS_S = 10.0
"""The shortest epoch time that silence is measured by."""
DEGRADATION_SHARE = 0.05
"""A fall by this share of the former rolling accuracy is a degradation, however few points it is."""
RANSOM_IMPROVEMENT_PP = -1.0
"""A host this far below waiting is worse off; a seed that still claims to contribute looks like ransomware.

Fitted: the curve of waiting is a mean over hosts, and a single healthy host is often some tenths of a point below it.
"""
MIN_COMMON_GAIN_PP = 1.0
"""What the seeds brought together counts as at least this much, or noise near 0 would make any ratio to it large."""
MIN_ROLLBACK_SHARE = 0.1
"""Share of the recent episodes that ended in a rollback from which a run is unsafe.

Fitted: a healthy run has one now and then, and it is what the governor is there for.
"""
MIN_HOST_SHARE = 0.4
"""Share of the hosts with an alarm, or of the recent episodes with a suspicion, from which it is about the run.

What single hosts do stays in the log: a policy that explores tries harmful things too. Fitted; docs/telemetry.md has
the rates.
"""
DEAD_ZERO_SHARE = 0.9
EXPLODING_LARGE_SHARE = 0.1
"""A layer is dead above this share of zero gradients, exploding above this share of large ones."""
CLEAR_HIGH = 2.0 / 3.0
CLEAR_LOW = 1.5
"""An alarm clears when the value is back at this multiple of the limit that raised it."""

Direction = Literal["above", "at_least", "below"]
Checked = Literal["update", "epoch", "reward", "trend", "machine"]


@record
class Threshold:
    """One row: what is bad, how bad, and for how long."""

    metric: str
    unit: str
    direction: Direction
    warn: float | None
    critical: float | None
    reason: str
    high: float | None = None
    """The largest value that the metric can have; None for no bound."""
    num_consecutive: int = 1
    """Checks in a row before the alarm is entered."""
    warmup: int = WARMUP_UPDATES
    """Updates at the start of a run during which the row is silent."""
    checked: Checked = "update"
    """Who evaluates it, and when: the detector per update or epoch, the rewards, the trend, or the diagnosis."""

    def severity_of(self, value: float) -> Severity | None:
        """How bad a value is; None for harmless. What is not a number is as bad as it gets."""
        if self._beyond(value, self.critical):
            return Severity.CRITICAL
        return Severity.WARNING if self._beyond(value, self.warn) else None

    def limit_of(self, severity: Severity) -> float:
        """The limit that raises this severity."""
        limit = self.critical if severity is Severity.CRITICAL else self.warn
        assert limit is not None, f"{self.metric} has no limit for {severity.value}"
        return limit

    @property
    def what(self) -> str:
        """What is wrong, without how the limit was found."""
        return self.reason.partition(";")[0]

    @property
    def clear_at(self) -> float:
        """Where an alarm ends: well on the good side of the first limit, at most half-way to the end of the range."""
        limit = self.critical if self.warn is None else self.warn
        assert limit is not None, f"{self.metric} has no limits"
        if self.direction != "below":
            return CLEAR_HIGH * limit
        return CLEAR_LOW * limit if self.high is None else min(CLEAR_LOW * limit, (limit + self.high) / 2)

    def clears(self, value: float) -> bool:
        """True if the value is far enough on the good side to end an alarm."""
        return value >= self.clear_at if self.direction == "below" else value <= self.clear_at

    def _beyond(self, value: float, limit: float | None) -> bool:
        if limit is None:
            return False
        if math.isnan(value):
            return True
        if self.direction == "below":
            return value < limit
        return value > limit or (self.direction == "at_least" and value == limit)


def _row(
    metric: str, unit: str, direction: Direction, warn: float | None, critical: float | None, reason: str, **other: Any
) -> Threshold:
    return Threshold(
        metric=metric, unit=unit, direction=direction, warn=warn, critical=critical, reason=reason, **other
    )


# fmt: off
_ROWS = (
    # metric, unit, direction, warning, critical, reason
    _row("num_nonfinite", "count", "above", None, 0,
         "losses, gradients, ratios, observations or memory that are not numbers; tested first, since NaN "
         "defeats every comparison", warmup=0),
    _row("skipped_updates", "updates in a row", "at_least", 1, 3,
         "no finite minibatch; at the critical limit the trainer stops", warmup=0),
    _row("kl_over_target", "times", "above", 6, 12,
         "steps too large: the KL stop should end an update near 1.5 times its target; fitted: up to 4.2"),
    _row("approx_kl", "nats", "below", 1e-7, None, "the policy does not move", num_consecutive=3),
    _row("clip_fraction", "share", "above", 0.3, 0.5, "steps too large", high=1.0),
    _row("ratio_max", "times", "above", 7, 20,
         "off-policy blow-up; the extreme over all rows and passes, fitted: half of the healthy updates "
         "reach 2, one of 140 passes 5", warmup=0),
    _row("ratio_min", "times", "below", 0.03, 0.003,
         "probability of taken actions collapses; the extreme over all rows and passes, fitted: half of "
         "the healthy updates fall to 0.35, the lowest of 140 to 0.054", warmup=0),
    _row("entropy_share", "share", "below", 0.1, 0.05,
         "the head collapses onto one choice", high=1.0, num_consecutive=3),
    _row("value_nrmse", "times", "above", 1.0, 2.0, "the critic is no better than predicting the mean"),
    _row("return_corr", "correlation", "below", 0.3, 0.0,
         "the critic is unrelated to returns", high=1.0, warmup=20),
    _row("grad_norm_over_clip", "times", "above", 10, 100, "clipping hides an explosion"),
    _row("grad_drift", "abs ln", "above", math.log(5.0), None,
         "gradient norm far from the median of the last updates"),
    _row("lstm_saturated_share", "share", "above", 0.05, 0.5,
         "memory outputs stuck at their bound; fitted: none are", high=1.0),
    _row("lstm_c_rms", "rms", "above", 10, 50, "cell runaway"),
    _row("lstm_h_rms", "rms", "below", 1e-4, 1e-6, "dead memory", high=1.0),
    _row("observation_outlier_share", "share", "above", 0.01, 0.05, "the normaliser is off", high=1.0),
    _row("observation_clipped_share", "share", "above", 0.01, 0.05, "the normaliser is off", high=1.0),
    _row("observation_drift", "deviations", "above", 1, 2, "frozen statistics are stale"),
    _row("decision_share", "share", "below", 0.3, 0.05, "nothing to decide, so nothing to learn from",
         high=1.0, warmup=0),
    _row("wait_share", "share", "above", 0.95, 0.99, "passive policy: it waits although it could act", high=1.0),
    _row("rollbacks_per_100_episodes", "count", "above", 2, 10, "unsafe growth", warmup=0),
    _row("shaping_share", "share", "above", 0.65, 0.8,
         "shaping terms are farmed; fitted: on a host with nothing to gain it is 0.3 to 0.6, else below 0.2",
         high=1.0, warmup=0),
    _row("seed_grad_health", "share", "below", 0.7, 0.3, "sick seed", high=1.0, warmup=0, checked="epoch"),
    _row("seed_grad_ratio", "times", "below", 0.01, None,
         "dormant seed", num_consecutive=3, warmup=0, checked="epoch"),
    _row("val_loss_ratio", "times", "above", 2, None,
         "loss far above its recent median; warns before the governor acts by limits of its own",
         warmup=0, checked="epoch"),
    _row("attribution_ratio", "times", "at_least", 10, None,
         "the seeds claim many times what they brought together; fitted: 16 of 2160 healthy episodes",
         num_consecutive=3, warmup=0, checked="reward"),
    _row("ransom_contribution_pp", "pp", "at_least", None, 1.0,
         "removal would hurt although the host is worse than if it had only waited; fitted: 11 of 2160 "
         "healthy episodes", num_consecutive=3, warmup=0, checked="reward"),
    _row("plateau_pp", "pp", "below", 0.5, None,
         "size of the change of rolling accuracy below which it is a plateau", warmup=0, checked="trend"),
    _row("trend_pp", "pp", "at_least", 2.0, None,
         "size of the change of rolling accuracy that is an improvement or a degradation",
         warmup=0, checked="trend"),
    _row("silence_epochs", "median epochs", "above", 5, 20,
         "no progress of the training thread: stalled", warmup=0, checked="machine"),
    _row("heartbeat_age_s", "s", "above", None, 15,
         "the process no longer writes its status", warmup=0, checked="machine"),
    _row("gpu_memory_share", "share", "above", 0.85, 0.95,
         "the device is nearly full", high=1.0, warmup=0, checked="machine"),
    _row("disk_free_bytes", "bytes", "below", 2e9, 2e8,
         "log and checkpoints will soon fail", warmup=0, checked="machine"),
    _row("telemetry_cpu_share", "share", "above", 0.05, 0.2,
         "telemetry costs too much", high=1.0, warmup=0, checked="machine"),
)
# fmt: on

THRESHOLDS: dict[str, Threshold] = {row.metric: row for row in _ROWS}
"""Rows by metric, in the order in which alarms matter."""
