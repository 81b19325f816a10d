"""Small models of many shapes, as users have them: none knows Esper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SIDE, TIME, VOCABULARY, CLASSES = 12, 8, 9, 24, 5


class BasicBlock(nn.Module):
    """With a skip that is an nn.Identity where shapes allow, and one in-place ReLU that is called twice."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and channels == out
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.skip(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 4, blocks: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._stage(width, width, 1, blocks)
        self.layer2 = self._stage(width, 2 * width, 2, blocks)
        self.layer3 = self._stage(2 * width, 4 * width, 2, blocks)
        self.fc = nn.Linear(4 * width, CLASSES)

    def _stage(self, channels: int, out: int, stride: int, blocks: int) -> nn.Sequential:
        rest = [BasicBlock(out, out, 1) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(channels, out, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))


class SkipMLP(nn.Module):
    """Regression with skips around its layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList([ResidualRow(width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class ResidualRow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.inner(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.gru = nn.GRU(12, 16, batch_first=batch_first)
        self.second = nn.GRU(16, 16, batch_first=batch_first)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        if not self.batch_first:
            h = h.transpose(0, 1)
        h, _ = self.gru(h)
        h, _ = self.second(h)
        return self.head(h[:, -1] if self.batch_first else h[-1])


class TwoInputs(nn.Module):
    """An image and a row of numbers, joined late; it is called with keywords inside."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.row = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.join = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        return self.head(self.join(torch.cat([self.image(image), self.row(input=row)], 1)))


class Chain(nn.Sequential):
    """One thing after the other: what `MorphogeneticModel` can grow too."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 16, CLASSES)
        )


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TIME, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=TIME,
        num_labels=CLASSES,
    )
    return transformers.BertForSequenceClassification(config)


def convnext() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 12], depths=[1, 2], num_stages=2, patch_size=2, image_size=SIDE, num_labels=CLASSES
    )
    return transformers.ConvNextForImageClassification(config)


@dataclass(frozen=True)
class Animal:
    """A model with a batch for it."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    sites: tuple[str, ...]
    """That the finder should choose."""
    loss: Callable[[Any, Any], Tensor]
    """(output, batch) -> mean loss."""

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def batches(self, count: int) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(count)]


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)


def _rows(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 6, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, TIME), generator=generator)


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=generator)


def _cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1])


def _own_loss(output: Any, batch: Any) -> Tensor:
    return output.loss


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


ZOO = {
    "resnet": Animal(ResNet, lambda g: (_images(g), _labels(g)), ("layer1.0", "layer2.0", "layer3.0"), _cross_entropy),
    "gpt2": Animal(gpt2, _text, ("transformer.h.0", "transformer.h.1", "transformer.h.2"), _own_loss),
    "bert": Animal(
        bert,
        lambda g: {"input_ids": _tokens(g), "attention_mask": torch.ones(ROWS, TIME), "labels": _labels(g)},
        ("bert.encoder.layer.0", "bert.encoder.layer.1", "bert.encoder.layer.2"),
        _own_loss,
    ),
    "convnext": Animal(
        convnext,
        lambda g: {"pixel_values": _images(g), "labels": _labels(g)},
        (
            "convnext.encoder.stages.0.layers.0",
            "convnext.encoder.stages.1.layers.0",
            "convnext.encoder.stages.1.layers.1",
        ),
        _own_loss,
    ),
    "mlp": Animal(
        SkipMLP,
        lambda g: ((rows := _rows(g)), rows.square().sum(1, keepdim=True)),
        ("blocks.0", "blocks.1", "blocks.2"),
        lambda output, batch: F.mse_loss(output, batch[1]),
    ),
    "gru": Animal(Recurrent, lambda g: (_tokens(g), _labels(g)), ("embedding", "gru", "second"), _cross_entropy),
    "gru_time_first": Animal(
        lambda: Recurrent(batch_first=False),
        lambda g: (_tokens(g), _labels(g)),
        ("embedding", "gru", "second"),
        _cross_entropy,
    ),
    "two_inputs": Animal(
        TwoInputs,
        lambda g: (_images(g), _rows(g), _labels(g)),
        ("image.1", "image.3", "row.1"),
        _cross_entropy,
    ),
}
