"""Scratch memory of a worker and the one door to compiled code. What belongs to a network is a `Seat`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import record
from esper.tolaria.executor import ops as o
from esper.tolaria.executor.program import Program, loss_floats
from esper.tolaria.executor.seat import Seat


@record
class Rows:
    """Batches as compiled code reads them: [batch, value, row], rows padded with zeros."""

    inputs: NDArray[np.float32]
    targets: NDArray[np.int64]
    counts: NDArray[np.int64]
    """Rows of each batch that are no padding."""

    def __len__(self) -> int:
        return len(self.inputs)


def pack(batches: Sequence[tuple[Tensor, Tensor]], classes: int) -> Rows:
    """Lays (inputs, targets) out for compiled code. All inputs must have the same shape but for their rows.

    Raises:
        ValueError: A target is no class.
    """
    counts = np.array([len(targets) for _, targets in batches], np.int64)
    padded = -(-int(counts.max()) // o.LANES) * o.LANES
    values = batches[0][0][0].numel()
    inputs = torch.zeros(len(batches), values, padded)
    targets = torch.zeros(len(batches), padded, dtype=torch.int64)
    for index, (rows, labels) in enumerate(batches):
        inputs[index, :, : len(rows)] = rows.reshape(len(rows), -1).t()
        targets[index, : len(rows)] = labels
    found = Rows(inputs=inputs.numpy(), targets=targets.numpy(), counts=counts)
    low, high = found.targets.min(), found.targets.max()
    if low < 0 or high >= classes:
        raise ValueError(f"targets must be in 0..{classes - 1}, got {low}..{high}")
    return found


@record
class Learning:
    """How a network is updated; one entry of `rates` per group of its seat."""

    rates: NDArray[np.float64]
    """(learning rate, weight decay)."""
    clip_norm: float


@record
class Meters:
    """Training seeds of one network."""

    eta: NDArray[np.float32]
    """Step size of each; below zero before its first batch, NaN while there was no gradient to get one from. Moves."""
    group: NDArray[np.int64]
    """By group of the seat: its meter, or -1."""
    rho: float
    decay: float
    books: NDArray[np.float32]
    """[batch, meter, (objective, residual ratio)]; as it was where the seed only listened. Filled."""


class Workspace:
    """Scratch that all networks of a worker use in turns. It grows and never shrinks."""

    def __init__(self) -> None:
        from esper.tolaria.executor.kernels import make_ready, run

        make_ready()
        self._compiled = run
        self._floats: dict[str, NDArray[np.float32]] = {}

    def room(self, name: str, size: int) -> NDArray[np.float32]:
        """At least `size` floats, whatever is in them."""
        found = self._floats.get(name)
        if found is None or len(found) < size:
            found = self._floats[name] = torch.zeros(max(size, 16)).numpy()  # torch aligns memory to cache lines
        return found

    def gradients(self, seat: Seat) -> NDArray[np.float32]:
        """Where the gradients of the last training batch are, laid out as the seat's parameters."""
        return self.room("gradients", seat.params.size)

    def train(
        self,
        program: Program,
        seat: Seat,
        rows: Rows,
        *,
        scalars: NDArray[np.float32],
        totals: NDArray[np.float64],
        meters: Meters,
        learning: Learning | None,
    ) -> None:
        """Trains on all batches, in order. Without `learning` only gradients are computed; statistics move."""
        assert program.training
        self._run(program, seat, rows, scalars, totals, meters, learning)

    def validate(
        self, program: Program, seat: Seat, rows: Rows, *, scalars: NDArray[np.float32], totals: NDArray[np.float64]
    ) -> None:
        """Adds losses and hits of all rows to the totals."""
        assert not program.training
        self._run(program, seat, rows, scalars, totals, NO_METERS, None)

    def _run(
        self,
        program: Program,
        seat: Seat,
        rows: Rows,
        scalars: NDArray[np.float32],
        totals: NDArray[np.float64],
        meters: Meters,
        learning: Learning | None,
    ) -> None:
        _check_call(program, seat, rows, scalars, totals, meters, learning)
        padded = rows.inputs.shape[2]
        values = program.values * padded
        frame = max(program.frame_values * padded, loss_floats(program.op_list[:, o.OUT].max()))
        gradients = self.gradients(seat) if program.training else self.room("nothing", 16)
        gradients[: seat.params.size] = 0.0
        self._compiled(
            program.training,
            learning is not None,
            program.op_list,
            program.consts,
            scalars,
            rows.inputs,
            rows.targets,
            rows.counts,
            totals,
            self.room("activations", values),
            self.room("activation gradients", values if program.training else 16),
            self.room("saved", program.saved),
            self.room("frame", frame),
            seat.params,
            seat.stats,
            gradients,
            seat.first_moments,
            seat.second_moments,
            seat.steps,
            seat.tensors,
            seat.groups,
            NO_RATES if learning is None else learning.rates,
            seat.norms,
            seat.seen,
            np.float32(0.0 if learning is None else learning.clip_norm),
            seat.optimizer_kind,
            seat.hyper,
            meters.eta,
            meters.group,
            np.float32(meters.rho),
            np.float32(meters.decay),
            meters.books,
        )


NO_RATES = np.zeros((0, 2))
NO_METERS = Meters(
    eta=np.zeros(0, np.float32),
    group=np.full(64, -1, np.int64),
    rho=0.0,
    decay=0.0,
    books=np.zeros((0, 0, 2), np.float32),
)


def _check_call(
    program: Program,
    seat: Seat,
    rows: Rows,
    scalars: NDArray[np.float32],
    totals: NDArray[np.float64],
    meters: Meters,
    learning: Learning | None,
) -> None:
    """The sizes that the program was checked against are the sizes that are there."""
    batches, values, padded = rows.inputs.shape
    wanted = {
        "values of a row": (values, program.input_values),
        "padding": (padded % o.LANES, 0),
        "targets": (rows.targets.shape, (batches, padded)),
        "parameters": (seat.params.size, program.params),
        "statistics": (seat.stats.size, program.stats),
        "scalars": (scalars.shape, (program.scalars,)),
        "totals": (totals.shape, (program.outputs, 2)),
        "meters": (meters.eta.shape, (program.meters,)),
    }
    if program.training:
        wanted["groups with meters"] = (meters.group.shape, (len(seat.groups),))
        if program.meters:
            wanted["books"] = (meters.books.shape, (batches, program.meters, 2))
    if learning is not None:
        wanted["rates"] = (learning.rates.shape, (len(seat.groups), 2))
    for what, (got, expected) in wanted.items():
        if got != expected:
            raise ValueError(f"{what}: the program needs {expected}, got {got}")
    if rows.counts.min() < 1 or rows.counts.max() > padded:
        raise ValueError(f"batches of {rows.counts.min()} to {rows.counts.max()} rows in room for {padded}")
    for array in (rows.inputs, rows.targets, totals, meters.books):
        if not array.flags.c_contiguous:
            raise ValueError("compiled code needs contiguous arrays")
