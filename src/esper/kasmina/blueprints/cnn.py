"""Seeds for images. Convolutions keep the size and have no bias."""

from __future__ import annotations

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


def _pointwise(channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(group_norm(channels), nn.ReLU(), conv2d(channels, channels, 1, generator))


def _depthwise(channels: int, generator: torch.Generator, dilation: int = 1) -> nn.Module:
    return nn.Sequential(
        conv2d(channels, channels, 3, generator, groups=channels, dilation=dilation),
        group_norm(channels),
        nn.ReLU(),
        conv2d(channels, channels, 1, generator),
    )


def _bottleneck(channels: int, generator: torch.Generator) -> nn.Module:
    width = squeeze_width(channels)
    return nn.Sequential(
        conv2d(channels, width, 1, generator),
        group_norm(width),
        nn.ReLU(),
        conv2d(width, width, 3, generator),
        group_norm(width),
        nn.ReLU(),
        conv2d(width, channels, 1, generator),
    )


def _conv(channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(group_norm(channels), nn.ReLU(), conv2d(channels, channels, 3, generator))


def _conv_deep(channels: int, generator: torch.Generator) -> nn.Module:
    return nn.Sequential(_conv(channels, generator), _conv(channels, generator))


def _norm_sees_enough(slot: SlotSpec, channels: int | None = None) -> bool:
    """True if a group norm over so many channels (the slot's if None) has something to normalise."""
    channels = slot.channels if channels is None else channels
    return channels // norm_groups(channels) * slot.positions >= MIN_VALUES_PER_NORM


CONV = Blueprint(
    key="cnn.conv",
    mixing="local",
    body=_conv,
    params=lambda c: 9 * c * c + 3 * c,
    macs=lambda c, n: 9 * c * c * n,
    fits=_norm_sees_enough,
)
CNN_BLUEPRINTS: tuple[Blueprint, ...] = (
    Blueprint(
        key="cnn.norm", mixing="none", body=_norm, params=lambda c: 3 * c, macs=lambda c, n: 0, fits=_norm_sees_enough
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
        mixing="none",
        body=_pointwise,
        params=lambda c: c * c + 3 * c,
        macs=lambda c, n: c * c * n,
        fits=_norm_sees_enough,
    ),
    Blueprint(
        key="cnn.depthwise",
        mixing="local",
        body=_depthwise,
        params=lambda c: c * c + 12 * c,
        macs=lambda c, n: (c * c + 9 * c) * n,
        fits=_norm_sees_enough,
    ),
    Blueprint(
        key="cnn.dilated",
        mixing="local",
        body=partial(_depthwise, dilation=2),
        params=lambda c: c * c + 12 * c,
        macs=lambda c, n: (c * c + 9 * c) * n,
        fits=_norm_sees_enough,
    ),
    Blueprint(
        key="cnn.bottleneck",
        mixing="local",
        body=_bottleneck,
        params=lambda c: 2 * c * squeeze_width(c) + 9 * squeeze_width(c) ** 2 + 4 * squeeze_width(c) + c,
        macs=lambda c, n: (2 * c * squeeze_width(c) + 9 * squeeze_width(c) ** 2) * n,
        fits=lambda slot: _norm_sees_enough(slot, squeeze_width(slot.channels)),
    ),
    CONV,
    Blueprint(
        key="cnn.conv_deep",
        mixing="local",
        body=_conv_deep,
        params=lambda c: 18 * c * c + 5 * c,
        macs=lambda c, n: 18 * c * c * n,
        fits=_norm_sees_enough,
    ),
)

CNN_CONTROLS: tuple[Blueprint, ...] = (replace(CONV, key="cnn.inert", control=True),)
