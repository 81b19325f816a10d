"""The optimizer formulas against torch in float64, clipping, and state that torch can go on with."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.tolaria.executor.arrays import Learning
from esper.tolaria.executor.seat import Seat
from esper.tolaria.executor.trace import Unsupported
from esper.tolaria.executor.workspace import pack
from esper.tolaria.optim import GrowingOptimizer
from tests.tolaria.executor.harness import (
    batch_norms,
    groups_of,
    no_meters,
    optimizer_of,
    program_of,
    seat_of,
    workspace,
)

KINDS = {"adamw": ("adamw", 0.0), "sgd": ("sgd", 0.9), "sgd without momentum": ("sgd", 0.0)}
NONE = np.zeros(0, np.float32)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4))


def rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(24, 1, 6, 6, generator=generator), torch.randint(0, 4, (24,), generator=generator))
        for _ in range(count)
    ]


def train_exactly(module: nn.Module, kind: str, momentum: float, batches) -> None:
    """Torch's own optimizers, in float64."""
    if kind == "adamw":
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum, weight_decay=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs.double()), targets).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()


def train_torch(module: nn.Module, optimizer: GrowingOptimizer, batches) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimizer.step()


def train_native(module: nn.Module, optimizer: GrowingOptimizer, batches) -> Seat:
    seat = seat_of(module, optimizer)
    program = program_of(module, seat, (1, 6, 6))
    rates = np.array([optimizer.rates("host")])
    workspace().train(
        program,
        seat,
        pack(batches, program.classes),
        scalars=NONE,
        totals=np.zeros((1, 2)),
        meters=no_meters(seat),
        learning=Learning(rates=rates, clip_norm=optimizer.clip_norm),
    )
    seat.publish()
    return seat


def assert_close(module: nn.Module, exact: nn.Module, tolerance: float = 2e-5) -> None:
    for (name, value), other in zip(module.state_dict().items(), exact.state_dict().values(), strict=True):
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(value.double(), other.double(), rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", KINDS)
def test_twelve_batches_as_torch_in_float64(name):
    module = network()
    exact = copy.deepcopy(module).double()
    train_native(module, optimizer_of(module, *KINDS[name]), rows(12))
    train_exactly(exact, *KINDS[name], rows(12))
    assert_close(module, exact)


@pytest.mark.parametrize("name", KINDS)
def test_torch_and_native_may_take_turns(name):
    """Weights, moments, steps and statistics are the same memory, so nothing is lost between them."""
    module = network()
    exact = copy.deepcopy(module).double()
    optimizer, batches = optimizer_of(module, *KINDS[name]), rows(12)
    for start, train in ((0, train_native), (3, train_torch), (6, train_native), (9, train_torch)):
        train(module, optimizer, batches[start : start + 3])
    train_exactly(exact, *KINDS[name], batches)
    assert_close(module, exact)


def test_a_seat_knows_when_its_tensors_were_replaced():
    module = network()
    optimizer = optimizer_of(module)
    seat = train_native(module, optimizer, rows(2))
    assert seat.fits()
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert seat.fits(), "values were copied into place"
    optimizer.load_named_state(copy.deepcopy(optimizer.named_state()))
    assert not seat.fits(), "the optimizer has other tensors"
    seat = seat_of(module, optimizer)
    assert seat.fits()
    optimizer.load_named_state({})
    assert not seat.fits(), "the optimizer has forgotten"
    seat = seat_of(module, optimizer)
    module[1].running_mean.data = torch.zeros(5)
    assert not seat.fits()
    seat = Seat(groups_of(module), batch_norms(module), optimizer, [module[4], None])
    assert seat.fits([module[4], None])
    assert not seat.fits([nn.Linear(80, 4), None]), "another part has come"
    assert not seat.fits([module[4]])


def test_what_cannot_live_in_flat_memory_is_refused_untouched():
    module = network()
    module[1].momentum = None
    with pytest.raises(Unsupported, match="momentum"):
        seat_of(module)
    module = network()
    module[0].weight.requires_grad_(False)
    with pytest.raises(Unsupported, match="frozen"):
        seat_of(module)
    with pytest.raises(Unsupported, match="float64"):
        seat_of(network().double())


def test_rate_and_decay_belong_to_a_group():
    """Only the group whose rate is not zero moves."""
    module = network()
    before = copy.deepcopy(module.state_dict())
    params = dict(module.named_parameters())
    first = {name: param for name, param in params.items() if name.startswith("0")}
    rest = {name: param for name, param in params.items() if name not in first}
    optimizer = optimizer_of(module)
    seat = Seat({"host": first, "rest": rest}, [module[1]], optimizer)
    program = program_of(module, seat, (1, 6, 6))
    workspace().train(
        program,
        seat,
        pack(rows(1), program.classes),
        scalars=NONE,
        totals=np.zeros((1, 2)),
        meters=no_meters(seat),
        learning=Learning(rates=np.array([[0.0, 0.0], [0.01, 0.0]]), clip_norm=optimizer.clip_norm),
    )
    moved = {name[0] for name, value in module.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {"1", "4"}
    assert seat.state.seen.tolist() == [[1, 0], [1, 0]]
