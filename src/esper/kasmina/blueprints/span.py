"""Seeds of spans: a branch beside the layers between two places of a host, which may differ in width and size.

Around a block it adds a second path; to the logits it adds the outputs of a small network of its own, so that a host
widens beyond its narrowest layer. What they share with all seeds, gamma last and zero, makes them invisible at birth.
"""

from __future__ import annotations

from functools import partial

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
)
