"""Any model that runs its parts in order becomes a host, or the error says which part does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import wrap_sequential
from esper.kasmina.layers import seeded
from esper.leyline import SeedStage
from tests.growing import bits, grow_to, make_batches, run_bits, start

IMAGES = make_batches("cnn")[0][0]
ROWS = make_batches("mlp")[0][0]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with seeded(3):
        return build()


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class Named(nn.Module):
    """A model with a forward of its own over named parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.act = nn.ReLU()
        self.head = nn.Linear(8, 4)
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.first(x)))
        return out


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.segments = nn.ModuleList([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.segments:
            x = part(x)
        return x


def test_a_wrapped_sequential_gives_the_same_bits_and_grows() -> None:
    model = made(convnet).eval()
    host = wrap_sequential(model, {"r0c0": 2}, "cnn", IMAGES)
    with torch.no_grad():
        assert bits(host(IMAGES)) == bits(model(IMAGES))
    run = start("cnn", host=host)
    grow_to(run, "r0c0", "FOSSILIZED", "cnn.conv")
    assert run.model.slot("r0c0").stage is SeedStage.FOSSILIZED


@pytest.mark.parametrize(
    ("build", "segments"), [(Listed, None), (Named, ["first", "act", "head"])], ids=["listed", "named"]
)
def test_models_with_their_own_forward_are_wrapped(build: Callable[[], nn.Module], segments: list[str] | None) -> None:
    model = made(build)
    host = wrap_sequential(model, {"r0c0": 1}, "mlp", ROWS, segments=segments)
    with torch.no_grad():
        assert bits(host(ROWS)) == bits(model(ROWS))


def test_a_part_used_twice_runs_twice() -> None:
    act = nn.ReLU()
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 4)))
    host = wrap_sequential(model, {"r0c0": 1, "r0c1": 3}, "mlp", ROWS)
    assert len(host.segments) == 5
    with torch.no_grad():
        assert bits(host(ROWS)) == bits(model(ROWS))


def test_stochastic_layers_follow_the_seeded_generator() -> None:
    results = []
    for _ in range(2):
        run = start("cnn", host=wrap_sequential(made(convnet), {"r0c0": 2}, "cnn", IMAGES))
        with seeded(4):
            grow_to(run, "r0c0", "TRAINING", "cnn.conv")
        results.append(run_bits(run))
    assert results[0] == results[1]


# ---- refusals


class Between(Named):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(2 * self.first(x)))
        return out


class After(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(-1)


class Twice(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class OverwritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


class NeedsTwoRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise RuntimeError("too few rows")
        return x


class WidthFollowsRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x] * min(len(x), 2), dim=1)


class Squeezes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


class SumsUp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1, keepdim=True)


NAMED = ["first", "act", "head"]


@pytest.mark.parametrize(
    ("build", "segments", "message"),
    [
        (Between, NAMED, r"differs from the model at segment 1 \(act\)"),
        (After, NAMED, "does something after its last segment"),
        (Twice, NAMED, "does something after its last segment"),
        (Named, [*NAMED[:2], "spare", "head"], r"segment 2 \(spare\) is not used by the model's own forward"),
        (Named, ["first", "head", "act"], r"differs from the model at segment 1 \(head\)"),
        (Named, ["first", "gone", "head"], r"no submodule 'gone'. Known: first, act, head, spare"),
        (Named, None, r"Named is no nn.Sequential and has no `segments`"),
        (lambda: nn.Sequential(nn.Identity(), OverwritesInput(), nn.Linear(6, 4)), None, r"segment 1 \(1\) overwrites"),
        (lambda: nn.Sequential(nn.Identity(), NeedsTwoRows(), nn.Linear(6, 4)), None, r"does not run on 1 row"),
        (lambda: nn.Sequential(nn.LSTM(6, 8), nn.Identity(), nn.Identity()), None, r"segment 0 \(0\) gives a tuple"),
        (lambda: nn.Sequential(nn.Identity(), WidthFollowsRows(), SumsUp()), None, "channels change with the batch"),
        (lambda: nn.Sequential(nn.Identity(), Squeezes(), nn.Linear(6, 4)), None, "needs a float tensor with 2 axes"),
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.Identity(), nn.Identity()), None, r"segment 0 \(0\) cannot run on"),
    ],
)
def test_what_cannot_be_a_host_is_named(
    build: Callable[[], nn.Module], segments: list[str] | None, message: str
) -> None:
    model, sample = made(build), ROWS.clone()
    with pytest.raises(ValueError, match=message):
        wrap_sequential(model, {"r0c0": 1}, "mlp", sample, segments=segments)
    assert model.training
    assert bits(sample) == bits(ROWS)


def test_a_slot_needs_the_axes_of_its_topology() -> None:
    with pytest.raises(ValueError, match=r"slot r0c0: a cnn slot needs a float tensor with 4 axes"):
        wrap_sequential(made(Listed), {"r0c0": 1}, "cnn", ROWS)
    with pytest.raises(ValueError, match="two rows, got 1"):
        wrap_sequential(made(Listed), {"r0c0": 1}, "mlp", ROWS[:1])


def test_wrapping_leaves_no_hooks_and_no_changed_mode() -> None:
    model = made(convnet)
    parts = dict(model.named_children())
    parts["1"].eval()
    wrap_sequential(model, {"r0c0": 2}, "cnn", IMAGES)
    assert parts["0"].training
    assert not parts["1"].training
    assert not any(part._forward_hooks for part in model.modules())


def test_coalitions_survive_layers_that_asked_to_work_in_place() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Linear(8, 4))

    run = start("mlp", host=wrap_sequential(made(build), {"r0c0": 0, "r0c1": 1}, "mlp", ROWS))
    grow_to(run, "r0c0", "HOLDING", "mlp.glu")
    grow_to(run, "r0c1", "HOLDING", "mlp.glu")
    run.model.eval()
    coalitions = [frozenset({"r0c0", "r0c1"}), frozenset({"r0c0"}), frozenset()]
    together = run.model.forward_coalitions(ROWS, coalitions)
    for coalition, out in zip(coalitions, together, strict=True):
        assert bits(run.model.forward_coalitions(ROWS, [coalition])[0]) == bits(out)
