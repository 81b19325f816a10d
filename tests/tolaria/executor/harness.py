"""A module run by the native executor and, in float64, by torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline import OptimSpec
from esper.tolaria.executor.arrays import Meters
from esper.tolaria.executor.program import Program, build_program
from esper.tolaria.executor.seat import Norm, Seat
from esper.tolaria.executor.trace import Trace
from esper.tolaria.executor.workspace import Workspace, pack
from esper.tolaria.optim import GrowingOptimizer


class Do(nn.Module):
    """A function as a module, with parts that learn."""

    def __init__(self, function, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@cache
def workspace() -> Workspace:
    """One for all tests of a process; the first use compiles or loads."""
    return Workspace()


def batch_norms(module: nn.Module) -> list[Norm]:
    return [part for part in module.modules() if isinstance(part, Norm)]


def optimizer_of(module: nn.Module, kind: str = "adamw", momentum: float = 0.0) -> GrowingOptimizer:
    rate = 0.01 if kind == "adamw" else 0.05
    spec = OptimSpec(kind=kind, lr=rate, weight_decay=0.1, momentum=momentum, schedule="constant")
    return GrowingOptimizer(spec, groups_of(module), clip_norm=0.5)


def groups_of(module: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    return {"host": dict(module.named_parameters())}


def seat_of(module: nn.Module, optimizer: GrowingOptimizer | None = None) -> Seat:
    optimizer = optimizer_of(module) if optimizer is None else optimizer
    return Seat(groups_of(module), batch_norms(module), optimizer)


def program_of(module: nn.Module, seat: Seat, shape: Sequence[int], *, training: bool = True) -> Program:
    """The program of one module that ends in logits."""
    trace = Trace(*seat.memory(), training=training)
    tracked = [(norm, norm.num_batches_tracked.clone()) for norm in batch_norms(module)]
    before = module.training
    module.train(training)
    with torch.no_grad():
        trace.loss(module(trace.begin(shape)), 0)
    for norm, count in tracked:
        norm.num_batches_tracked.copy_(count)
    module.train(before)
    return build_program(trace, scalars=0, meters=0, outputs=1)


def no_meters(seat: Seat) -> Meters:
    return Meters(
        eta=np.zeros(0, np.float32),
        group=np.full(len(seat.state.groups), -1, np.int64),
        rho=0.1,
        decay=0.9,
        readings=np.zeros((0, 0, 2), np.float32),
    )


def native_pass(
    module: nn.Module, inputs: Tensor, targets: Tensor, *, training: bool = True
) -> tuple[float, int, dict[str, Tensor]]:
    """(summed loss, hits, gradients of the mean loss) of one batch. Statistics move, weights do not."""
    seat = seat_of(module)
    program = program_of(module, seat, inputs.shape[1:], training=training)
    rows, totals = pack([(inputs, targets)], program.classes), np.zeros((1, 2))
    scalars = np.zeros(0, np.float32)
    if not training:
        workspace().validate(program, seat, rows, scalars=scalars, totals=totals)
        return totals[0, 0], int(totals[0, 1]), {}
    workspace().train(program, seat, rows, scalars=scalars, totals=totals, meters=no_meters(seat))
    flat = torch.from_numpy(workspace().gradients(seat).copy())
    gradients = {
        name: flat[start : start + param.numel()].view(param.shape)
        for (name, param), start in zip(module.named_parameters(), seat.state.tensors[:, 0].tolist(), strict=True)
    }
    return totals[0, 0], int(totals[0, 1]), gradients


def torch_pass(
    module: nn.Module, inputs: Tensor, targets: Tensor, *, training: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[float, int, dict[str, Tensor], nn.Module]:
    """The same by torch, in float64 unless said otherwise, and the module it was done with."""
    exact = copy.deepcopy(module).to(dtype)
    exact.train(training)
    logits = exact(inputs.to(dtype))
    loss = F.cross_entropy(logits, targets, reduction="sum")
    hits = int((logits.argmax(-1) == targets).sum())
    gradients = {}
    if training:
        (loss / len(targets)).backward()
        gradients = {name: param.grad for name, param in exact.named_parameters()}
    return float(loss.detach()), hits, gradients, exact


def assert_same_pass(module: nn.Module, inputs: Tensor, targets: Tensor, tolerance: float = 2e-6) -> None:
    """Training and validation agree with torch: loss, hits, every gradient, running statistics.

    The tolerance is relative to the largest gradient: float32 rounds each of a few thousand terms once. Where terms
    cancel, as in the norm of two channels, rounding is worth more; how much more is what torch errs by in float32.
    """
    loss, hits, gradients, exact = torch_pass(module, inputs, targets)
    rounded = torch_pass(module, inputs, targets, dtype=torch.float32)[2]
    found, found_hits, native = native_pass(module, inputs, targets)
    assert abs(found - loss) <= 1e-5 * max(1.0, abs(loss))
    assert found_hits == hits
    scale = max(1e-3, *(float(grad.abs().max()) for grad in gradients.values()))
    for name, grad in gradients.items():
        usual = float((rounded[name] - grad).abs().max())
        assert float((native[name] - grad).abs().max()) <= max(tolerance * scale, 4.0 * usual), name
    for norm, other in zip(batch_norms(module), batch_norms(exact), strict=True):
        torch.testing.assert_close(norm.running_mean.double(), other.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm.running_var.double(), other.running_var, rtol=1e-5, atol=1e-6)
    loss, hits, _, _ = torch_pass(module, inputs, targets, training=False)
    found, found_hits, _ = native_pass(module, inputs, targets, training=False)
    assert abs(found - loss) <= 1e-5 * max(1.0, abs(loss))
    assert found_hits == hits
