"""Seeds of spans: a branch beside the layers between two places of a host, which may differ in width and size.

Around a block it adds a second path; to the logits it adds the outputs of a small network of its own, so that a host
widens beyond its narrowest layer. What they share with all seeds, gamma last and zero, makes them invisible at birth.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from esper.kasmina.blueprints.base import MIN_VALUES_PER_NORM, Blueprint
from esper.kasmina.blueprints.cnn import half_size, norm_relu
from esper.kasmina.hosts import SpatialMean
from esper.kasmina.layers import conv2d, linear
from esper.leyline import SlotSpec, SpanSource


def source_of(slot: SlotSpec) -> SpanSource:
    """What the span reads."""
    assert slot.source is not None
    return slot.source


# ---- images


def image_width(slot: SlotSpec) -> int:
    """Channels of the branch: those of the slot, or enough to tell classes apart where the slot is the logits."""
    source = source_of(slot)
    return max(8, source.channels) if source.stride is None else slot.channels


def _image_branch(deep: bool, slot: SlotSpec, generator: torch.Generator) -> nn.Module:
    source, width = source_of(slot), image_width(slot)
    layers: list[nn.Module] = [conv2d(source.channels, width, 3, generator), *norm_relu(width)]
    stride = source.stride
    if deep:
        if stride is None or stride % 2 == 0:
            layers.append(nn.MaxPool2d(2))
            stride = None if stride is None else stride // 2
        layers += [conv2d(width, width, 3, generator), *norm_relu(width)]
    if stride is None:
        layers += [SpatialMean(), linear(width, slot.channels, generator, bias=False)]
    elif stride > 1:
        layers.append(nn.MaxPool2d(stride))
    return nn.Sequential(*layers)


def _image_params(deep: bool, slot: SlotSpec) -> int:
    source, width = source_of(slot), image_width(slot)
    head = width * slot.channels if source.stride is None else 0
    return 9 * source.channels * width + 2 * width + (9 * width * width + 2 * width) * deep + head + slot.channels


def _image_macs(deep: bool, slot: SlotSpec) -> int:
    source, width = source_of(slot), image_width(slot)
    halves = source.stride is None or source.stride % 2 == 0
    inner = half_size(source.positions) if halves else source.positions
    head = width * slot.channels if source.stride is None else 0
    return 9 * source.channels * width * source.positions + 9 * width * width * inner * deep + head


def _image_fits(deep: bool, slot: SlotSpec) -> bool:
    source = source_of(slot)
    return source.stride != 0 and source.positions >= MIN_VALUES_PER_NORM * (4 if deep else 1)


def _image_span(key: str, *, deep: bool) -> Blueprint:
    return Blueprint(
        key=key,
        mixing="local",
        span=True,
        body=partial(_image_branch, deep),
        params=partial(_image_params, deep),
        macs=partial(_image_macs, deep),
        fits=partial(_image_fits, deep),
    )


# ---- a small network of its own, from an image to the logits

NET_SHARES = {
    "cnn.span_net_small": (0.4, 0.5, 0.5),
    "cnn.span_net": (0.5, 0.6, 0.7),
    "cnn.span_net_wide": (0.8, 1.0, 1.2),
}
"""Widths of the layers, as shares of the number of classes."""
LARGE_NET_SHARES = {
    "cnn.span_net_small": (0.4, 0.7, 0.8, 0.8),
    "cnn.span_net": (0.6, 1.2, 1.5, 1.6),
    "cnn.span_net_wide": (1.0, 2.0, 2.6, 2.6),
}
"""The same for large images, which take one layer and one pool more."""
LARGE_IMAGE = 16
"""Pixels a side of the largest image that is not large."""


def net_widths(key: str, slot: SlotSpec) -> list[int]:
    """Channels of the layers."""
    shares = LARGE_NET_SHARES if source_of(slot).positions > LARGE_IMAGE**2 else NET_SHARES
    return [max(2, round(share * slot.channels)) for share in shares[key]]


def _net(key: str, slot: SlotSpec, generator: torch.Generator) -> nn.Module:
    """All of its layers but the last pool: what a plain network of so few parameters does best with."""
    layers: list[nn.Module] = []
    width, widths = source_of(slot).channels, net_widths(key, slot)
    for number, size in enumerate(widths, start=1):
        pool = [] if number == len(widths) else [nn.MaxPool2d(2)]
        layers += [conv2d(width, size, 3, generator), *norm_relu(size), *pool]
        width = size
    return nn.Sequential(*layers, SpatialMean(), linear(width, slot.channels, generator, bias=False))


def _net_params(key: str, slot: SlotSpec) -> int:
    widths = [source_of(slot).channels, *net_widths(key, slot)]
    layers = sum(9 * before * after + 2 * after for before, after in pairwise(widths))
    return layers + widths[-1] * slot.channels + slot.channels


def _net_macs(key: str, slot: SlotSpec) -> int:
    widths, positions, macs = [source_of(slot).channels, *net_widths(key, slot)], source_of(slot).positions, 0
    for before, after in pairwise(widths):
        macs += 9 * before * after * positions
        positions = half_size(positions)
    return macs + widths[-1] * slot.channels


def _net_fits(slot: SlotSpec) -> bool:
    source = source_of(slot)
    return source.stride is None and source.positions >= 16 * MIN_VALUES_PER_NORM


def _span_net(key: str) -> Blueprint:
    return Blueprint(
        key=key,
        mixing="local",
        span=True,
        body=partial(_net, key),
        params=partial(_net_params, key),
        macs=partial(_net_macs, key),
        fits=_net_fits,
    )


# ---- rows of features


def _row_branch(factor: int, slot: SlotSpec, generator: torch.Generator) -> nn.Module:
    width = factor * slot.channels
    return nn.Sequential(
        linear(source_of(slot).channels, width, generator),
        nn.GELU(),
        linear(width, slot.channels, generator, bias=False),
    )


def _row_span(key: str, factor: int) -> Blueprint:
    def weights(slot: SlotSpec) -> int:
        return factor * slot.channels * (source_of(slot).channels + slot.channels)

    return Blueprint(
        key=key,
        mixing="none",
        span=True,
        body=partial(_row_branch, factor),
        params=lambda slot: weights(slot) + factor * slot.channels + slot.channels,
        macs=weights,
    )


SPAN_BLUEPRINTS: tuple[Blueprint, ...] = (
    _row_span("mlp.span", 1),
    _row_span("mlp.span_wide", 2),
    _image_span("cnn.span", deep=False),
    _image_span("cnn.span_deep", deep=True),
    *map(_span_net, NET_SHARES),
)
