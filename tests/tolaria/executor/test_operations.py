"""Every native operation against autograd in float64, alone and composed, on any size and any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.tolaria.executor.harness import Do, assert_same_pass

CLASSES = 3


class Between(nn.Module):
    """Something between a layer that needs its gradient and a head."""

    def __init__(self, channels: int, body: nn.Module, *, space: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels, 1) if space else nn.Linear(5, channels)
        self.body = body
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)).flatten(1))


def check(module: nn.Module, rows: int, size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        module(torch.zeros(2, *size))  # sizes what is sized by its first batch
    for param in module.parameters():
        spread = 0.5 if param.dim() == 1 else param[0].numel() ** -0.5
        param.data = spread * torch.randn(param.shape, generator=generator) + 0.1 * spread
    inputs = torch.randn((rows, *size), generator=generator)
    assert_same_pass(module, inputs, torch.randint(0, CLASSES, (rows,), generator=generator))


def image(channels: int, body: nn.Module, rows: int = 20, size: int = 6) -> None:
    check(Between(channels, body, space=True), rows, (2, size, size))


def features(channels: int, body: nn.Module, rows: int = 20) -> None:
    check(Between(channels, body, space=False), rows, (5,))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_convolutions_of_any_kind(data):
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, outs = groups * draw(st.integers(1, 6)), groups * draw(st.integers(1, 9))
    kernel, dilation = draw(st.sampled_from([1, 3, 3, 2, 5])), draw(st.integers(1, 2))
    reach = dilation * (kernel - 1)
    conv = nn.Conv2d(
        channels,
        outs,
        kernel,
        stride=draw(st.integers(1, 3)),
        padding=draw(st.integers(0, reach)),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    image(channels, conv, rows=draw(st.integers(2, 150)), size=draw(st.integers(reach + 1, reach + 5)))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 30), st.booleans(), st.integers(2, 150))
def test_linear_layers(ins, outs, bias, rows):
    features(ins, nn.Linear(ins, outs, bias=bias), rows)


@settings(max_examples=20)
@given(st.integers(1, 9), st.booleans(), st.booleans(), st.integers(2, 150), st.integers(1, 6))
def test_batch_norms_with_and_without_relu(channels, relu, affine, rows, size):
    norm = nn.BatchNorm2d(channels, affine=affine, momentum=0.3, eps=1e-3)
    image(channels, nn.Sequential(norm, nn.ReLU()) if relu else norm, rows, size)


@settings(max_examples=10)
@given(st.integers(1, 20), st.integers(4, 100))
def test_batch_norms_of_features(channels, rows):
    features(channels, nn.BatchNorm1d(channels), rows)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(2, 150), st.integers(2, 6))
def test_group_norms_with_and_without_relu(groups, per, relu, affine, rows, size):
    channels = groups * per
    norm = nn.GroupNorm(groups, channels, affine=affine)
    image(channels, nn.Sequential(norm, nn.ReLU()) if relu else norm, rows, size)


@example(channels=2, affine=False, rows=34)
@settings(max_examples=10)
@given(st.integers(2, 40), st.booleans(), st.integers(2, 100))
def test_layer_norms(channels, affine, rows):
    features(channels, nn.LayerNorm(channels, elementwise_affine=affine), rows)


@pytest.mark.parametrize("function", [torch.relu, F.gelu, torch.tanh, torch.sigmoid, F.silu])
@pytest.mark.parametrize("rows", [7, 64, 130])
def test_activations(function, rows):
    features(9, Do(lambda self, x: function(3.0 * x)), rows)


@pytest.mark.parametrize("function", [torch.relu, F.gelu, torch.tanh, torch.sigmoid, F.silu])
def test_activations_over_their_whole_range(function):
    x = torch.linspace(-30.0, 30.0, 512 * 9).view(512, 9)
    for scale in (1.0, 0.1, 1e-3):
        module = nn.Sequential(Do(lambda self, x, scale=scale: function(scale * x)), nn.Linear(9, CLASSES))
        assert_same_pass(module, x, torch.zeros(512, dtype=torch.int64))


ARITHMETIC = {
    "numbers": lambda self, x: (1.0 - (0.5 * x + 0.25)) / 4 - 2,
    "sum": lambda self, x: x + self.conv(x),
    "difference": lambda self, x: self.conv(x) - 0.3 * x,
    "itself": lambda self, x: x * x + x,
    "gain": lambda self, x: self.gain.view(-1, 1, 1) * self.conv(x),
    "gain and mix": lambda self, x: x + self.gain.view(-1, 1, 1) * self.conv(x),
    "shift": lambda self, x: self.conv(x) + self.gain.view(1, -1, 1, 1),
    "product": lambda self, x: 0.5 * x * torch.tanh(self.conv(x)),
    "channel gate": lambda self, x: x * torch.sigmoid(self.conv(x).mean(dim=(2, 3)))[:, :, None, None],
    "channel gate, kept axes": lambda self, x: torch.tanh(self.conv(x).mean((2, 3), keepdim=True)) * x,
    "row gate": lambda self, x: torch.sigmoid(self.one(x.mean(dim=(2, 3))))[:, :, None, None] * x,
    "halves": lambda self, x: (lambda a, b: torch.cat([a * torch.sigmoid(b), a], 1))(*self.conv(x).chunk(2, dim=1)),
    "parts": lambda self, x: torch.cat([x[:, 2:], x[:, :2]], dim=1),
    "no gradient": lambda self, x: self.conv(x.detach()) + x,
    "nothing": lambda self, x: x + (lambda r: r - r.detach())(self.conv(x)),
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("rows", [5, 64])
def test_arithmetic(name, rows):
    parts = {
        "conv": nn.Conv2d(4, 4, 3, padding=1),
        "gain": nn.Parameter(torch.zeros(4)),
        "one": nn.Linear(4, 1),
    }
    text = ARITHMETIC[name].__code__.co_names
    image(4, Do(ARITHMETIC[name], **{key: part for key, part in parts.items() if key in text}), rows)


POOLS = {
    "max": nn.MaxPool2d(2),
    "max of an odd size": nn.MaxPool2d(4),
    "max, overlapping": nn.MaxPool2d(3, stride=2, padding=1),
    "max with gaps": nn.MaxPool2d(1, stride=2),
    "max, rounded up": nn.MaxPool2d(2, ceil_mode=True),
    "max, rounded up, with padding": nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    "crop": Do(lambda self, x: x[:, :, 1:4, :5]),
    "every other": Do(lambda self, x: x[:, :, ::2, 1::2]),
    "mean": nn.AvgPool2d(2),
    "mean, overlapping": nn.AvgPool2d(3, stride=1),
    "up": nn.Upsample(scale_factor=2),
    "up to a size": Do(lambda self, x: F.interpolate(x, size=(9, 13))),
    "down and up": nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.Upsample(scale_factor=2)),
    "global": Do(lambda self, x: F.adaptive_avg_pool2d(x, 1)),
    "residual pair": Do(
        lambda self, x: x + F.interpolate(self.conv(F.max_pool2d(x, 2)), size=x.shape[2:]), conv=nn.Conv2d(4, 4, 1)
    ),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(("rows", "size"), [(5, 6), (70, 7)])
def test_pixels(name, rows, size):
    image(4, POOLS[name], rows, size)


def test_a_flattened_image_is_a_row_of_features():
    check(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, CLASSES)), 20, (2, 6, 6))


def test_largest_value_that_occurs_twice_gets_its_gradient_once():
    """As in torch: the first one takes it all."""
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES))
    inputs = torch.zeros(6, 2, 4, 4)
    inputs[:, :, ::2] = 1.0
    assert_same_pass(module, inputs, torch.arange(6) % CLASSES)
