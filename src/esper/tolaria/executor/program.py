"""From traced operations to the matrix of numbers that the compiled function runs, with its memory planned and checked.

A program holds positions only, no parameters, so every network of the same topology shares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from esper.leyline import record
from esper.tolaria.executor import ops as o
from esper.tolaria.executor.trace import Buffer, Operation, Trace, Unsupported, View

NORMS = (o.BATCH_NORM, o.GROUP_NORM)


@record
class Program:
    """An operation list and the memory it needs. Sizes ending in `_values` are per row of the batch."""

    op_list: NDArray[np.int64]
    consts: NDArray[np.float32]
    training: bool
    input_values: int
    values: int
    """Activations; in training, as many gradients."""
    frame_values: int
    """Scratch for convolutions and the loss."""
    saved: int
    """Scalars kept from forward to backward."""
    params: int
    stats: int
    scalars: int
    meters: int
    outputs: int
    """Rows of the totals."""
    classes: int
    """Targets must be below this."""

    def __post_init__(self) -> None:
        check(self)


def build_program(trace: Trace, *, scalars: int, meters: int, outputs: int) -> Program:
    """Plans the memory of traced operations.

    Args:
        trace: A whole network, from `begin` to `loss`.
        scalars: How many scalars it is given at run time.
        meters: How many training seeds it attaches.
        outputs: How many losses it adds up.

    Raises:
        Unsupported: Something about the network cannot be run natively.
    """
    operations = fuse(trace.operations)
    if trace.training:
        _check_params(operations)
    assert trace.input is not None
    values = _place(trace.input.buffer, operations, reuse=not trace.training)
    op_list = np.zeros((len(operations), o.COLUMNS), np.int64)
    consts = np.zeros((len(operations), 2), np.float32)
    saved = 0
    for row, const, operation in zip(op_list, consts, operations, strict=True):
        _fill(row, operation)
        const[:] = operation.s, operation.t
        if operation.kind == o.BATCH_NORM:
            row[o.SAVE] = saved
            saved += 2 * int(row[o.IN])
    if trace.training:
        _plan_backward(op_list, operations)
    return Program(
        op_list=op_list,
        consts=consts,
        training=trace.training,
        input_values=trace.input.size,
        values=values,
        frame_values=max(map(frame_values, op_list), default=0),
        saved=saved,
        params=trace.params.size,
        stats=trace.stats.size,
        scalars=scalars,
        meters=meters,
        outputs=outputs,
        classes=min(int(row[o.OUT]) for row in op_list if row[o.KIND] == o.LOSS),
    )


# ---- fewer passes over memory


def fuse(operations: Sequence[Operation]) -> list[Operation]:
    """Joins a norm with the ReLU behind it, and a factor with the mix or product behind it."""
    uses = Counter(view.buffer for op in operations for view in _inputs(op))
    made = {op.y.buffer: op for op in operations if op.y is not None}
    gone: set[int] = set()

    def before(view: View, *kinds: int) -> Operation | None:
        """What made the whole of a view that nobody else reads."""
        maker = made.get(view.buffer)
        if maker is None or maker.kind not in kinds or uses[view.buffer] != 1 or maker.y is None:
            return None
        whole = maker.y.size == view.size == view.buffer.size
        return maker if whole and maker.y.needs_grad == view.needs_grad else None

    for op in operations:
        if op.kind == o.ACTIVATION and op.columns[o.MODE] == o.RELU:
            norm = before(op.x, *NORMS)
            if norm is not None and norm.x.shape == op.x.shape:
                norm.y, norm.columns[o.MODE] = op.y, 1
                assert op.y is not None
                made[op.y.buffer] = norm
                gone.add(id(op))
        elif op.kind == o.MIX:
            assert op.z is not None
            scale = before(op.z, o.SCALE)
            if scale is None or scale.columns[o.BIAS] >= 0 or (scale.s, scale.t) != (1.0, 0.0):
                continue
            if scale.x.shape == op.z.shape and op.columns[o.WEIGHT] < 0:
                op.z, op.columns[o.WEIGHT] = scale.x, scale.columns[o.WEIGHT]
                gone.add(id(scale))
        elif op.kind == o.MULTIPLY:
            assert op.z is not None
            for name in ("x", "z"):
                scale = before(getattr(op, name), o.SCALE)
                if scale is not None and scale.columns[o.BIAS] < 0 and scale.columns[o.WEIGHT] < 0 and scale.t == 0.0:
                    setattr(op, name, _as(scale.x, getattr(op, name)))
                    op.s *= scale.s
                    gone.add(id(scale))
    return [op for op in operations if id(op) not in gone]


def _as(view: View, like: View) -> View:
    return View(view.buffer, view.start, like.shape, view.needs_grad)


def _inputs(op: Operation) -> Iterable[View]:
    return (op.x,) if op.z is None else (op.x, op.z)


def _check_params(operations: Sequence[Operation]) -> None:
    """Gradients are written, not added, so a parameter may be used once."""
    places = [
        place
        for op in operations
        for column in (o.WEIGHT, o.BIAS)
        if op.kind != o.LOSS and (place := op.columns.get(column, -1)) >= 0
    ]
    if len(set(places)) != len(places):
        raise Unsupported("a parameter that is used twice")


# ---- memory


def _place(first: Buffer, operations: Sequence[Operation], *, reuse: bool) -> int:
    """Decides where every buffer lies; with `reuse`, memory is free again after the last operation that needs it."""
    last: dict[Buffer, int] = {first: 0}
    for index, op in enumerate(operations):
        for buffer in _buffers(op):
            last[buffer] = index
    free: list[tuple[int, int]] = []
    first.position, top = 0, first.size
    for index, op in enumerate(operations):
        for buffer in _buffers(op):
            if buffer.position is None:
                at = next((i for i, (_, size) in enumerate(free) if size >= buffer.size), None) if reuse else None
                if at is None:
                    buffer.position, top = top, top + buffer.size
                else:
                    start, size = free.pop(at)
                    buffer.position = start
                    if size > buffer.size:
                        free.append((start + buffer.size, size - buffer.size))
        for buffer in set(_buffers(op)):
            # The batch itself stays: it is copied to its place once per batch, before the first operation.
            if reuse and last[buffer] == index and buffer is not first:
                assert buffer.position is not None
                free.append((buffer.position, buffer.size))
        free = _joined(free)
    return top


def _joined(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, size in sorted(free):
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _buffers(op: Operation) -> list[Buffer]:
    views = [*_inputs(op), *([] if op.y is None else [op.y])]
    return [*(view.buffer for view in views), *([] if op.saved is None else [op.saved])]


def _position(view: View) -> int:
    assert view.buffer.position is not None
    return view.buffer.position + view.start


def _fill(row: NDArray[np.int64], op: Operation) -> None:
    channels, height, width = op.x.image
    row[[o.KIND, o.X, o.IN, o.H, o.W]] = op.kind, _position(op.x), channels, height, width
    row[[o.WEIGHT, o.BIAS, o.SCALAR]] = -1
    if op.y is not None:
        outs, out_height, out_width = op.y.image
        row[[o.Y, o.OUT, o.HO, o.WO]] = _position(op.y), outs, out_height, out_width
    if op.z is not None:
        row[o.Z] = _position(op.z)
    if op.saved is not None:
        assert op.saved.position is not None
        row[o.SAVE] = op.saved.position
    for column, value in op.columns.items():
        row[column] = value


# ---- backward


def _plan_backward(op_list: NDArray[np.int64], operations: Sequence[Operation]) -> None:
    """Says, from the last operation to the first, whose gradient is wanted and who writes it first."""
    written: dict[Buffer, list[tuple[int, int]]] = {}

    def claim(view: View) -> tuple[int, int]:
        """(wanted, add) of an operation's gradient of a view."""
        if not view.needs_grad:
            return 0, 0
        here, span = written.setdefault(view.buffer, []), (view.start, view.start + view.size)
        if _covers(here, span):
            return 1, 1
        if any(start < span[1] and span[0] < stop for start, stop in here):
            raise Unsupported("parts of a tensor that overlap")
        here.append(span)
        return 1, 0

    for row, op in zip(op_list[::-1], reversed(operations), strict=True):
        if op.kind == o.LOSS:
            claim(op.x)
            continue
        if op.kind == o.ATTACH:
            assert op.z is not None
            if not _covers(written.get(op.x.buffer, []), (op.x.start, op.x.start + op.x.size)):
                raise Unsupported("a seed behind features that nothing reads")
            row[[o.BACK, o.NEED_Z, o.ADD_Z]] = 1, *claim(op.z)
            continue
        assert op.y is not None
        if not op.y.needs_grad:
            continue
        if not _covers(written.get(op.y.buffer, []), (op.y.start, op.y.start + op.y.size)):
            raise Unsupported("a result that is not used, or not all of it")
        row[o.BACK] = 1
        row[[o.NEED_X, o.ADD_X]] = claim(op.x)
        if op.z is not None:
            row[[o.NEED_Z, o.ADD_Z]] = claim(op.z)


