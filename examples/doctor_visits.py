"""A regression on a table: visits to the doctor in the RAND health insurance experiment, which comes with statsmodels.

    esper compare examples/doctor_visits.py:make_model --data examples/doctor_visits.py:make_data

Needs the extra `evidence`.
"""

from __future__ import annotations

import numpy as np
import torch
from statsmodels.datasets import randhie
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """A layer with a skip around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(self.norm(x)))


def make_model(width: float = 1.0) -> nn.Module:
    """Two residual layers, or the same so many times as wide."""
    size = round(16 * width)
    return nn.Sequential(nn.Linear(9, size), Residual(size), Residual(size), nn.Linear(size, 1))


def make_data() -> tuple[Rows, Rows, Rows]:
    """60 % to train on, 20 % to validate on, 20 % to test on. Columns have mean 0 and variance 1."""
    table = randhie.load_pandas()
    x, y = table.exog.to_numpy(np.float32), np.log1p(table.endog.to_numpy(np.float32)).reshape(-1, 1)
    rows = np.random.default_rng(0).permutation(len(x))
    first, second = int(0.6 * len(x)), int(0.8 * len(x))
    x = (x - x[rows[:first]].mean(0)) / x[rows[:first]].std(0)
    train, val, test = (
        (torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in np.split(rows, [first, second])
    )
    return train, val, test
