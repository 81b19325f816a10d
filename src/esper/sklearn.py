"""Growing networks as scikit-learn estimators: they clone, search, pipe and score as others do.

    from esper.sklearn import GrowingClassifier
    GrowingClassifier(budget=20_000).fit(x, y).score(test_x, test_y)

Needs the extra `sklearn`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from esper.growth import grow
from esper.growth.controllers import Controller
from esper.growth.training import DEFAULT_LR
from esper.kasmina.layers import seeded

HIDDEN = 32
"""Width of the network that is grown where the user gives none."""
PREDICT_ROWS = 4096

MakeModel = Callable[[int, int], nn.Module]
"""(features, outputs) -> network."""


class _Growing(BaseEstimator):  # type: ignore[misc]
    """What both estimators do alike."""

    def __init__(
        self,
        model: nn.Module | MakeModel | None = None,
        *,
        budget: int | None = None,
        epochs: int = 30,
        lr: float = DEFAULT_LR,
        batch_size: int = 64,
        validation_fraction: float = 0.2,
        controller: Controller = None,
        random_state: int | np.random.RandomState | None = 0,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.budget = budget
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.controller = controller
        self.random_state = random_state
        self.verbose = verbose

    def _make(self, features: int, outputs: int, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        with seeded(seed):
            return small_network(features, outputs) if self.model is None else self.model(features, outputs)

    def _fit(self, x: NDArray[Any], y: NDArray[Any], outputs: int, stratify: NDArray[Any] | None) -> None:
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must be in (0, 1), got {self.validation_fraction}")
        state = self.random_state
        seed = state if isinstance(state, int) else int(check_random_state(state).randint(2**31))
        parts = train_test_split(x, y, test_size=self.validation_fraction, random_state=seed, stratify=stratify)
        train_x, val_x, train_y, val_y = map(torch.as_tensor, parts)
        self.model_ = self._make(x.shape[1], outputs, seed)
        self.result_ = grow(
            self.model_,
            (train_x, train_y),
            (val_x, val_y),
            budget=self.budget,
            epochs=self.epochs,
            controller=self.controller,
            optimizer=lambda params: torch.optim.AdamW(params, lr=self.lr),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs),
            batch_size=self.batch_size,
            seed=seed,
            verbose=self.verbose,
        )

    def _outputs(self, x: Any) -> Tensor:
        check_is_fitted(self)
        rows = torch.as_tensor(validate_data(self, x, dtype=np.float32, reset=False))
        self.model_.eval()
        with torch.inference_mode():
            return torch.cat([self.model_(part) for part in rows.split(PREDICT_ROWS)])  # type: ignore[no-untyped-call]


class GrowingClassifier(ClassifierMixin, _Growing):  # type: ignore[misc]
    """A network that grows while it is fitted, for classes.

    Args:
        model: A module, of which a copy is fitted; a function (features, classes) -> module; or None for a small
            multilayer perceptron.
        budget: Most parameters the network and what grows in it may have; None for no limit.
        epochs: Passes over the training rows.
        lr: Learning rate of AdamW at the start; it falls along a cosine.
        batch_size: Rows of a batch.
        validation_fraction: Share of the rows on which is decided what grows.
        controller: Who decides; see `esper.grow`.
        random_state: Decides initial weights, the split, the order of rows and the weights of what grows.
        verbose: Show progress.

    Attributes:
        model_: The grown network.
        result_: The `GrowthResult`.
        classes_: Labels in the order of the network's outputs.
    """

    def fit(self, X: Any, y: Any) -> GrowingClassifier:
        """Fits the network and grows it."""
        x, labels = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(labels)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least two classes, got {len(self.classes_)} class")
        self._fit(x, targets.astype(np.int64), len(self.classes_), targets)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Probabilities, one column per class."""
        found: NDArray[np.float32] = self._outputs(X).softmax(1).numpy()
        return found

    def predict(self, X: Any) -> NDArray[Any]:
        """The most likely class of every row."""
        positions = self._outputs(X).argmax(1).numpy()
        found: NDArray[Any] = self.classes_[positions]
        return found


class GrowingRegressor(RegressorMixin, _Growing):  # type: ignore[misc]
    """A network that grows while it is fitted, for numbers. Arguments are those of `GrowingClassifier`.

    Targets are brought to mean 0 and variance 1 for training.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> GrowingRegressor:
        """Fits the network and grows it."""
        x, targets = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        rows = np.asarray(targets, dtype=np.float64).reshape(len(targets), -1)
        self._mean, spread = rows.mean(0), rows.std(0)
        self._spread = np.where(spread > 0.0, spread, 1.0)
        self._is_flat = np.ndim(targets) == 1
        scaled = ((rows - self._mean) / self._spread).astype(np.float32)
        self._fit(x, scaled, rows.shape[1], None)
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The expected target of every row."""
        found: NDArray[np.float64] = self._outputs(X).double().numpy() * self._spread + self._mean
        return found[:, 0] if self._is_flat else found


def small_network(features: int, outputs: int) -> nn.Module:
    """A perceptron with two hidden layers, after each of which something can grow."""
    return nn.Sequential(
        nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )
