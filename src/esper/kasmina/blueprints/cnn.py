"""Seeds for images. Convolutions keep the size and have no bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.base import MIN_VALUES_PER_NORM, Blueprint, NormMinusInput, always_fits
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


def _dilated(channels: int, generator: torch.Generator) -> nn.Module:
    return _depthwise(channels, generator, dilation=2)


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


def _norm_sees_enough(channels: int, positions: int) -> bool:
    return channels // norm_groups(channels) * positions >= MIN_VALUES_PER_NORM


def _fits(slot: SlotSpec) -> bool:
    return _norm_sees_enough(slot.channels, slot.positions)


def _bottleneck_fits(slot: SlotSpec) -> bool:
    return _norm_sees_enough(squeeze_width(slot.channels), slot.positions)


def _blueprint(
    name: str,
    description: str,
    mixing: str,
    body: Callable[[int, torch.Generator], nn.Module],
    params: Callable[[int], int],
    macs: Callable[[int, int], int],
    fits: Callable[[SlotSpec], bool] = _fits,
    control: bool = False,
) -> Blueprint:
    return Blueprint(
        key=f"cnn.{name}",
        topology="cnn",
        description=description,
        mixing=mixing,
        nonlinear=True,
        body=body,
        params=params,
        macs=macs,
        fits=fits,
        control=control,
    )


CNN_BLUEPRINTS: tuple[Blueprint, ...] = (
    _blueprint("norm", "group norm of the features", "none", _norm, lambda c: 3 * c, lambda c, n: 0),
    _blueprint(
        "se",
        "rescale channels by a summary of the whole image",
        "global",
        ChannelScale,
        lambda c: 2 * c * squeeze_width(c) + squeeze_width(c) + 2 * c,
        lambda c, n: 2 * c * squeeze_width(c),
        always_fits,
    ),
    _blueprint(
        "pointwise",
        "1x1 convolution",
        "none",
        _pointwise,
        lambda c: c * c + 3 * c,
        lambda c, n: c * c * n,
    ),
    _blueprint(
        "depthwise",
        "3x3 per channel, then 1x1",
        "local",
        _depthwise,
        lambda c: c * c + 12 * c,
        lambda c, n: (c * c + 9 * c) * n,
    ),
    _blueprint(
        "dilated",
        "3x3 per channel over a 5x5 field, then 1x1",
        "local",
        _dilated,
        lambda c: c * c + 12 * c,
        lambda c, n: (c * c + 9 * c) * n,
    ),
    _blueprint(
        "bottleneck",
        "narrow to a quarter, 3x3, widen again",
        "local",
        _bottleneck,
        lambda c: 2 * c * squeeze_width(c) + 9 * squeeze_width(c) ** 2 + 4 * squeeze_width(c) + c,
        lambda c, n: (2 * c * squeeze_width(c) + 9 * squeeze_width(c) ** 2) * n,
        _bottleneck_fits,
    ),
    _blueprint(
        "conv",
        "3x3 convolution",
        "local",
        _conv,
        lambda c: 9 * c * c + 3 * c,
        lambda c, n: 9 * c * c * n,
    ),
    _blueprint(
        "conv_deep",
        "two 3x3 convolutions",
        "local",
        _conv_deep,
        lambda c: 18 * c * c + 5 * c,
        lambda c, n: 18 * c * c * n,
    ),
)

CNN_CONTROLS: tuple[Blueprint, ...] = (
    _blueprint(
        "inert",
        "costs parameters, changes nothing",
        "local",
        _conv,
        lambda c: 9 * c * c + 3 * c,
        lambda c, n: 9 * c * c * n,
        control=True,
    ),
)
