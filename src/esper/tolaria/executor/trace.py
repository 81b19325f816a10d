"""What a torch module does to a batch, as a list of operations: its forward pass is run once on tensors without values.

Whatever a forward pass calls arrives here as one of torch's basic operators, so a module needs no second description.
An operator that has no native operation raises `Unsupported`, and torch goes on training that network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.tolaria.executor import ops as o

ROWS = 8191
"""Rows of a traced batch: a number that no layer has as its width."""
aten = torch.ops.aten


class Unsupported(Exception):
    """There is no native operation for something; the message names it."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory for one tensor: so many values per row."""

    size: int
    position: int | None = None
    """Where it lies, once that is decided."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a buffer as a tensor. A channel is contiguous, so every reshape is free."""

    buffer: Buffer
    start: int
    shape: tuple[int, ...]
    """Without rows."""
    needs_grad: bool

    @property
    def size(self) -> int:
        """Values per row."""
        return math.prod(self.shape)

    @property
    def image(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, *space = self.shape
        return (channels, *space) if len(space) == 2 else (channels, 1, math.prod(space))  # type: ignore[return-value]


@dataclass(eq=False, slots=True)
class Operation:
    """One native operation; see ops.py. Numbers that are not given are 0 in `columns`."""

    kind: int
    x: View
    y: View | None
    z: View | None = None
    saved: Buffer | None = None
    columns: dict[int, int] = field(default_factory=dict)
    s: float = 1.0
    t: float = 0.0


class AddressRange:
    """A stretch of float32 memory that tensors are recognised by."""

    def __init__(self, values: Tensor) -> None:
        assert values.dtype is torch.float32
        assert values.is_contiguous()
        self.size = values.numel()
        self._first = values.data_ptr()

    def position(self, tensor: Tensor, what: str) -> int:
        """Where a tensor begins.

        Raises:
            Unsupported: It lies elsewhere.
        """
        offset = tensor.data_ptr() - self._first
        if not 0 <= offset < 4 * self.size or tensor.dtype is not torch.float32:
            raise Unsupported(f"a {what} that is no parameter of the network")
        return offset // 4


class Traced(Tensor):
    """A tensor without values that writes down what is done to it."""

    owner: Trace
    place: View

    @staticmethod
    def __new__(cls, trace: Trace, view: View) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(cls, (ROWS, *view.shape), dtype=torch.float32)
        made.owner, made.place = trace, view
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced{tuple(self.shape)}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        override = _trace_of(args).overrides.get(func)
        if override is not None:
            return override(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(_trace_of(args), *args, **(kwargs or {}))
        # In inference mode torch hands over operators that are made of others.
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise Unsupported(f"torch operator {func}")
        return result


def _trace_of(args: Sequence[Any]) -> Trace:
    flat = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
    return next(part.owner for part in flat if isinstance(part, Traced))


class Trace:
    """The operations of one network, in the order of its forward pass.

    Args:
        params: The memory that holds all parameters.
        stats: The memory that holds all running statistics, the means of a layer before its variances.
        training: Whether modules run in training mode.
        overrides: What to do instead of functions that ask tensors first, by torch's function protocol.
    """

    def __init__(
        self,
        params: AddressRange,
        stats: AddressRange,
        *,
        training: bool,
        overrides: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.params = params
        self.stats = stats
        self.training = training
        self.overrides = overrides
        self.operations: list[Operation] = []
        self.input: View | None = None

    # ---- what a network is made of besides modules

    def begin(self, shape: Sequence[int]) -> Traced:
        """The batch itself; `shape` is without rows."""
        self.input = View(Buffer(math.prod(shape)), 0, tuple(shape), needs_grad=False)
        return Traced(self, self.input)

    def mix(self, x: Traced, z: Traced, scalar: int) -> Traced:
        """x + s * z, with s among the scalars that are given at run time."""
        if x.shape != z.shape:
            raise Unsupported(f"mixing {tuple(z.shape[1:])} into {tuple(x.shape[1:])}")
        return self._append(o.MIX, x, x.place.shape, z=z, columns={**_gain(), o.SCALAR: scalar})

    def scale(self, x: Traced, per_channel: Tensor, s: float) -> Traced:
        """s * x, times a parameter with one value per channel."""
        return _scale(self, x, s, gain=self.params.position(per_channel, "tensor"))

    def attach(self, h: Traced, d: Traced, meter: int) -> Traced:
        """h, whose gradient also trains d, which was computed from a detached h."""
        features = View(h.place.buffer, h.place.start, h.place.shape, needs_grad=True)
        self.operations.append(Operation(kind=o.ATTACH, x=features, y=None, z=d.place, columns={o.MODE: meter}))
        return Traced(self, features)

    def loss(self, logits: Traced, row: int) -> None:
        """The cross-entropy of the logits, added up in a row of the totals."""
        if logits.dim() != 2:
            raise Unsupported(f"logits of shape {tuple(logits.shape[1:])} per row")
        columns = {o.OUT: logits.place.size, o.MODE: row}
        self.operations.append(Operation(kind=o.LOSS, x=logits.place, y=None, columns=columns))

    # ---- building operations

    def _append(
        self,
        kind: int,
        x: Traced,
        shape: Sequence[int],
        *,
        z: Traced | None = None,
        columns: dict[int, int] | None = None,
        s: float = 1.0,
        t: float = 0.0,
        saved: int | None = None,
        into: View | None = None,
    ) -> Traced:
        columns = columns or {}
        learns = columns.get(o.WEIGHT, -1) >= 0 or columns.get(o.BIAS, -1) >= 0
        needs_grad = learns or x.place.needs_grad or (z is not None and z.place.needs_grad)
        y = into or View(Buffer(math.prod(shape)), 0, tuple(shape), needs_grad)
        room = None if saved is None else Buffer(saved)
        z_view = None if z is None else z.place
        self.operations.append(Operation(kind=kind, x=x.place, y=y, z=z_view, saved=room, columns=columns, s=s, t=t))
        return Traced(self, y)

    def param(self, tensor: Tensor | None, shape: Sequence[int], what: str) -> int:
        """Where a parameter lies; -1 for none."""
        if tensor is None:
            return -1
        if isinstance(tensor, Traced) or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
            raise Unsupported(f"a {what} of shape {tuple(tensor.shape)}")
        return self.params.position(tensor, what)

    def affine(self, w: Tensor | None, b: Tensor | None, channels: int) -> dict[int, int]:
        """The columns of a gain and a shift per channel."""
        return {
            o.WEIGHT: self.param(w, (channels,), "norm's weight"),
            o.BIAS: self.param(b, (channels,), "norm's bias"),
        }


def _gain(weight: int = -1, bias: int = -1) -> dict[int, int]:
    return {o.WEIGHT: weight, o.BIAS: bias, o.SCALAR: -1}


# ---- one handler per torch operator

Handler = Callable[..., Any]
HandlerT = TypeVar("HandlerT", bound=Handler)
HANDLERS: dict[Any, Handler] = {}


def handles(*operators: Any) -> Callable[[HandlerT], HandlerT]:
    """Registers what one of torch's operators becomes."""

    def register(handler: HandlerT) -> HandlerT:
        for operator in operators:
            HANDLERS[operator] = handler
        return handler

    return register


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise Unsupported(what)


def _square(pair: Sequence[int], what: str) -> int:
    _need(len(set(pair)) == 1, f"{what} {tuple(pair)} that differs between height and width")
    return int(pair[0])


def _image(x: Traced, what: str) -> tuple[int, int, int]:
    _need(x.dim() == 4, f"{what} of {tuple(x.shape[1:])} per row")
    return x.place.image


@handles(aten.convolution.default)
def _convolution(
    trace: Trace,
    x: Traced,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Traced:
    _need(not transposed, "a transposed convolution")
    channels, height, width = _image(x, "a convolution")
    outs, _, kernel, kernel_width = weight.shape
    _need(kernel == kernel_width, f"a kernel of {kernel}x{kernel_width}")
    step, edge, spread = _square(stride, "a stride"), _square(padding, "padding"), _square(dilation, "dilation")
    reach = spread * (kernel - 1)
    _need(edge <= reach, f"padding {edge} around a kernel that reaches {reach}")
    shape = (outs, *((size + 2 * edge - reach - 1) // step + 1 for size in (height, width)))
    columns = {
        o.K: kernel,
        o.STRIDE: step,
        o.DILATION: spread,
        o.PAD: edge,
        o.GROUPS: groups,
        o.WEIGHT: trace.param(weight, (outs, channels // groups, kernel, kernel), "kernel"),
        o.BIAS: trace.param(bias, (outs,), "bias"),
    }
    return trace._append(o.CONV, x, shape, columns=columns)


@handles(aten.addmm.default)
def _addmm(trace: Trace, bias: Tensor, x: Traced, weight: Tensor) -> Traced:
    _need(isinstance(x, Traced), "a product with the batch on the right")
    return _linear(trace, x, weight, bias)


@handles(aten.mm.default)
def _mm(trace: Trace, x: Traced, weight: Tensor) -> Traced:
    _need(isinstance(x, Traced), "a product with the batch on the right")
    return _linear(trace, x, weight, None)


def _linear(trace: Trace, x: Traced, transposed: Tensor, bias: Tensor | None) -> Traced:
    weight = transposed.t() if not isinstance(transposed, Traced) else transposed
    outs, ins = weight.shape
    columns = {
        o.K: 1,
        o.STRIDE: 1,
        o.DILATION: 1,
        o.GROUPS: 1,
        o.WEIGHT: trace.param(weight, (outs, ins), "weight of a linear layer"),
        o.BIAS: trace.param(bias, (outs,), "bias"),
    }
    return trace._append(o.CONV, x, (outs,), columns=columns)


@handles(aten.native_batch_norm.default)
def _batch_norm(
    trace: Trace,
    x: Traced,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    _need(training == trace.training, "a batch norm that is frozen, or has no running statistics")
    _need(mean is not None and var is not None, "a batch norm without running statistics")
    assert mean is not None
    assert var is not None
    channels = x.shape[1]
    start = trace.stats.position(mean, "running mean")
    _need(trace.stats.position(var, "running variance") == start + channels, "running statistics in two places")
    columns = {**trace.affine(weight, bias, channels), o.STAT: start}
    y = trace._append(o.BATCH_NORM, x, x.place.shape, columns=columns, s=eps, t=momentum)
    return y, torch.empty(0), torch.empty(0)


@handles(aten.native_group_norm.default)
def _group_norm(
    trace: Trace,
    x: Traced,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    columns = {**trace.affine(weight, bias, channels), o.GROUPS: groups}
    y = trace._append(o.GROUP_NORM, x, x.place.shape, columns=columns, s=eps, saved=2 * groups)
    return y, torch.empty(0), torch.empty(0)


@handles(aten.native_layer_norm.default)
def _layer_norm(
    trace: Trace, x: Traced, over: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    _need(x.dim() == 2 and tuple(over) == x.place.shape, f"a layer norm over {tuple(over)} of {tuple(x.shape[1:])}")
    return _group_norm(trace, x, weight, bias, ROWS, x.shape[1], 1, 1, eps)


def _activation(mode: int) -> Handler:
    def handler(trace: Trace, x: Traced, approximate: str = "none") -> Traced:
        _need(approximate == "none", f"the approximation {approximate!r} of gelu")
        return trace._append(o.ACTIVATION, x, x.place.shape, columns={o.MODE: mode})

    return handler


for _operator, _mode in (
    (aten.relu.default, o.RELU),
    (aten.gelu.default, o.GELU),
    (aten.tanh.default, o.TANH),
    (aten.sigmoid.default, o.SIGMOID),
    (aten.silu.default, o.SILU),
):
    HANDLERS[_operator] = _activation(_mode)


# ---- arithmetic


def _scale(trace: Trace, x: Traced, s: float = 1.0, t: float = 0.0, *, gain: int = -1, shift: int = -1) -> Traced:
    return trace._append(o.SCALE, x, x.place.shape, columns=_gain(gain, shift), s=s, t=t)


def _per_channel(trace: Trace, param: Tensor, x: Traced) -> int:
    """Where a parameter lies that has one value per channel of x."""
    channels, trailing = x.shape[1], x.dim() - 2
    wanted = (channels,) + (1,) * trailing
    _need(tuple(param.shape) in (wanted, (1, *wanted)), f"arithmetic between {tuple(param.shape)} and {tuple(x.shape)}")
    _need(param.is_contiguous(), "arithmetic with a parameter in pieces")
    return trace.params.position(param, "tensor")


@handles(aten.add.Tensor, aten.add.Scalar)
def _add(trace: Trace, x: Any, z: Any, alpha: float = 1) -> Traced:
    if isinstance(x, Traced) and isinstance(z, Traced):
        _need(x.shape == z.shape, f"adding {tuple(z.shape[1:])} to {tuple(x.shape[1:])} per row")
        return trace._append(o.MIX, x, x.place.shape, z=z, columns=_gain(), s=float(alpha))
    if isinstance(z, Traced):
        _need(alpha == 1, "an addition with a factor")
        x, z = z, x
    if isinstance(z, Tensor):
        _need(alpha == 1, "an addition with a factor")
        return _scale(trace, x, shift=_per_channel(trace, z, x))
    return _scale(trace, x, t=float(alpha) * float(z))


@handles(aten.sub.Tensor, aten.sub.Scalar)
def _sub(trace: Trace, x: Any, z: Any, alpha: float = 1) -> Traced:
    _need(isinstance(x, Traced), "subtracting the batch from a parameter")
    return _add(trace, x, z, alpha=-alpha)


@handles(aten.rsub.Scalar)
def _rsub(trace: Trace, x: Traced, z: float, alpha: float = 1) -> Traced:
    return _scale(trace, x, s=-float(alpha), t=float(z))


@handles(aten.neg.default)
def _neg(trace: Trace, x: Traced) -> Traced:
    return _scale(trace, x, s=-1.0)


@handles(aten.mul.Tensor, aten.mul.Scalar)
def _mul(trace: Trace, x: Any, z: Any) -> Traced:
    if not isinstance(x, Traced) or (isinstance(z, Traced) and z.place.size > x.place.size):
        x, z = z, x
    if isinstance(z, Traced):
        wide, narrow = tuple(x.shape[1:]), tuple(z.shape[1:])
        ones = (1,) * (len(wide) - 1)
        known = {wide: o.SAME, (wide[0], *ones): o.PER_CHANNEL, (1, *ones): o.PER_ROW}
        _need(narrow in known, f"multiplying {wide} by {narrow} per row")
        mode = o.SAME if narrow == wide else known[narrow]
        return trace._append(o.MULTIPLY, x, x.place.shape, z=z, columns={o.MODE: mode, o.SCALAR: -1})
    if isinstance(z, Tensor):
        return _scale(trace, x, gain=_per_channel(trace, z, x))
    return _scale(trace, x, s=float(z))


@handles(aten.div.Tensor, aten.div.Scalar)
def _div(trace: Trace, x: Any, z: Any) -> Traced:
    _need(isinstance(x, Traced) and not isinstance(z, Tensor), "a division by a tensor")
    return _scale(trace, x, s=1.0 / float(z))


# ---- pixels


def _pool(
    trace: Trace, x: Traced, kind: int, kernel: Sequence[int], stride: Sequence[int], edge: int, ceil: bool
) -> Traced:
    channels, height, width = _image(x, "pooling")
    size = _square(kernel, "a window")
    step = _square(stride, "a stride") if len(stride) else size
    shape = (channels, *(_num_windows(length, size, step, edge, ceil) for length in (height, width)))
    return trace._append(kind, x, shape, columns={o.K: size, o.STRIDE: step, o.PAD: edge})


def _num_windows(length: int, size: int, step: int, edge: int, ceil: bool) -> int:
    room = length + 2 * edge - size
    if not ceil:
        return room // step + 1
    count = -(-room // step) + 1
    return count - 1 if (count - 1) * step >= length + edge else count


@handles(aten.max_pool2d_with_indices.default)
def _max_pool(
    trace: Trace,
    x: Traced,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    _need(_square(dilation, "dilation") == 1, "max pooling with dilation")
    y = _pool(trace, x, o.MAX_POOL, kernel, stride, _square(padding, "padding"), ceil_mode)
    return y, torch.empty(0, dtype=torch.int64)


@handles(aten.avg_pool2d.default)
def _avg_pool(
    trace: Trace,
    x: Traced,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Traced:
    _need(_square(padding, "padding") == 0 and divisor_override is None, "average pooling with padding or a divisor")
    _need(not ceil_mode, "average pooling that rounds sizes up")
    return _pool(trace, x, o.AVG_POOL, kernel, stride, 0, False)


@handles(aten.upsample_nearest2d.default)
def _upsample(trace: Trace, x: Traced, size: Sequence[int], *scales: float | None) -> Traced:
    channels, height, width = _image(x, "upsampling")
    for before, after, scale in zip((height, width), size, scales or (None, None), strict=True):
        factor = before / after if scale is None else 1.0 / scale
        torch_source = [min(int(factor * i), before - 1) for i in range(after)]
        same = torch_source == [i * before // after for i in range(after)]
        _need(same, f"upsampling from {before} to {after} pixels")
    return _resample(trace, x, (channels, *size), (0, height, size[0]), (0, width, size[1]))


@handles(aten.upsample_nearest2d.vec)
def _upsample_to(trace: Trace, x: Traced, size: Sequence[int] | None, scales: Sequence[float] | None) -> Traced:
    if size is None:
        assert scales is not None
        return _upsample(trace, x, [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)], *scales)
    return _upsample(trace, x, size)


def _resample(
    trace: Trace, x: Traced, shape: Sequence[int], rows: tuple[int, int, int], cols: tuple[int, int, int]
) -> Traced:
    """Pixels at first + i * numerator // denominator, for (first, numerator, denominator) of rows and of columns."""
    names = (o.ROW, o.ROW_NUM, o.ROW_DEN, o.COL, o.COL_NUM, o.COL_DEN)
    return trace._append(o.RESAMPLE, x, shape, columns=dict(zip(names, (*rows, *cols), strict=True)))


@handles(aten.mean.dim)
def _mean(trace: Trace, x: Traced, dims: Sequence[int], keepdim: bool = False) -> Traced:
    channels, _, _ = _image(x, "a mean")
    _need({d % 4 for d in dims} == {2, 3}, f"a mean over axes {tuple(dims)}")
    return trace._append(o.MEAN, x, (channels, 1, 1) if keepdim else (channels,))


@handles(aten._adaptive_avg_pool2d.default)
def _adaptive(trace: Trace, x: Traced, size: Sequence[int]) -> Traced:
    _need(tuple(size) == (1, 1), f"adaptive pooling to {tuple(size)}")
    return _mean(trace, x, (2, 3), True)


# ---- other views of the same values


def _view(x: Traced, shape: Sequence[int], start: int = 0, *, needs_grad: bool | None = None) -> Traced:
    old = x.place
    needs_grad = old.needs_grad if needs_grad is None else needs_grad
    return Traced(x.owner, View(old.buffer, old.start + start, tuple(shape), needs_grad))


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _reshape(trace: Trace, x: Traced, shape: Sequence[int]) -> Traced:
    rows, *rest = shape
    size = x.place.size
    if rest.count(-1) == 1:
        known = -math.prod(rest)
        rest[rest.index(-1)] = size // known
    _need(rows in (ROWS, -1) and math.prod(rest) == size, f"reshaping {tuple(x.shape)} to {tuple(shape)}")
    return _view(x, rest)


@handles(aten.unsqueeze.default)
def _unsqueeze(trace: Trace, x: Traced, dim: int) -> Traced:
    at = dim % (x.dim() + 1)
    _need(at > 0, "an axis before the rows")
    shape = list(x.place.shape)
    shape.insert(at - 1, 1)
    return _view(x, shape)


@handles(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(trace: Trace, x: Traced, dims: int | Sequence[int]) -> Traced:
    gone = {d % x.dim() for d in (dims if isinstance(dims, list | tuple) else (dims,))}
    return _view(x, [size for axis, size in enumerate(x.place.shape, 1) if axis not in gone or size != 1])


@handles(aten.slice.Tensor)
def _slice(
    trace: Trace, x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Traced:
    axis = dim % x.dim()
    first, last, _ = slice(start, end).indices(x.shape[axis])
    if (first, last, step) == (0, x.shape[axis], 1):
        return _view(x, x.place.shape)
    if axis in (2, 3) and x.dim() == 4:
        shape = list(x.place.shape)
        shape[axis - 1] = len(range(first, last, step))
        along, across = (first, step, 1), (0, 1, 1)
        return _resample(trace, x, shape, *((along, across) if axis == 2 else (across, along)))
    _need(axis == 1 and step == 1, f"a slice along axis {dim}")
    rest = x.place.shape[1:]
    return _view(x, (last - first, *rest), first * math.prod(rest))


@handles(aten.split.Tensor)
def _split(trace: Trace, x: Traced, size: int, dim: int = 0) -> list[Traced]:
    _need(dim % x.dim() == 1, f"a split along axis {dim}")
    return [_slice(trace, x, 1, start, start + size) for start in range(0, x.shape[1], size)]


@handles(aten.split_with_sizes.default)
def _split_sizes(trace: Trace, x: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    _need(dim % x.dim() == 1, f"a split along axis {dim}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(trace, x, 1, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@handles(aten.cat.default)
def _cat(trace: Trace, parts: Sequence[Tensor], dim: int = 0) -> Traced:
    _need(all(isinstance(part, Traced) for part in parts), "joining the batch with a parameter")
    traced = [part for part in parts if isinstance(part, Traced)]
    _need(dim % traced[0].dim() == 1, f"joining along axis {dim}")
    _, *rest = traced[0].place.shape
    shape = (sum(part.shape[1] for part in traced), *rest)
    needs_grad = any(part.place.needs_grad for part in traced)
    buffer, start = Buffer(math.prod(shape)), 0
    for part in traced:
        into = View(buffer, start, part.place.shape, part.place.needs_grad)
        trace._append(o.SCALE, part, part.place.shape, columns=_gain(), into=into)
        start += part.place.size
    return Traced(trace, View(buffer, 0, shape, needs_grad))


@handles(aten.detach.default)
def _detach(trace: Trace, x: Traced) -> Traced:
    return _view(x, x.place.shape, needs_grad=False)


@handles(aten.alias.default, aten.clone.default)
def _same(trace: Trace, x: Traced, memory_format: Any = None) -> Traced:
    return _view(x, x.place.shape)
