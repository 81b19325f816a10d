"""Seeds for rows of features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.base import MIN_VALUES_PER_NORM, Blueprint, NormMinusInput, always_fits
from esper.kasmina.layers import linear
from esper.leyline import SlotSpec


def lora_rank(channels: int) -> int:
    """Inner width of the low-rank seed."""
    return max(2, channels // 8)


def small_width(channels: int) -> int:
    """Hidden width of the small perceptron seed."""
    return max(4, channels // 2)


def double(channels: int) -> int:
    """Twice the width."""
    return 2 * channels


def quadruple(channels: int) -> int:
    """Four times the width."""
    return 4 * channels


class GLU(nn.Module):
    """A gated linear unit: half of a linear map opens or closes the other half."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = linear(channels, 2 * channels, generator)
        self.outer = linear(channels, channels, generator, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner(x).chunk(2, dim=-1)
        out: Tensor = self.outer(value * torch.sigmoid(gate))
        return out


def _norm(channels: int, generator: torch.Generator) -> nn.Module:
    return NormMinusInput(nn.LayerNorm(channels))


def _lora(channels: int, generator: torch.Generator) -> nn.Module:
    rank = lora_rank(channels)
    return nn.Sequential(linear(channels, rank, generator, bias=False), linear(rank, channels, generator, bias=False))


def perceptron(width: int, channels: int, generator: torch.Generator) -> nn.Sequential:
    """W2 gelu(W1 x + b)."""
    return nn.Sequential(linear(channels, width, generator), nn.GELU(), linear(width, channels, generator, bias=False))


def _perceptron_body(width_of: Callable[[int], int], channels: int, generator: torch.Generator) -> nn.Module:
    return perceptron(width_of(channels), channels, generator)


def _perceptron(key: str, width_of: Callable[[int], int], description: str) -> Blueprint:
    return Blueprint(
        key=key,
        topology="mlp",
        description=description,
        mixing="none",
        nonlinear=True,
        body=partial(_perceptron_body, width_of),
        params=lambda c: 2 * c * width_of(c) + width_of(c) + c,
        macs=lambda c, n: 2 * c * width_of(c) * n,
        fits=always_fits,
        control=False,
    )


def _norm_fits(slot: SlotSpec) -> bool:
    return slot.channels >= MIN_VALUES_PER_NORM


MLP_BLUEPRINTS: tuple[Blueprint, ...] = (
    Blueprint(
        key="mlp.norm",
        topology="mlp",
        description="layer norm of the features",
        mixing="none",
        nonlinear=True,
        body=_norm,
        params=lambda c: 3 * c,
        macs=lambda c, n: 0,
        fits=_norm_fits,
        control=False,
    ),
    Blueprint(
        key="mlp.lora",
        topology="mlp",
        description="low-rank linear map",
        mixing="none",
        nonlinear=False,
        body=_lora,
        params=lambda c: 2 * c * lora_rank(c) + c,
        macs=lambda c, n: 2 * c * lora_rank(c) * n,
        fits=always_fits,
        control=False,
    ),
    _perceptron("mlp.mlp_small", small_width, "one hidden layer of half the width"),
    _perceptron("mlp.mlp", double, "one hidden layer of twice the width"),
    _perceptron("mlp.mlp_wide", quadruple, "one hidden layer of four times the width"),
    Blueprint(
        key="mlp.glu",
        topology="mlp",
        description="gated linear unit",
        mixing="none",
        nonlinear=True,
        body=GLU,
        params=lambda c: 3 * c * c + 3 * c,
        macs=lambda c, n: 3 * c * c * n,
        fits=always_fits,
        control=False,
    ),
)

MLP_CONTROLS: tuple[Blueprint, ...] = (
    Blueprint(
        key="mlp.inert",
        topology="mlp",
        description="costs parameters, changes nothing",
        mixing="none",
        nonlinear=True,
        body=partial(_perceptron_body, double),
        params=lambda c: 4 * c * c + 3 * c,
        macs=lambda c, n: 4 * c * c * n,
        fits=always_fits,
        control=True,
    ),
)
