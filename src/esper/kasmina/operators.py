"""How a seed's residual r changes the features x: the output of a slot is always x + alpha * d(x, r).

The features keep weight 1 at every alpha, so the layers before the slot keep their gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.layers import linear


def gate_width(channels: int) -> int:
    """Hidden width of the gate network."""
    return max(4, channels // 4)


def gate_params(channels: int) -> int:
    """Parameters of the gate network."""
    width = gate_width(channels)
    return channels * width + 2 * width + 1


class GateNetwork(nn.Module):
    """One opening in (0, 1) per row, or per token from that token alone."""

    def __init__(self, channels: int, topology: str, generator: torch.Generator) -> None:
        super().__init__()
        self.over_space = topology == "cnn"
        width = gate_width(channels)
        self.inner = linear(channels, width, generator)
        self.outer = linear(width, 1, generator)

    def forward(self, x: Tensor) -> Tensor:
        features = x.mean(dim=(2, 3)) if self.over_space else x
        opening = torch.sigmoid(self.outer(F.gelu(self.inner(features))))
        return opening[:, :, None, None] if self.over_space else opening


def delta(operator: str, x: Tensor, residual: Tensor, gate: GateNetwork | None) -> Tensor:
    """What is added to x at alpha 1."""
    if operator == "add":
        return residual
    if operator == "gate":
        assert gate is not None
        out: Tensor = gate(x) * residual
        return out
    assert operator == "multiply", operator
    # The total factor stays within [0.5, 1.5]: features are scaled, never cut.
    return 0.5 * x * torch.tanh(residual)


def mix(x: Tensor, d: Tensor, alpha: float) -> Tensor:
    """The output of a slot."""
    return x + d if alpha == 1.0 else x + alpha * d
