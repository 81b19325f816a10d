"""What a blueprint is, and the rule all of them share: a seed's residual is gamma * f(x), with gamma zero at birth.

With gamma last and zero, birth is an exact identity, gamma has gradient in the first step and everything behind it in
the second. Zeros in front of a norm and a ReLU would never come alive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from esper.kasmina.hosts import CHANNEL_AXIS
from esper.leyline import SlotSpec, record

# A normalisation over fewer values than this has next to nothing to normalise, and its output no gradient.
MIN_VALUES_PER_NORM = 4
GAMMA_SCALE = 10.0
"""What gamma counts for. A step moves it by about the learning rate, so that a short training would else be over before
a seed has its full weight."""


@record
class Blueprint:
    """A recipe for a seed. `key` is a permanent name; the order of registration is the order of the blueprint head."""

    key: str
    """"<topology>.<name>"."""
    version: int = 2
    """Raised when seeds of this key are built otherwise than before: files with older ones are refused."""
    mixing: str
    body: Callable[..., nn.Module]
    """(channels, generator) -> f."""
    params: Callable[..., int]
    """channels -> parameters, gamma included."""
    macs: Callable[..., int]
    """(channels, positions) -> multiply-accumulates per row."""
    span: bool = False
    """True for seeds of spans: body, params and macs are given the slot instead of its channels and positions."""
    fits: Callable[[SlotSpec], bool] = lambda slot: True
    nonlinear: bool = True
    control: bool = False
    """True for seeds that change nothing and exist to test controllers; a task must name them to offer them."""

    @property
    def topology(self) -> str:
        """Of the hosts it grows in."""
        return self.key.partition(".")[0]

    def build(self, slot: SlotSpec, generator: torch.Generator) -> Residual:
        """Makes the seed module."""
        kind = Inert if self.control else Residual
        body = self.body(slot if self.span else slot.channels, generator)
        to_rows = slot.source is not None and slot.source.stride is None
        return kind(body, slot.channels, -1 if to_rows else CHANNEL_AXIS[self.topology])

    def params_in(self, slot: SlotSpec) -> int:
        """Parameters of a seed in a slot, gamma included."""
        return self.params(slot if self.span else slot.channels)

    def macs_in(self, slot: SlotSpec) -> int:
        """Multiply-accumulates per row of a seed in a slot."""
        return self.macs(slot) if self.span else self.macs(slot.channels, slot.positions)

    def fits_in(self, slot: SlotSpec) -> bool:
        """True if a seed can live in a slot of its topology: spans in spans, others elsewhere."""
        return self.span == (slot.source is not None) and self.fits(slot)


class Residual(nn.Module):
    """r(x) = GAMMA_SCALE * gamma * f(x), gamma one value per channel."""

    def __init__(self, body: nn.Module, channels: int, channel_axis: int) -> None:
        super().__init__()
        self.body = body
        self.gamma = nn.Parameter(torch.zeros(channels))
        self.trailing_axes = 0 if channel_axis == -1 else 2

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.body(x))

    def scaled(self, y: Tensor) -> Tensor:
        """GAMMA_SCALE * gamma * y. Tensors that implement it themselves are asked first, as in a slot."""
        if has_torch_function_unary(y):
            return handle_torch_function(Residual.scaled, (y,), self, y)
        return (GAMMA_SCALE * self.gamma).view(-1, *(1,) * self.trailing_axes) * y


class Inert(Residual):
    """Trains like any seed and changes nothing: the negative control, where waiting is the right answer.

    Its output is exactly zero, yet its weights receive gradient, so no gate gives it away. It reads a detached
    input, because otherwise its gradient would reach the host.
    """

    def forward(self, x: Tensor) -> Tensor:
        r = super().forward(x.detach())
        return r - r.detach()


class NormMinusInput(nn.Module):
    """What a normalisation changes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x) - x
        return out
