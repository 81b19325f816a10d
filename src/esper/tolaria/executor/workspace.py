"""Scratch memory of a worker and the one door to compiled code. What belongs to a network is a `Seat`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.arrays import NO_LEARNING, Learning, Memory, Meters, Rows
from esper.tolaria.executor.program import Program, loss_floats
from esper.tolaria.executor.seat import Seat


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


class Workspace:
    """Scratch that all networks of a worker use in turns. It grows and never shrinks."""

    def __init__(self) -> None:
        from esper.tolaria.executor.kernels.run import make_ready, run

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
        learning: Learning = NO_LEARNING,
    ) -> None:
        """Trains on all batches, in order. Without `learning` only gradients are computed; statistics move."""
        assert program.training
        self._run(program, seat, rows, scalars, totals, meters, learning)

    def validate(
        self, program: Program, seat: Seat, rows: Rows, *, scalars: NDArray[np.float32], totals: NDArray[np.float64]
    ) -> None:
        """Adds losses and hits of all rows to the totals."""
        assert not program.training
        self._run(program, seat, rows, scalars, totals, NO_METERS, NO_LEARNING)

    def _run(
        self,
        program: Program,
        seat: Seat,
        rows: Rows,
        scalars: NDArray[np.float32],
        totals: NDArray[np.float64],
        meters: Meters,
        learning: Learning,
    ) -> None:
        _check_call(program, seat, rows, scalars, totals, meters, learning)
        padded = rows.inputs.shape[2]
        values = program.values * padded
        gradients = self.gradients(seat) if program.training else self.room("nothing", 16)
        gradients[: seat.params.size] = 0.0
        memory = Memory(
            A=self.room("activations", values),
            G=self.room("activation gradients", values if program.training else 16),
            p=seat.params,
            dp=gradients,
            stats=seat.stats,
            saved=self.room("saved", program.saved),
            frame=self.room("frame", max(program.frame_values * padded, loss_floats(program.op_list[:, o.OUT].max()))),
            scalars=scalars,
        )
        self._compiled(
            program.training, program.op_list, program.consts, rows, totals, memory, seat.state, learning, meters
        )


NO_METERS = Meters(
    eta=np.zeros(0, np.float32),
    group=np.zeros(0, np.int64),
    rho=0.0,
    decay=0.0,
    readings=np.zeros((0, 0, 2), np.float32),
)


def _check_call(
    program: Program,
    seat: Seat,
    rows: Rows,
    scalars: NDArray[np.float32],
    totals: NDArray[np.float64],
    meters: Meters,
    learning: Learning,
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
        wanted["groups with meters"] = (meters.group.shape, (len(seat.state.groups),))
        if program.meters:
            wanted["readings"] = (meters.readings.shape, (batches, program.meters, 2))
    if len(learning.rates):
        wanted["rates"] = (learning.rates.shape, (len(seat.state.groups), 2))
    for what, (got, expected) in wanted.items():
        if got != expected:
            raise ValueError(f"{what}: the program needs {expected}, got {got}")
    if rows.counts.min() < 1 or rows.counts.max() > padded:
        raise ValueError(f"batches of {rows.counts.min()} to {rows.counts.max()} rows in room for {padded}")
    for array in (rows.inputs, rows.targets, totals, meters.readings):
        if not array.flags.c_contiguous:
            raise ValueError("compiled code needs contiguous arrays")
