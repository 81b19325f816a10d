"""Any metric and any loss on the scale that controllers know: percent right, and nats.

Knowing nothing reads 100 / classes percent and ln(classes) nats, a perfect score reads 100 percent. Differences keep
their meaning: a point is a hundredth of the way from nothing to perfect, as far as that can be told.
"""

from __future__ import annotations

import math

from esper.leyline.record import record

UNKNOWN_CLASSES = 10
"""Stands for the number of classes where there are none: it only fixes where on the scale knowing nothing lies."""


@record
class MetricScale:
    """What the user's metric and loss mean.

    Raises:
        ValueError: No score could be better than knowing nothing, or a number is not finite.
    """

    name: str
    """Of the metric, for tables and plots."""
    guess: float
    """The metric of knowing nothing."""
    best: float
    """The metric of a perfect model; below `guess` for metrics that fall."""
    guess_loss: float
    """The loss of knowing nothing."""
    classes: int = UNKNOWN_CLASSES

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.guess, self.best, self.guess_loss))):
            raise ValueError(f"guess, best and guess_loss must be finite numbers, got {self}")
        if self.guess == self.best:
            raise ValueError(f"a perfect metric must differ from that of knowing nothing, got {self.best} for both")
        if self.classes < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes}")

    @property
    def higher_is_better(self) -> bool:
        """The direction of the metric."""
        return self.best > self.guess

    @property
    def nats_per_loss(self) -> float:
        """Unit of the loss. A loss that is not above 0 where nothing is known keeps its own unit."""
        return math.log(self.classes) / self.guess_loss if self.guess_loss > 0.0 else 1.0

    def percent(self, metric: float) -> float:
        """The metric on the scale of controllers."""
        floor = 100.0 / self.classes
        return floor + (metric - self.guess) * self._points_per_unit

    def difference(self, points: float) -> float:
        """Points on that scale as a difference of the metric."""
        return points / self._points_per_unit

    @property
    def _points_per_unit(self) -> float:
        return (100.0 - 100.0 / self.classes) / (self.best - self.guess)


def accuracy_scale(classes: int, guess_loss: float | None = None) -> MetricScale:
    """Accuracy in percent; the loss is cross-entropy unless the loss of knowing nothing is given."""
    return MetricScale(
        name="accuracy (%)",
        guess=100.0 / classes,
        best=100.0,
        guess_loss=math.log(classes) if guess_loss is None else guess_loss,
        classes=classes,
    )


def token_loss_scale(vocabulary: int) -> MetricScale:
    """Loss per token in nats, as the metric and as the loss."""
    guess = math.log(vocabulary)
    return MetricScale(name="loss per token (nats)", guess=guess, best=0.0, guess_loss=guess, classes=vocabulary)


def r2_scale(guess_loss: float) -> MetricScale:
    """Share of the variance of the targets that is explained; the mean of the targets explains nothing of it."""
    return MetricScale(name="R²", guess=0.0, best=1.0, guess_loss=guess_loss)


def infer_scale(
    metric: float, loss: float, *, higher_is_better: bool, name: str = "metric", classes: int = UNKNOWN_CLASSES
) -> MetricScale:
    """A scale for a metric of which only its first value is known, that of the model before it is trained.

    A metric that falls is taken to end at 0. One that rises and starts within [0, 1] is taken to end at 1, one within
    [0, 100] at 100.

    Raises:
        ValueError: It starts where no such end makes sense.
    """
    guess_loss = loss if loss > 0.0 else 1.0
    if higher_is_better and 0.0 <= metric <= 100.0:
        best = 1.0 if metric <= 1.0 else 100.0
        return MetricScale(name=name, guess=best / classes, best=best, guess_loss=guess_loss, classes=classes)
    if not higher_is_better and metric > 0.0:
        return MetricScale(name=name, guess=metric, best=0.0, guess_loss=guess_loss, classes=classes)
    direction = "rises" if higher_is_better else "falls"
    raise ValueError(
        f"cannot tell what a perfect metric would be: it {direction} and starts at {metric:.4g}. Say so with "
        "scale=esper.MetricScale(name=..., guess=..., best=..., guess_loss=...)"
    )
