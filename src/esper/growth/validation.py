"""What a model scores on validation data, and what it scores with some of its seeds switched off."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.coalitions import Coalition, CoalitionPasses
from esper.growth.data import Batches, Data
from esper.growth.objective import Loss, Metric, Objective, Score, Tally
from esper.growth.sites import Forward
from esper.growth.structure import num_rows
from esper.kasmina.layers import evaluating
from esper.leyline.scale import MetricScale

Evaluate = Callable[[nn.Module], tuple[float, float]]
"""model -> (metric, loss) on validation data."""


class Validation:
    """Scores a model on validation data. Call it with the model; it returns (metric, loss).

    As the `evaluate` of a `Grower` it is cheaper than a function of your own: seeds are switched off batch by batch, so
    that what these passes have in common runs once.

    Args:
        model: The model it is for, before training.
        data: Tensors (inputs, target), a Dataset, a DataLoader or a list of batches.
        loss: (output, target) -> mean loss; by default the model's own, or one by the kind of the targets.
        metric: (output, target) -> number, over all rows at once; by default accuracy in percent, R², or the loss.
        higher_is_better: Direction of `metric`.
        forward: (model, batch) -> output; by default `model(inputs)` or `model(**batch)`.
        batch_size: Rows of a batch, where the data is not cut yet.
        device: Where batches go; by default where the model is.
        what: Name of the data in messages.

    Raises:
        ValueError: There is no data, or no loss can be found for it.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        *,
        loss: Loss | None = None,
        metric: Metric | None = None,
        higher_is_better: bool = True,
        forward: Forward | None = None,
        batch_size: int = 256,
        device: torch.device | None = None,
        what: str = "validation",
    ) -> None:
        where = device_of(model) if device is None else device
        self.batches = Batches(data, batch_size, shuffle=False, device=where, what=what)
        self.objective = Objective(
            model,
            self.batches.first,
            loss=loss,
            metric=metric,
            forward=forward,
            higher_is_better=higher_is_better,
        )
        self.num_rows: int | None = None
        """Rows of the data; None before they were first read."""

    def __call__(self, model: nn.Module) -> tuple[float, float]:
        """(metric, loss) of a model as it is."""
        (score,) = self._run(model, lambda batch: [self.objective.forward(model, batch)], 1)
        return score.metric, score.loss

    def score_coalitions(self, passes: CoalitionPasses, coalitions: Sequence[Coalition]) -> list[Score]:
        """What the network scores with only the named seeds on, one score per coalition."""
        model = passes.network.model

        def outputs(batch: Any) -> list[Any]:
            return passes.outputs(lambda: self.objective.forward(model, batch), coalitions)

        return self._run(model, outputs, len(coalitions))

    def _run(self, model: nn.Module, outputs: Callable[[Any], list[Any]], count: int) -> list[Score]:
        tallies: list[Tally] = [self.objective.tally() for _ in range(count)]
        losses: list[Tensor | float] = [0.0] * count
        weight = count = 0
        with evaluating(model):
            for batch in self.batches.in_order():
                target, rows = self.objective.target(batch), self.objective.weight(batch)
                for position, output in enumerate(outputs(batch)):
                    loss = self.objective.loss(output, batch)
                    losses[position] = losses[position] + loss.detach().double() * rows
                    tallies[position].add(output, target)
                weight += rows
                count += num_rows(batch)
        self.num_rows = count
        means = [float(total) / max(1, weight) for total in losses]  # sync: the one read of a validation
        return [Score(metric=t.result(mean), loss=mean) for t, mean in zip(tallies, means, strict=True)]

    def scale(self, untrained: Score) -> MetricScale:
        """What its metric and loss mean, given those of the model before training."""
        guess = self._mean_target_loss() if self.objective.kind == "regression" else None
        if guess == 0.0:
            warnings.warn("all validation targets are the same, so no model can be told from another", stacklevel=2)
        return self.objective.scale(untrained, guess)

    def _mean_target_loss(self) -> float | None:
        """The loss of predicting the mean of the targets; None if the loss does not take a plain prediction."""
        targets = [self.objective.target(batch) for batch in self.batches.in_order()]
        total = torch.stack([target.double().sum(0) for target in targets]).sum(0)
        mean = total / sum(target.shape[0] for target in targets)
        if self.objective.has_own_loss:
            return None
        weights = [target.shape[0] for target in targets]
        losses = [
            float(self.objective.loss(mean.to(target.dtype).expand(target.shape), (None, target))) * rows
            for target, rows in zip(targets, weights, strict=True)
        ]
        loss = math.fsum(losses) / sum(weights)
        return loss if math.isfinite(loss) else None


def device_of(model: nn.Module) -> torch.device:
    """Where a model is: where its first parameter or buffer is."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
