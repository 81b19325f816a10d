"""Seeds for causal sequences: none of them looks at a later token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.base import MIN_VALUES_PER_NORM, Blueprint, NormMinusInput
from esper.kasmina.blueprints.mlp import perceptron
from esper.kasmina.layers import depthwise_over_time, linear
from esper.leyline import SlotSpec

HEADS = 4
TIME_WIDTH = 4


class CausalConv(nn.Module):
    """A depthwise convolution over the last few tokens."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.conv = depthwise_over_time(channels, TIME_WIDTH, generator)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.norm(x).transpose(1, 2), (TIME_WIDTH - 1, 0))
        return F.gelu(self.conv(past).transpose(1, 2))


class CausalAttention(nn.Module):
    """Multi-head attention over all earlier tokens."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.qkv = linear(channels, 3 * channels, generator, bias=False)
        self.out = linear(channels, channels, generator, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, channels = x.shape
        heads = self.qkv(self.norm(x)).view(rows, time, 3, HEADS, channels // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, time, channels))
        return out


def _norm(channels: int, generator: torch.Generator) -> nn.Module:
    return NormMinusInput(nn.LayerNorm(channels))


def _lora(rank: int, channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(channels),
        linear(channels, rank, generator, bias=False),
        linear(rank, channels, generator, bias=False),
    )


def _mlp(factor: int, channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(channels), perceptron(factor * channels, channels, generator))


def _fits(slot: SlotSpec) -> bool:
    return slot.channels >= MIN_VALUES_PER_NORM


def _attention_fits(slot: SlotSpec) -> bool:
    return _fits(slot) and slot.channels % HEADS == 0


TRANSFORMER_BLUEPRINTS: tuple[Blueprint, ...] = (
    Blueprint(
        key="transformer.norm",
        topology="transformer",
        description="layer norm of each token",
        mixing="none",
        nonlinear=True,
        body=_norm,
        params=lambda d: 3 * d,
        macs=lambda d, t: 0,
        fits=_fits,
        control=False,
    ),
    Blueprint(
        key="transformer.lora",
        topology="transformer",
        description="linear map of rank 8",
        mixing="none",
        nonlinear=False,
        body=partial(_lora, 8),
        params=lambda d: 19 * d,
        macs=lambda d, t: 16 * d * t,
        fits=_fits,
        control=False,
    ),
    Blueprint(
        key="transformer.lora_large",
        topology="transformer",
        description="linear map of rank 32",
        mixing="none",
        nonlinear=False,
        body=partial(_lora, 32),
        params=lambda d: 67 * d,
        macs=lambda d, t: 64 * d * t,
        fits=_fits,
        control=False,
    ),
    Blueprint(
        key="transformer.conv_causal",
        topology="transformer",
        description="mix of the last four tokens, per channel",
        mixing="local",
        nonlinear=True,
        body=CausalConv,
        params=lambda d: 8 * d,
        macs=lambda d, t: 4 * d * t,
        fits=_fits,
        control=False,
    ),
    Blueprint(
        key="transformer.attention",
        topology="transformer",
        description="attention over all earlier tokens",
        mixing="global",
        nonlinear=True,
        body=CausalAttention,
        params=lambda d: 4 * d * d + 3 * d,
        macs=lambda d, t: (4 * d * d + 2 * d * t) * t,
        fits=_attention_fits,
        control=False,
    ),
    Blueprint(
        key="transformer.mlp_small",
        topology="transformer",
        description="one hidden layer of twice the width",
        mixing="none",
        nonlinear=True,
        body=partial(_mlp, 2),
        params=lambda d: 4 * d * d + 5 * d,
        macs=lambda d, t: 4 * d * d * t,
        fits=_fits,
        control=False,
    ),
    Blueprint(
        key="transformer.mlp",
        topology="transformer",
        description="one hidden layer of four times the width",
        mixing="none",
        nonlinear=True,
        body=partial(_mlp, 4),
        params=lambda d: 8 * d * d + 7 * d,
        macs=lambda d, t: 8 * d * d * t,
        fits=_fits,
        control=False,
    ),
)