def _covers(spans: Sequence[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    at = wanted[0]
    for start, stop in sorted(spans):
        if start <= at < stop:
            at = stop
    return at >= wanted[1]


# ---- nothing leaves its memory


def frame_values(row: NDArray[np.int64]) -> int:
    """Scratch per row that an operation needs."""
    if row[o.KIND] != o.CONV:
        return 0
    reach, edge = int(row[o.DILATION] * (row[o.K] - 1)), int(row[o.PAD])
    ahead = int(row[o.IN] * (row[o.H] + 2 * edge) * (row[o.W] + 2 * edge))
    back = int(row[o.OUT] * (row[o.H] + reach) * (row[o.W] + reach))
    return max(ahead, back)


def loss_floats(classes: int) -> int:
    """Scratch that a loss needs, in floats."""
    return 16 * (classes + 2)


def check(program: Program) -> None:
    """Looks at every number of an operation list: the compiled code does not.

    Raises:
        ValueError: An operation would leave its memory, or is no operation; the message says which.
    """
    if program.op_list.dtype != np.int64 or program.op_list.shape[1:] != (o.COLUMNS,):
        raise ValueError(f"expected int64 operations of {o.COLUMNS} columns, got {program.op_list.shape}")
    if program.consts.dtype != np.float32 or program.consts.shape != (len(program.op_list), 2):
        raise ValueError(f"expected two float32 constants per operation, got {program.consts.shape}")
    if not 0 < program.input_values <= program.values:
        raise ValueError(f"a batch of {program.input_values} values does not fit into {program.values}")
    for index, row in enumerate(program.op_list):
        reason = _fault(program, row)
        if reason is None and frame_values(row) > program.frame_values:
            reason = f"needs scratch for {frame_values(row)} values, there is {program.frame_values}"
        if reason is not None:
            kind = o.KINDS[row[o.KIND]] if 0 <= row[o.KIND] < len(o.KINDS) else f"kind {row[o.KIND]}"
            raise ValueError(f"operation {index} ({kind}): {reason}")


LIMIT = 1 << 31
"""No number of an operation is as large; sums and products of a few of them stay exact."""


def _fault(program: Program, row: NDArray[np.int64]) -> str | None:
    """What is wrong with an operation; None if nothing is."""
    if np.abs(row).max() >= LIMIT:
        return "a number out of all range"
    n: list[int] = row.tolist()
    if not 0 <= n[o.KIND] < len(o.KINDS):
        return "there is no such kind"
    if min(n[o.IN], n[o.H], n[o.W]) < 1:
        return "an input without values"
    if any(n[flag] not in (0, 1) for flag in (o.BACK, o.NEED_X, o.ADD_X, o.NEED_Z, o.ADD_Z)):
        return "a flag that is neither 0 nor 1"
    reason = _shape_fault(n, program)
    if reason is not None:
        return reason
    for name, start, size, room in _extents(n, program):
        if size and not 0 <= start <= room - size:
            return f"{name} {start}..{start + size} outside 0..{room}"
    return None


def _shape_fault(n: list[int], program: Program) -> str | None:
    """What is wrong with the sizes of an operation."""
    kind = n[o.KIND]
    if kind == o.LOSS:
        whole = n[o.OUT] == n[o.IN] * n[o.H] * n[o.W] and n[o.OUT] >= program.classes
        return None if whole and 0 <= n[o.MODE] < program.outputs else "classes or totals that are not there"
    if kind == o.ATTACH:
        return None if 0 <= n[o.MODE] < program.meters else "a meter that is not there"
    if min(n[o.OUT], n[o.HO], n[o.WO]) < 1:
        return "an output without values"
    same = (n[o.OUT], n[o.HO], n[o.WO]) == (n[o.IN], n[o.H], n[o.W])
    if kind in (o.BATCH_NORM, o.GROUP_NORM, o.ACTIVATION, o.SCALE, o.MIX, o.MULTIPLY) and not same:
        return "an output of another shape than its input"
    if kind == o.GROUP_NORM and (n[o.GROUPS] < 1 or n[o.IN] % n[o.GROUPS]):
        return f"{n[o.IN]} channels in {n[o.GROUPS]} groups"
    if kind == o.ACTIVATION and not o.RELU <= n[o.MODE] <= o.SILU:
        return "no such function"
    if kind == o.MULTIPLY and not o.SAME <= n[o.MODE] <= o.PER_ROW:
        return "no such shape of a factor"
    if kind in (o.SCALE, o.MIX, o.MULTIPLY) and not -1 <= n[o.SCALAR] < program.scalars:
        return "a scalar that is not there"
    if kind == o.MEAN and (n[o.OUT] != n[o.IN] or n[o.HO] * n[o.WO] != 1):
        return "a mean of more than one value per channel"
    if kind == o.RESAMPLE:
        return _resample_fault(n)
    if kind in (o.CONV, o.MAX_POOL, o.AVG_POOL):
        return _window_fault(n)
    return None


def _resample_fault(n: list[int]) -> str | None:
    if n[o.OUT] != n[o.IN]:
        return "other channels than its input"
    for first, numerator, denominator, size, out in (
        (n[o.ROW], n[o.ROW_NUM], n[o.ROW_DEN], n[o.H], n[o.HO]),
        (n[o.COL], n[o.COL_NUM], n[o.COL_DEN], n[o.W], n[o.WO]),
    ):
        if min(first, numerator) < 0 or denominator < 1:
            return "a step below 0"
        if first + (out - 1) * numerator // denominator >= size:
            return "pixels that are not there"
    return None


def _window_fault(n: list[int]) -> str | None:
    kind, edge = n[o.KIND], n[o.PAD]
    spread = n[o.DILATION] if kind == o.CONV else 1
    if min(n[o.K], n[o.STRIDE], spread) < 1 or edge < 0:
        return "a kernel, stride or dilation below 1, or padding below 0"
    reach = spread * (n[o.K] - 1)
    for size, out in ((n[o.H], n[o.HO]), (n[o.W], n[o.WO])):
        least = (size + 2 * edge - reach - 1) // n[o.STRIDE] + 1
        # The last window of a max pool may end outside, but not begin there.
        most = (size + edge - 1) // n[o.STRIDE] + 1 if kind == o.MAX_POOL else least
        if not least <= out <= most:
            return f"{out} windows where there are {least}"
    if kind == o.CONV:
        if n[o.GROUPS] < 1 or n[o.IN] % n[o.GROUPS] or n[o.OUT] % n[o.GROUPS] or edge > reach:
            return "channels that do not fit its groups, or padding beyond its reach"
    elif n[o.OUT] != n[o.IN] or (kind == o.AVG_POOL and edge) or 2 * edge > n[o.K]:
        return "other channels than its input, or padding it cannot have"
    return None


def _extents(n: list[int], program: Program) -> Iterable[tuple[str, int, int, int]]:
    """(name, start, size, room) of everything an operation reads or writes."""
    kind = n[o.KIND]
    inputs, outputs = n[o.IN] * n[o.H] * n[o.W], n[o.OUT] * n[o.HO] * n[o.WO]
    yield "input", n[o.X], inputs, program.values
    if kind not in (o.LOSS, o.ATTACH):
        yield "output", n[o.Y], outputs, program.values
    if kind in (o.MIX, o.ATTACH):
        yield "second input", n[o.Z], inputs, program.values
    if kind == o.MULTIPLY:
        yield "factor", n[o.Z], {o.SAME: inputs, o.PER_CHANNEL: n[o.IN], o.PER_ROW: 1}[n[o.MODE]], program.values
    if kind == o.CONV:
        yield "kernel", n[o.WEIGHT], n[o.OUT] * (n[o.IN] // n[o.GROUPS]) * n[o.K] ** 2, program.params
        yield "bias", n[o.BIAS], 0 if n[o.BIAS] == -1 else n[o.OUT], program.params
    if kind in (o.BATCH_NORM, o.GROUP_NORM, o.SCALE, o.MIX):
        yield "gain", n[o.WEIGHT], 0 if n[o.WEIGHT] == -1 else n[o.IN], program.params
    if kind in (o.BATCH_NORM, o.GROUP_NORM, o.SCALE):
        yield "shift", n[o.BIAS], 0 if n[o.BIAS] == -1 else n[o.IN], program.params
    if kind == o.BATCH_NORM:
        yield "statistics", n[o.STAT], 2 * n[o.IN], program.stats
        yield "saved scalars", n[o.SAVE], 2 * n[o.IN], program.saved
    if kind == o.GROUP_NORM:
        yield "saved values", n[o.SAVE], 2 * n[o.GROUPS], program.values
