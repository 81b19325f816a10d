"""Seeds for rows of features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.base import MIN_VALUES_PER_NORM, Blueprint, NormMinusInput
from esper.kasmina.layers import linear
from esper.leyline import SlotSpec


def lora_rank(channels: int) -> int:
    """Inner width of the low-rank seed."""
    return max(2, channels // 8)


def small_width(channels: int) -> int:
    """Hidden width of the small perceptron seed."""
    return max(4, channels // 2)


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


def layer_norm_change(channels: int, generator: torch.Generator) -> nn.Module:
    """What a layer norm changes; it has nothing to draw."""
    return NormMinusInput(nn.LayerNorm(channels))


def _lora(channels: int, generator: torch.Generator) -> nn.Module:
    rank = lora_rank(channels)
    return nn.Sequential(linear(channels, rank, generator, bias=False), linear(rank, channels, generator, bias=False))


def perceptron(width: int, channels: int, generator: torch.Generator) -> nn.Sequential:
    """W2 gelu(W1 x + b)."""
    return nn.Sequential(linear(channels, width, generator), nn.GELU(), linear(width, channels, generator, bias=False))


def _perceptron(key: str, width_of: Callable[[int], int], *, control: bool = False) -> Blueprint:
    return Blueprint(
        key=key,
        mixing="none",
        body=lambda c, generator: perceptron(width_of(c), c, generator),
        params=lambda c: 2 * c * width_of(c) + width_of(c) + c,
        macs=lambda c, n: 2 * c * width_of(c) * n,
        control=control,
    )


def layer_norm_fits(slot: SlotSpec) -> bool:
    """True if a layer norm has something to normalise."""
    return slot.channels >= MIN_VALUES_PER_NORM


MLP_BLUEPRINTS: tuple[Blueprint, ...] = (
    Blueprint(
        key="mlp.norm",
        mixing="none",
        body=layer_norm_change,
        params=lambda c: 3 * c,
        macs=lambda c, n: 0,
        fits=layer_norm_fits,
    ),
    Blueprint(
        key="mlp.lora",
        mixing="none",
        nonlinear=False,
        body=_lora,
        params=lambda c: 2 * c * lora_rank(c) + c,
        macs=lambda c, n: 2 * c * lora_rank(c) * n,
    ),
    _perceptron("mlp.mlp_small", small_width),
    _perceptron("mlp.mlp", lambda c: 2 * c),
    _perceptron("mlp.mlp_wide", lambda c: 4 * c),
    Blueprint(
        key="mlp.glu",
        mixing="none",
        body=GLU,
        params=lambda c: 3 * c * c + 3 * c,
        macs=lambda c, n: 3 * c * c * n,
    ),
)

MLP_CONTROLS: tuple[Blueprint, ...] = (_perceptron("mlp.inert", lambda c: 2 * c, control=True),)
