"""What a model is trained for: how a batch is fed to it, its loss and its metric, by the kind of the targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.sites import Forward, call_model
from esper.growth.structure import num_rows, tensors
from esper.kasmina.layers import evaluating
from esper.leyline import record
from esper.leyline.scale import UNKNOWN_CLASSES, MetricScale, accuracy_scale, infer_scale, r2_scale, token_loss_scale

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED_LABEL = -100
"""Label of tokens that do not count, here and in torch's cross-entropy."""

Loss = Callable[[Any, Any], Tensor]
"""(output, target) -> mean loss over the batch."""
Metric = Callable[[Any, Any], float]
"""(output, target) -> metric. It is given all validation rows at once."""


class Tally(Protocol):
    """Adds up a metric over batches."""

    def add(self, output: Any, target: Any) -> None:
        """Takes one batch."""

    def result(self, loss: float) -> float:
        """The metric over all batches, given their mean loss."""


@record
class Score:
    """What a network scores on validation data."""

    metric: float
    loss: float


class Objective:
    """How a model is fed and judged.

    Args:
        model: As it is before training.
        batch: A batch as it comes from the data.
        loss: The user's loss; None takes the model's own if it has one, else one by the kind of the targets.
        metric: The user's metric; None takes one by the kind of the targets.
        forward: Runs the model on a batch; None feeds it by the usual conventions.
        higher_is_better: Direction of the user's metric.

    Raises:
        ValueError: The batch has no target, or no loss can be found for it.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss | None = None,
        metric: Metric | None = None,
        forward: Forward | None = None,
        higher_is_better: bool = True,
    ) -> None:
        for what, given in (("loss", loss), ("metric", metric), ("forward", forward)):
            if given is not None and not callable(given):
                raise ValueError(f"{what} must be a function, got {given!r}")
        self._accepts = None if forward is not None else _accepted_names(model)
        self._forward = forward
        self._metric = metric
        self._higher_is_better = higher_is_better
        output = self._first_output(model, batch)
        self.has_own_loss = loss is None and _own_loss(output) is not None
        target = self.target(batch)
        if loss is None and not self.has_own_loss and not isinstance(target, Tensor):
            raise ValueError(
                "a batch must be (inputs, target) or a dict with 'labels', or loss= must be given; got "
                f"{_shape_of(batch)}"
            )
        self.kind = _kind(prediction(output), target)
        """"classification", "tokens", "regression" or "other"."""
        if self.kind == "regression" and loss is not None and bool(((target == 0) | (target == 1)).all()):
            self.kind = "other"  # yes or no, of which R² says nothing
        if loss is None and not self.has_own_loss and self.kind == "other":
            raise ValueError(
                f"cannot tell the loss of {_shape_of(prediction(output))} predictions and {_shape_of(target)} targets; "
                "pass loss="
            )
        self._loss = loss
        self.classes = (
            _class_axis_size(prediction(output), target) if self.kind in ("classification", "tokens") else None
        )
        if self.classes is not None:
            _check_labels(target[target != IGNORED_LABEL], self.classes)
        if loss is not None:
            with torch.no_grad():
                found = self.loss(output, batch)
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise ValueError(f"loss must return one number, the mean over a batch, got {_shape_of(found)}")

    def _first_output(self, model: nn.Module, batch: Any) -> Any:
        with evaluating(model):
            try:
                return self.forward(model, batch)
            except (IndexError, RuntimeError, TypeError) as error:
                shapes = ", ".join(_shape_of(tensor) for _, tensor in tensors(batch)) or type(batch).__name__
                reason = " ".join(str(error).split())
                raise ValueError(f"{type(model).__name__} cannot run on a batch of {shapes}: {reason}") from error

    # ---- a batch

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for a batch."""
        if self._forward is not None:
            return self._forward(model, batch)
        if isinstance(batch, Mapping) and self._accepts is not None:
            return model(**{name: value for name, value in batch.items() if name in self._accepts})
        return call_model(model, batch)

    def target(self, batch: Any) -> Any:
        """What the output is compared with; None if the batch has no such part."""
        if isinstance(batch, Mapping):
            return next((batch[key] for key in TARGET_KEYS if key in batch), None)
        return batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The mean loss over a batch, to be differentiated."""
        if self.has_own_loss:
            own = _own_loss(output)
            assert own is not None
            return own
        target = self.target(batch)
        if self._loss is not None:
            return self._loss(output, batch if target is None else target)
        predicted = prediction(output)
        if self.kind == "regression":
            return F.mse_loss(predicted.reshape(target.shape), target)
        return F.cross_entropy(*_classes_last(predicted, target), ignore_index=IGNORED_LABEL)

    def weight(self, batch: Any) -> int:
        """How much the mean loss of a batch counts beside others: its rows, or tokens that have a label."""
        target = self.target(batch)
        if self.kind != "tokens" or not isinstance(target, Tensor):
            return num_rows(batch)
        counted = target[:, 1:] if self.has_own_loss else target  # models of their own loss predict the next token
        return int((counted != IGNORED_LABEL).sum())

    # ---- the metric

    def tally(self) -> Tally:
        """Adds up the metric, from nothing."""
        if self._metric is not None:
            return _Collected(self._metric)
        if self.kind == "classification":
            return _Accuracy()
        return _ExplainedVariance() if self.kind == "regression" else _LossItself()

    @property
    def adds_up(self) -> bool:
        """True if the metric is added up batch by batch; the user's own needs all rows at once."""
        return self._metric is None

    def scale(self, untrained: Score, guess_loss: float | None) -> MetricScale:
        """What the metric and the loss mean.

        Args:
            untrained: Of the model before training.
            guess_loss: Of predicting the mean of the targets; None where that makes no sense.

        Raises:
            ValueError: Of the user's metric, its best value cannot be told.
        """
        default_loss = self._loss is None
        if self._metric is not None:
            return infer_scale(
                untrained.metric,
                untrained.loss,
                higher_is_better=self._higher_is_better,
                classes=self.classes or UNKNOWN_CLASSES,
            )
        if self.kind == "classification":
            assert self.classes is not None
            return accuracy_scale(self.classes, None if default_loss else max(untrained.loss, 0.0))
        if self.kind == "tokens" and default_loss:
            assert self.classes is not None
            return token_loss_scale(self.classes)
        if self.kind == "regression":
            return r2_scale(untrained.loss if guess_loss is None else guess_loss)
        return infer_scale(untrained.metric, untrained.loss, higher_is_better=False, name="loss")


