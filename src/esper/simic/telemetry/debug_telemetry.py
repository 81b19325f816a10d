"""Detailed statistics of a model after an alarm or at level DEBUG. Reads only: no forward pass, no random draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esper.leyline import THRESHOLDS, LayerGradientStats, NumericalStability, Severity

__all__ = [
    "LayerGradientStats",
    "check_numerical_stability",
    "collect_per_layer_gradients",
    "odd_ratios",
]

LARGE = 10.0
"""Gradient elements beyond this size count as large."""
ClipFactors = Mapping[nn.Parameter, Tensor | float]
"""What clipping multiplied a parameter's gradient by; 1 where the parameter is absent."""
UNCLIPPED: ClipFactors = {}
MAX_RATIOS_LOGGED = 100
"""Odd ratios that go with an alarm; all are counted."""


def collect_per_layer_gradients(model: nn.Module, clip_factors: ClipFactors = UNCLIPPED) -> list[LayerGradientStats]:
    """Statistics of every gradient the model has, as it was before clipping, by one copy from the device."""
    layers = LayerGradients(model, clip_factors)
    return list(layers.stats(layers.numbers().tolist()))  # sync: the one read


class LayerGradients:
    """Statistics of every gradient a model has, as it was before clipping, measured on its device and read later."""

    def __init__(self, model: nn.Module, clip_factors: ClipFactors) -> None:
        named = [(name, _unclipped(p, clip_factors)) for name, p in model.named_parameters() if p.grad is not None]
        self._sizes = [(name, gradient.numel()) for name, gradient in named]
        self._columns = [_column(gradient) for _, gradient in named]

    def numbers(self) -> Tensor:
        """All statistics in one row."""
        return torch.cat(self._columns) if self._columns else torch.zeros(0, dtype=torch.float64)

    def stats(self, values: Sequence[float]) -> tuple[LayerGradientStats, ...]:
        """The statistics, from the numbers as they were read."""
        step = len(values) // max(1, len(self._sizes))
        rows = (values[start : start + step] for start in range(0, len(values), max(1, step)))
        return tuple(_stats(name, size, row) for (name, size), row in zip(self._sizes, rows, strict=True))


def check_numerical_stability(model: nn.Module, clip_factors: ClipFactors = UNCLIPPED) -> NumericalStability:
    """Whether weights, and gradients before clipping, are numbers and how large they are, by one copy."""
    named = list(model.named_parameters())
    gradients = [None if p.grad is None else _unclipped(p, clip_factors) for _, p in named]
    columns = [
        torch.stack([*_extent(p.detach()), *_extent(grad)]) for (_, p), grad in zip(named, gradients, strict=True)
    ]
    rows = torch.stack(columns).tolist() if columns else []  # sync: the one read
    measured = [row[3] for row, (_, p) in zip(rows, named, strict=True) if p.grad is not None]
    return NumericalStability(
        num_tensors=len(named),
        num_nonfinite_weights=int(sum(row[0] for row in rows)),
        num_nonfinite_gradients=int(sum(row[2] for row in rows)),
        max_abs_weight=max((row[1] for row in rows), default=None),
        max_abs_gradient=max(measured, default=None),
        nonfinite_tensors=tuple(name for (name, _), row in zip(named, rows, strict=True) if row[0] or row[2]),
    )


def odd_ratios(ratios_B: Tensor) -> list[float]:
    """Probability ratios beyond the limits of an alarm, the strangest first; what is no number comes before all."""
    low, high = THRESHOLDS["ratio_min"].limit_of(Severity.WARNING), THRESHOLDS["ratio_max"].limit_of(Severity.WARNING)
    odd_B = ratios_B[~((ratios_B >= low) & (ratios_B <= high))]
    distance_B = odd_B.log().abs().nan_to_num(nan=torch.inf)
    return odd_B[distance_B.argsort(descending=True, stable=True)].tolist()  # sync: the one read


def _unclipped(param: nn.Parameter, clip_factors: ClipFactors) -> Tensor:
    assert param.grad is not None
    factor = torch.as_tensor(clip_factors.get(param, 1.0))
    # A norm that is no number leaves nothing, or nothing that means anything.
    return param.grad.detach().double() / torch.where(factor > 0, factor, 1.0)


def _column(gradient: Tensor) -> Tensor:
    """Sum, sum of squares, largest, zeros, large ones, NaNs, infinities; sums are over finite elements."""
    values = gradient.flatten()
    finite = torch.where(values.isfinite(), values, 0.0)
    size = finite.abs()
    parts = [
        finite.sum(),
        finite.square().sum(),
        size.max() if size.numel() else size.sum(),
        (values == 0).sum(),
        (size > LARGE).sum(),
        values.isnan().sum(),
        values.isinf().sum(),
    ]
    return torch.stack([part.double() for part in parts])


def _stats(name: str, num_elements: int, row: Sequence[float]) -> LayerGradientStats:
    total, squares, largest, zeros, large, num_nan, num_inf = row
    num_finite = num_elements - num_nan - num_inf
    mean = total / num_finite if num_finite else 0.0
    variance = squares / num_finite - mean * mean if num_finite else 0.0
    return LayerGradientStats(
        name=name,
        num_elements=num_elements,
        norm=squares**0.5,
        mean=mean,
        std=max(0.0, variance) ** 0.5,
        max_abs=largest,
        zero_share=zeros / num_finite if num_finite else 0.0,
        large_share=large / num_finite if num_finite else 0.0,
        num_nan=int(num_nan),
        num_inf=int(num_inf),
    )


def _extent(values: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many elements are no numbers, and the largest of the others."""
    if values is None or not values.numel():
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    flat = values.detach().double()
    finite = flat.isfinite()
    return (~finite).sum().double(), torch.where(finite, flat, 0.0).abs().max()
