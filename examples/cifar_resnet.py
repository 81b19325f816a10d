"""A small ResNet on CIFAR-10. The data is looked for in ./data and where ESPER_CIFAR10 points.

esper compare examples/cifar_resnet.py:make_model --data examples/cifar_resnet.py:make_data
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.runtime.datasets import load_dataset

Rows = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two convolutions and a skip around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        self.skip = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.skip(x))


def stage(channels: int, out: int, stride: int, blocks: int) -> nn.Module:
    """Blocks of the same width, the first of which shrinks the image."""
    return nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """Three stages: with one block in each it has eight layers, with three it has twenty."""

    def __init__(self, width: float, blocks: int = 1) -> None:
        super().__init__()
        first, second, third = (round(times * width) for times in (1, 2, 4))
        self.stem = nn.Sequential(nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        self.layer1 = stage(first, first, 1, blocks)
        self.layer2 = stage(first, second, 2, blocks)
        self.layer3 = stage(second, third, 2, blocks)
        self.head = nn.Linear(third, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer3(self.layer2(self.layer1(self.stem(x))))
        out: Tensor = self.head(h.mean((2, 3)))
        return out


def make_model(width: float = 1.0) -> nn.Module:
    """The model, or one so many times as wide."""
    return ResNet(8 * width)


def make_data() -> tuple[Rows, Rows, Rows]:
    """Training, validation and test images, each channel at mean 0 and variance 1."""
    data = load_dataset("cifar10")
    assert data.mean is not None
    assert data.std is not None
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (data.mean, data.std))
    train, val, test = (
        ((split.inputs.float() - mean) / std, split.targets) for split in (data.train, data.val, data.open_test())
    )
    return train, val, test