def prediction(output: Any) -> Any:
    """What a model predicts: its output, or the first floating tensor of it that is no single number."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]
    found = (tensor for _, tensor in tensors(output) if tensor.is_floating_point() and tensor.dim())
    return next(found, None)


def _own_loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _accepted_names(model: nn.Module) -> frozenset[str] | None:
    """Names of the keyword arguments that a model takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _kind(predicted: Any, target: Any) -> str:
    if not isinstance(predicted, Tensor) or not isinstance(target, Tensor):
        return "other"
    if target.is_floating_point():
        same = predicted.numel() == target.numel() and predicted.shape[:1] == target.shape[:1]
        return "regression" if same else "other"
    if target.dtype is torch.bool or predicted.dim() != target.dim() + 1:
        return "other"
    if predicted.shape[:-1] == target.shape:
        return "tokens" if target.dim() > 1 else "classification"
    return "classification" if predicted.shape[:1] + predicted.shape[2:] == target.shape else "other"


def _check_labels(labels: Tensor, classes: int) -> None:
    lowest, highest = (0, 0) if not labels.numel() else (int(labels.min()), int(labels.max()))
    if highest >= classes:
        raise ValueError(f"labels must be below the {classes} classes that the model predicts, got {highest}")
    if lowest < 0:
        raise ValueError(f"labels must be 0 to {classes - 1}, or {IGNORED_LABEL} for none, got {lowest}")


def _class_axis_size(predicted: Tensor, target: Tensor) -> int:
    return predicted.shape[-1] if predicted.shape[:-1] == target.shape else predicted.shape[1]


def _classes_last(predicted: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(predictions [n, classes], targets [n])."""
    if predicted.shape[:-1] != target.shape:
        predicted = predicted.movedim(1, -1)
    return predicted.flatten(0, -2).float(), target.flatten().long()


def _shape_of(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}"
    if isinstance(found, Mapping):
        return f"a dict of {', '.join(map(str, found))}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {len(found)}"
    return type(found).__name__


class _Accuracy:
    """Share of right answers, in percent."""

    def __init__(self) -> None:
        self.hits: Tensor | int = 0
        self.count: Tensor | int = 0

    def add(self, output: Any, target: Any) -> None:
        predicted, labels = _classes_last(prediction(output).detach(), target)
        counted = labels != IGNORED_LABEL
        self.hits = self.hits + ((predicted.argmax(-1) == labels) & counted).sum()
        self.count = self.count + counted.sum()

    def result(self, loss: float) -> float:
        return 100.0 * float(self.hits) / max(1.0, float(self.count))


class _ExplainedVariance:
    """1 minus the squared error over that of the mean target, all outputs together.

    Of targets that are all the same, as scikit-learn has it: 1 if they are predicted exactly, else 0.
    """

    def __init__(self) -> None:
        self.error: Tensor | float = 0.0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.rows = 0

    def add(self, output: Any, target: Any) -> None:
        targets = target.double().reshape(target.shape[0], -1)
        self.error = self.error + (prediction(output).detach().double().reshape(targets.shape) - targets).square().sum()
        self.total = self.total + targets.sum(0)
        self.squares = self.squares + targets.square().sum(0)
        self.rows += targets.shape[0]

    def result(self, loss: float) -> float:
        assert isinstance(self.total, Tensor)
        variance = float((self.squares - self.total.square() / self.rows).sum())
        if variance > 0.0:
            return 1.0 - float(self.error) / variance
        return float(float(self.error) == 0.0)


class _LossItself:
    """The mean loss, which falls."""

    def add(self, output: Any, target: Any) -> None:
        pass

    def result(self, loss: float) -> float:
        return loss


class _Collected:
    """The user's metric, on all rows at once: metrics such as F1 are no means over batches."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def add(self, output: Any, target: Any) -> None:
        self.outputs.append(prediction(output).detach().cpu())
        self.targets.append(target.detach().cpu())

    def result(self, loss: float) -> float:
        return float(self.metric(torch.cat(self.outputs), torch.cat(self.targets)))
