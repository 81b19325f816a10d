"""A small convolutional network as a host. With kernel 1 it is blind: no block sees a pixel's neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.base import Host, HostSpec
from esper.kasmina.layers import conv2d, linear


class ImageInput(nn.Module):
    """Checks the shape of a batch of images before the first convolution sees it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise ValueError(f"expected images [rows, {self.channels}, height, width], got {tuple(x.shape)}")
        return x


class SpatialMean(nn.Module):
    """Mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class CNNHost(Host):
    """Blocks of convolution, batch norm and ReLU, each followed by 2x2 max pooling where asked, then a linear head.

    Slots: `r0c{i}` after block i, `r1c{i}` after its pool. Batch norm stays because group norm and no norm both
    measured worse on these sizes.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        channels: Sequence[int],
        kernel: int,
        pool: Sequence[bool],
        classes: int,
        generator: torch.Generator,
    ) -> None:
        if len(pool) != len(channels) or not channels:
            raise ValueError(f"pool needs one entry per block: {len(channels)} blocks, {len(pool)} entries")
        if kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {kernel}: an even one cannot keep the size of the image")
        segments: list[nn.Module] = []
        slots: dict[str, int] = {}
        width = in_channels
        for column, (size, pooled) in enumerate(zip(channels, pool, strict=True)):
            entry = [ImageInput(in_channels)] if column == 0 else []
            segments.append(
                nn.Sequential(*entry, conv2d(width, size, kernel, generator), nn.BatchNorm2d(size), nn.ReLU())
            )
            slots[f"r0c{column}"] = len(segments) - 1
            if pooled:
                segments.append(nn.MaxPool2d(2))
                slots[f"r1c{column}"] = len(segments) - 1
            width = size
        segments.append(nn.Sequential(SpatialMean(), linear(width, classes, generator)))
        kwargs = {
            "in_channels": in_channels,
            "channels": list(channels),
            "kernel": kernel,
            "pool": list(pool),
            "classes": classes,
        }
        super().__init__("cnn", segments, slots, HostSpec(kind="cnn", kwargs=kwargs))
