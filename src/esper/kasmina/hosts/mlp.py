"""A multilayer perceptron as a host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.base import Host, HostSpec
from esper.kasmina.layers import linear


class FeatureInput(nn.Module):
    """Flattens each row and checks its length, so a wrong data set fails here with a clear message."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise ValueError(f"expected rows of {self.features} features, got {tuple(x.shape)}")
        rows = x.flatten(1)
        if rows.shape[1] != self.features:
            raise ValueError(f"expected {self.features} features per row, got {rows.shape[1]} (input {tuple(x.shape)})")
        return rows


class MLPHost(Host):
    """Linear layers with ReLU. Slots: the input features if asked for, then one after each hidden layer."""

    def __init__(
        self, *, inputs: int, hidden: Sequence[int], classes: int, input_slot: bool, generator: torch.Generator
    ) -> None:
        segments: list[nn.Module] = [FeatureInput(inputs)]
        width = inputs
        for size in hidden:
            segments.append(nn.Sequential(linear(width, size, generator), nn.ReLU()))
            width = size
        segments.append(linear(width, classes, generator))
        after = range(0 if input_slot else 1, len(segments) - 1)
        slots = {f"r0c{column}": index for column, index in enumerate(after)}
        kwargs = {"inputs": inputs, "hidden": list(hidden), "classes": classes, "input_slot": input_slot}
        super().__init__("mlp", segments, slots, HostSpec(kind="mlp", kwargs=kwargs))
