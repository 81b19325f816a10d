"""A loss and a metric of the user's own on the scale that controllers know: nats, and rows that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.references import load_function
from esper.leyline.scale import MetricScale
from esper.runtime.own import is_own
from esper.runtime.tasks import TaskSpec

# K coalitions, B rows


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnObjective:
    """What a batch is worth. Nothing is read from a device."""

    loss: Callable[..., Any]
    metric: Callable[..., Any] | None
    """None: the metric is the loss, from what knowing nothing reads to what perfection reads."""
    scale: MetricScale

    def mean(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        """(mean loss in nats, as many rows as would be right at this metric, rows)."""
        loss, scale, rows = self.loss(outputs, targets), self.scale, len(targets)
        if self.metric is None:
            value = scale.guess + (scale.best - scale.guess) * (1.0 - loss.detach() / scale.guess_loss)
        else:
            value = self.metric(outputs.detach(), targets)
        right = cast(Tensor, scale.percent(value)) / 100.0 * rows
        return loss * scale.nats_per_loss, right, rows

    def totals(self, outputs_KB: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        """(summed losses, rows that are right, rows) of K coalitions."""
        found = [self.mean(outputs, targets) for outputs in outputs_KB]
        rows = len(targets)
        losses_K = torch.stack([loss.double() * rows for loss, _, _ in found])
        return losses_K, torch.stack([right.double() for _, right, _ in found]), rows


def own_objective(task: TaskSpec) -> OwnObjective | None:
    """What a task measures by functions of the user's own; None for classes and cross-entropy."""
    if task.scale is None:
        return None
    metric: Callable[..., Any] | None = None
    if task.metric != "loss":
        metric = load_function(task.metric) if is_own(task.metric) else percent_right
    return OwnObjective(
        loss=F.cross_entropy if task.loss is None else load_function(task.loss), metric=metric, scale=task.scale
    )


def percent_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """Accuracy in percent."""
    return 100.0 * (outputs.argmax(-1) == targets).double().mean()
