"""Layers whose weights come from a given generator, and seeding for code that cannot take one.

Plain torch constructors draw from the global generator, which would make a model depend on whatever ran before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

LayerT = TypeVar("LayerT", bound=nn.Module)


def _blank(kind: type[LayerT], *args: Any, **kwargs: Any) -> LayerT:
    """The layer without the draws its constructor would make."""
    layer: LayerT = skip_init(kind, *args, **kwargs)  # type: ignore[no-untyped-call]
    return layer


def generator_for(rng_seed: int) -> torch.Generator:
    """A CPU generator at a given seed."""
    return torch.Generator().manual_seed(rng_seed)


@contextmanager
def seeded(rng_seed: int) -> Iterator[None]:
    """Seeds torch's global generator for the block and puts its state back afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(rng_seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients for the block; every submodule gets its own mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _draw(weight: Tensor, bias: Tensor | None, fan_in: int, generator: torch.Generator) -> None:
    """Torch's own default: uniform within 1/sqrt(fan_in), for weight and bias alike."""
    bound = 1.0 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound, generator=generator)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound, generator=generator)


def linear(inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = True) -> nn.Linear:
    """A linear layer drawn from `generator`."""
    layer = _blank(nn.Linear, inputs, outputs, bias=bias)
    _draw(layer.weight, layer.bias, inputs, generator)
    return layer


def conv2d(
    inputs: int, outputs: int, kernel: int, generator: torch.Generator, *, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """A size-keeping convolution without bias, drawn from `generator`."""
    layer = _blank(
        nn.Conv2d,
        inputs,
        outputs,
        kernel,
        padding=dilation * (kernel // 2),
        dilation=dilation,
        groups=groups,
        bias=False,
    )
    _draw(layer.weight, None, inputs // groups * kernel * kernel, generator)
    return layer


def depthwise_over_time(channels: int, width: int, generator: torch.Generator) -> nn.Conv1d:
    """One filter per channel along time, without padding: the caller pads on the left."""
    layer = _blank(nn.Conv1d, channels, channels, width, groups=channels)
    _draw(layer.weight, layer.bias, width, generator)
    return layer


def norm_groups(channels: int) -> int:
    """Groups of a GroupNorm: about eight channels each, lowered until they divide the channels."""
    groups = max(1, channels // 8)
    while channels % groups:
        groups -= 1
    return groups


def group_norm(channels: int) -> nn.GroupNorm:
    """A GroupNorm with `norm_groups` groups."""
    return nn.GroupNorm(norm_groups(channels), channels)
