"""Seeds for images. Convolutions keep the size and have no bias."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.base import MIN_VALUES_PER_NORM, Blueprint, NormMinusInput
from esper.kasmina.layers import conv2d, group_norm, linear, norm_groups
from esper.leyline import SlotSpec


def squeeze_width(channels: int) -> int:
    """Inner width of the squeeze-and-excite and bottleneck seeds."""
    return max(4, channels // 4)


class ChannelScale(nn.Module):
    """Squeeze and excite: rescales each channel by what the whole image holds."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        width = squeeze_width(channels)
        self.squeeze = linear(channels, width, generator)
        self.excite = linear(width, channels, generator)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tanh(self.excite(F.gelu(self.squeeze(x.mean(dim=(2, 3))))))
        return x * scale[:, :, None, None]


def _norm(channels: int, generator: torch.Generator) -> nn.Module:
    return NormMinusInput(group_norm(channels))


def norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    """What every convolution here ends in, as in hosts: a body that ends in a bare convolution is almost linear."""
    return nn.BatchNorm2d(channels), nn.ReLU()


def _conv(channels: int, generator: torch.Generator, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(conv2d(channels, channels, kernel, generator), *norm_relu(channels))


def _conv_deep(channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(*_conv(channels, generator), *_conv(channels, generator))


def _depthwise(channels: int, generator: torch.Generator, dilation: int = 1) -> nn.Module:
    return nn.Sequential(
        conv2d(channels, channels, 3, generator, groups=channels, dilation=dilation),
        conv2d(channels, channels, 1, generator),
        *norm_relu(channels),
    )


def _bottleneck(channels: int, generator: torch.Generator) -> nn.Module:
    width = squeeze_width(channels)
    return nn.Sequential(
        conv2d(channels, width, 1, generator),
        *norm_relu(width),
        conv2d(width, width, 3, generator),
        *norm_relu(width),
        conv2d(width, channels, 1, generator),
    )


class HalfSize(nn.Module):
    """A body that sees the image at half its size; what it says of a pixel holds for the four it came from."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        half = F.avg_pool2d(x, [min(2, length) for length in size])
        return F.interpolate(self.body(half), size=size, mode="nearest")


def half_size(positions: int) -> int:
    """Positions of a square image at half its size."""
    return max(1, math.isqrt(positions) // 2) ** 2


def _conv_down(channels: int, generator: torch.Generator) -> nn.Module:
    return HalfSize(_conv(channels, generator))


def _group_norm_fits(slot: SlotSpec) -> bool:
    return slot.channels // norm_groups(slot.channels) * slot.positions >= MIN_VALUES_PER_NORM


def _batch_norm_fits(slot: SlotSpec) -> bool:
    """True if a batch norm has something to normalise even in a batch of one row."""
    return slot.positions >= MIN_VALUES_PER_NORM


CONV = Blueprint(
    key="cnn.conv",
    version=3,
    mixing="local",
    body=_conv,
    params=lambda c: 9 * c * c + 3 * c,
    macs=lambda c, n: 9 * c * c * n,
    fits=_batch_norm_fits,
)
DEPTHWISE = Blueprint(
    key="cnn.depthwise",
    version=3,
    mixing="local",
    body=_depthwise,
    params=lambda c: c * c + 12 * c,
    macs=lambda c, n: (c * c + 9 * c) * n,
    fits=_batch_norm_fits,
)
CNN_BLUEPRINTS: tuple[Blueprint, ...] = (
    Blueprint(
        key="cnn.norm", mixing="none", body=_norm, params=lambda c: 3 * c, macs=lambda c, n: 0, fits=_group_norm_fits
    ),
    Blueprint(
        key="cnn.se",
        mixing="global",
        body=ChannelScale,
        params=lambda c: 2 * c * squeeze_width(c) + squeeze_width(c) + 2 * c,
        macs=lambda c, n: 2 * c * squeeze_width(c),
    ),
    Blueprint(
        key="cnn.pointwise",
        version=3,
        mixing="none",
        body=partial(_conv, kernel=1),
        params=lambda c: c * c + 3 * c,
        macs=lambda c, n: c * c * n,
        fits=_batch_norm_fits,
    ),
    DEPTHWISE,
    replace(DEPTHWISE, key="cnn.dilated", body=partial(_depthwise, dilation=2)),
    Blueprint(
        key="cnn.bottleneck",
        version=3,
        mixing="local",
        body=_bottleneck,
        params=lambda c: 2 * c * squeeze_width(c) + 9 * squeeze_width(c) ** 2 + 4 * squeeze_width(c) + c,
        macs=lambda c, n: (2 * c * squeeze_width(c) + 9 * squeeze_width(c) ** 2) * n,
        fits=_batch_norm_fits,
    ),
    CONV,
    Blueprint(
        key="cnn.conv_deep",
        version=3,
        mixing="local",
        body=_conv_deep,
        params=lambda c: 18 * c * c + 5 * c,
        macs=lambda c, n: 18 * c * c * n,
        fits=_batch_norm_fits,
    ),
)
# Rows that came after the transformers'.
CNN_LATER: tuple[Blueprint, ...] = (
    replace(
        CONV,
        key="cnn.conv_down",
        version=2,
        body=_conv_down,
        macs=lambda c, n: 9 * c * c * half_size(n),
        fits=lambda slot: slot.positions >= 4 * MIN_VALUES_PER_NORM,
    ),
)

CNN_CONTROLS: tuple[Blueprint, ...] = (replace(CONV, key="cnn.inert", control=True),)
