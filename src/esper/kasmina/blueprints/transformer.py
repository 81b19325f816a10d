"""Seeds for causal sequences: none of them looks at a later token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.base import Blueprint
from esper.kasmina.blueprints.mlp import layer_norm_change, layer_norm_fits, perceptron
from esper.kasmina.layers import depthwise_over_time, linear

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


def _lora(rank: int, channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(channels),
        linear(channels, rank, generator, bias=False),
        linear(rank, channels, generator, bias=False),
    )


def _mlp(factor: int, channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(channels), perceptron(factor * channels, channels, generator))


def _lora_row(key: str, rank: int) -> Blueprint:
    return Blueprint(
        key=key,
        mixing="none",
        nonlinear=False,
        body=partial(_lora, rank),
        params=lambda d: (2 * rank + 3) * d,
        macs=lambda d, t: 2 * rank * d * t,
        fits=layer_norm_fits,
    )


def _mlp_row(key: str, factor: int) -> Blueprint:
    return Blueprint(
        key=key,
        mixing="none",
        body=partial(_mlp, factor),
        params=lambda d: 2 * factor * d * d + (factor + 3) * d,
        macs=lambda d, t: 2 * factor * d * d * t,
        fits=layer_norm_fits,
    )


TRANSFORMER_BLUEPRINTS: tuple[Blueprint, ...] = (
    Blueprint(
        key="transformer.norm",
        mixing="none",
        body=layer_norm_change,
        params=lambda d: 3 * d,
        macs=lambda d, t: 0,
        fits=layer_norm_fits,
    ),
    _lora_row("transformer.lora", 8),
    _lora_row("transformer.lora_large", 32),
    Blueprint(
        key="transformer.conv_causal",
        mixing="local",
        body=CausalConv,
        params=lambda d: 8 * d,
        macs=lambda d, t: 4 * d * t,
        fits=layer_norm_fits,
    ),
    Blueprint(
        key="transformer.attention",
        mixing="global",
        body=CausalAttention,
        params=lambda d: 4 * d * d + 3 * d,
        macs=lambda d, t: (4 * d * d + 2 * d * t) * t,
        fits=lambda slot: layer_norm_fits(slot) and slot.channels % HEADS == 0,
    ),
    _mlp_row("transformer.mlp_small", 2),
    _mlp_row("transformer.mlp", 4),
)
