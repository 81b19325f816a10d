"""Vectors of float32 as numba values, so that kernels say how they vectorise instead of hoping for it.

A lane is one row of a batch. LLVM maps a vector to whatever registers the machine has. Nothing here reassociates: a
multiply-add is fused everywhere, sums over lanes halve in one fixed order, `exp` and its kin are our own polynomials.
So two machines, compilers or register widths give the same bits. Loads and stores are not bounds-checked.
"""

from __future__ import annotations

import math
import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.np.arrayobj import make_array

FLOAT = ir.FloatType()
INT = ir.IntType(32)


class Vector(types.Type):
    """The type of a vector with so many lanes."""

    def __init__(self, lanes):
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is an LLVM vector."""

    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(FLOAT, kind.lanes))


# ---- pieces of LLVM


def _constant(like, value, element=FLOAT):
    kind = ir.VectorType(element, like.count)
    if element is FLOAT:
        value = float(np.float32(value))
    return ir.Constant(kind, [ir.Constant(element, value)] * like.count)


def _spread(builder, value, lanes):
    """The same scalar in every lane."""
    kind = ir.VectorType(FLOAT, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(INT, lanes), [ir.Constant(INT, 0)] * lanes))


def _call(builder, name, *args):
    """An LLVM intrinsic on vectors."""
    kind = args[0].type
    function = ir.FunctionType(kind, [kind] * len(args))
    return builder.call(get_or_insert_function(builder.module, function, f"llvm.{name}.v{kind.count}f32"), args)


def _fma(builder, x, y, z):
    return _call(builder, "fma", x, y, z)


def _address(context, builder, array_type, array, index):
    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


def _load(context, builder, array_type, array, index, lanes):
    pointer = _address(context, builder, array_type, array, index)
    return builder.load(builder.bitcast(pointer, ir.VectorType(FLOAT, lanes).as_pointer()), align=4)


def _offset(builder, start, step, count):
    return builder.add(start, builder.mul(step, ir.Constant(step.type, count)))


# ---- making, loading, storing


def _zero(lanes):
    @intrinsic
    def zero(typing):
        def generate(context, builder, sig, args):
            return ir.Constant(ir.VectorType(FLOAT, lanes), [ir.Constant(FLOAT, 0.0)] * lanes)

        return Vector(lanes)(), generate

    return zero


zero16, zero64 = _zero(16), _zero(64)


@intrinsic(prefer_literal=True)
def zeros_for(typing, xs, count):
    """Room for `count` sums, a literal number, per vector of the tuple `xs`."""

    def generate(context, builder, sig, args):
        lanes = sig.args[0].dtype.lanes
        zero = ir.Constant(ir.VectorType(FLOAT, lanes), [ir.Constant(FLOAT, 0.0)] * lanes)
        return context.make_tuple(builder, sig.return_type, [zero] * sig.return_type.count)

    return types.UniTuple(xs.dtype, xs.count * count.literal_value)(xs, count), generate


@intrinsic
def splat(typing, value, like):
    """A scalar in every lane of a vector like the given one."""

    def generate(context, builder, sig, args):
        return _spread(builder, args[0], sig.args[1].lanes)

    return like(types.float32, like), generate


@intrinsic
def load(typing, array, index, like):
    """Consecutive values as a vector like the given one."""

    def generate(context, builder, sig, args):
        return _load(context, builder, sig.args[0], args[0], args[1], sig.args[2].lanes)

    return like(array, types.intp, like), generate


@intrinsic
def store(typing, array, index, vector):
    """Writes the lanes to consecutive values."""

    def generate(context, builder, sig, args):
        pointer = _address(context, builder, sig.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, args[2].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


# ---- arithmetic


def _arithmetic(python_operator, instruction):
    @infer_global(python_operator)
    class Typing(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(python_operator, Vector, Vector)
    def lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _arithmetic(_operator, _instruction)


@intrinsic
def fma(typing, x, y, z):
    """X * y + z with one rounding."""
    return z(x, y, z), lambda context, builder, sig, args: _fma(builder, *args)


@intrinsic
def fma_n(typing, sums, weights, index, step, x):
    """sums[j] + weights[index + j * step] * x for every j of the tuple, which stays in registers."""

    def generate(context, builder, sig, args):
        out = []
        for j in range(sig.args[0].count):
            at = _address(context, builder, sig.args[1], args[1], _offset(builder, args[2], args[3], j))
            weight = _spread(builder, builder.load(at), sig.args[4].lanes)
            out.append(_fma(builder, weight, args[4], builder.extract_value(args[0], j)))
        return context.make_tuple(builder, sig.return_type, out)

    return sums(sums, weights, types.intp, types.intp, x), generate


@intrinsic
def outer_n(typing, sums, g, g_index, g_step, x, x_index, x_step, xs):
    """sums[t, j] + x[x_index + t * x_step] * g[g_index + j * g_step], for every t of `xs` and every j.

    `sums` is flat with t outermost; of `xs` only the length counts.
    """

    def generate(context, builder, sig, args):
        taps, lanes = sig.args[7].count, sig.args[0].dtype.lanes
        count = sig.args[0].count // taps
        out = [builder.extract_value(args[0], j) for j in range(count * taps)]
        x_vectors = [
            _load(context, builder, sig.args[4], args[4], _offset(builder, args[5], args[6], t), lanes)
            for t in range(taps)
        ]
        for j in range(count):
            g_vector = _load(context, builder, sig.args[1], args[1], _offset(builder, args[2], args[3], j), lanes)
            for t in range(taps):
                out[t * count + j] = _fma(builder, x_vectors[t], g_vector, out[t * count + j])
        return context.make_tuple(builder, sig.return_type, out)

    index = types.intp
    return sums(sums, g, index, index, x, index, index, xs), generate


def _pick(builder, vector, lanes, other=None):
    """The lanes with these numbers; those of a second vector go on counting."""
    other = ir.Constant(vector.type, ir.Undefined) if other is None else other
    numbers = ir.Constant(ir.VectorType(INT, len(lanes)), [ir.Constant(INT, k) for k in lanes])
    return builder.shuffle_vector(vector, other, numbers)


def _totals(builder, vectors):
    """The sum of all lanes of each vector, in one vector. Lanes halve: the same order on every machine.

    Two vectors share each addition, as long as there are two. Their number is a power of two.
    """
    part = vectors[0].type.count
    while part > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], None)]
        starts = range(0, vectors[0].type.count * min(2, len(vectors)), part)
        part //= 2
        low, high = ([start + k for start in starts for k in range(at, at + part)] for at in (0, part))
        vectors = [builder.fadd(_pick(builder, a, low, b), _pick(builder, a, high, b)) for a, b in pairs]
    return vectors[0]


@intrinsic
def total(typing, vector):
    """The sum of all lanes."""

    def generate(context, builder, sig, args):
        return builder.extract_element(_totals(builder, args), ir.Constant(INT, 0))

    return types.float32(vector), generate


@intrinsic
def store_totals(typing, array, index, step, sums, xs):
    """array[index + j * step + t] = total(sums[t, j]), for sums of `outer_n`."""

    def generate(context, builder, sig, args):
        taps = sig.args[4].count
        count = sig.args[3].count // taps
        rows = [[builder.extract_value(args[3], t * count + j) for t in range(taps)] for j in range(count)]
        at_once = 16 // taps
        for first in range(0, count, at_once):
            some = [vector for row in rows[first : first + at_once] for vector in row]
            padding = (1 << (len(some) - 1).bit_length()) - len(some)
            found = _totals(builder, some + some[:1] * padding)
            for k in range(len(some) // taps):
                row = _pick(builder, found, range(k * taps, (k + 1) * taps))
                at = _offset(builder, args[1], args[2], first + k)
                pointer = _address(context, builder, sig.args[0], args[0], at)
                builder.store(row, builder.bitcast(pointer, row.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, sums, xs), generate


@intrinsic
def sqrt(typing, x):
    """Square root, correctly rounded."""
    return x(x), lambda context, builder, sig, args: _call(builder, "sqrt", args[0])


# ---- choosing


def _chooser(compare):
    @intrinsic
    def choose(typing, x, y, a, b):
        def generate(context, builder, sig, args):
            return builder.select(compare(builder, args[0], args[1]), args[2], args[3])

        return a(x, y, a, b), generate

    return choose


where_le = _chooser(lambda b, x, y: b.fcmp_ordered("<=", x, y))
"""a where x <= y, else b; b where one of them is no number."""
where_lt = _chooser(lambda b, x, y: b.fcmp_ordered("<", x, y))
where_eq = _chooser(lambda b, x, y: b.fcmp_ordered("==", x, y))
where_above = _chooser(lambda b, x, y: b.or_(b.fcmp_ordered(">", x, y), b.fcmp_unordered("uno", x, x)))
"""a where x > y or x is no number, else b: how torch takes a maximum."""


@intrinsic
def first_lanes(typing, count, x):
    """x in the first lanes, zero in the others."""

    def generate(context, builder, sig, args):
        lanes = sig.args[1].lanes
        numbers = ir.Constant(ir.VectorType(INT, lanes), [ir.Constant(INT, k) for k in range(lanes)])
        limit = builder.trunc(args[0], INT)
        kind = ir.VectorType(INT, lanes)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), limit, ir.Constant(INT, 0))
        limits = builder.shuffle_vector(
            first, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [ir.Constant(INT, 0)] * lanes)
        )
        return builder.select(builder.icmp_signed("<", numbers, limits), args[1], _constant(args[1].type, 0.0))

    return x(types.intp, x), generate


# ---- functions by polynomials


def _polynomial(builder, x, coefficients):
    """Horner's rule, highest power first."""
    value = _constant(x.type, coefficients[0])
    for coefficient in coefficients[1:]:
        value = _fma(builder, value, x, _constant(x.type, coefficient))
    return value


def _exp(builder, x):
    """exp(x) by 2^k times a polynomial on [-ln2/2, ln2/2]; what is no number stays so.

    Results below the smallest normal number are rounded to it: a softmax has no use for less.
    """
    kind, c = x.type, lambda value: _constant(x.type, value)
    ints = ir.VectorType(INT, kind.count)
    v = builder.select(builder.fcmp_ordered(">", x, c(88.0)), c(88.0), x)
    v = builder.select(builder.fcmp_ordered("<", v, c(-87.0)), c(-87.0), v)
    half = builder.select(builder.fcmp_ordered("<", v, c(0.0)), c(-0.5), c(0.5))
    k = builder.fptosi(_fma(builder, v, c(1.0 / math.log(2.0)), half), ints)
    f = builder.sitofp(k, kind)
    # ln 2 in two parts, so that the subtraction is exact.
    r = _fma(builder, f, c(-0.693359375), v)
    r = _fma(builder, f, c(2.12194440e-4), r)
    tail = _polynomial(
        builder,
        r,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
    mantissa = _fma(builder, tail, builder.fmul(r, r), builder.fadd(r, c(1.0)))
    power = builder.shl(builder.add(k, _constant(kind, 127, INT)), _constant(kind, 23, INT))
    value = builder.fmul(mantissa, builder.bitcast(power, kind))
    value = builder.select(builder.fcmp_ordered(">", x, c(88.7)), c(math.inf), value)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)


def _size(builder, x):
    return _call(builder, "fabs", x)


def _signed(builder, size, x):
    return _call(builder, "copysign", size, x)


def _tanh(builder, x):
    """A polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel, and that formula beyond."""
    c = lambda value: _constant(x.type, value)  # noqa: E731
    size, square = _size(builder, x), builder.fmul(x, x)
    near = _polynomial(
        builder,
        square,
        (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1),
    )
    near = _fma(builder, builder.fmul(near, square), x, x)
    grown = _exp(builder, builder.fadd(size, size))
    far = builder.fsub(c(1.0), builder.fdiv(c(2.0), builder.fadd(grown, c(1.0))))
    return builder.select(builder.fcmp_ordered("<", size, c(0.625)), near, _signed(builder, far, x))


def _sigmoid(builder, x):
    """By exp(-|x|), which cannot overflow."""
    c = lambda value: _constant(x.type, value)  # noqa: E731
    small = _exp(builder, builder.fneg(_size(builder, x)))
    whole = builder.fadd(c(1.0), small)
    numerator = builder.select(builder.fcmp_ordered("<", x, c(0.0)), small, c(1.0))
    return builder.fdiv(numerator, whole)


# erfc(x) = t * exp(-x^2 + P(t)) with t = 1 / (1 + x / 2), for x >= 0 (a Chebyshev fit, highest power first).
_ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def _normal_cdf(builder, x):
    """The share of a standard normal below x."""
    c = lambda value: _constant(x.type, value)  # noqa: E731
    z = builder.fmul(_size(builder, x), c(math.sqrt(0.5)))
    t = builder.fdiv(c(1.0), _fma(builder, z, c(0.5), c(1.0)))
    exponent = builder.fadd(builder.fneg(builder.fmul(z, z)), _polynomial(builder, t, _ERFC))
    tail = builder.fmul(builder.fmul(c(0.5), t), _exp(builder, exponent))
    return builder.select(builder.fcmp_ordered("<", x, c(0.0)), tail, builder.fsub(c(1.0), tail))


def _function(generate_value):
    @intrinsic
    def function(typing, x):
        return x(x), lambda context, builder, sig, args: generate_value(builder, args[0])

    return function


exp = _function(_exp)
tanh = _function(_tanh)
sigmoid = _function(_sigmoid)
normal_cdf = _function(_normal_cdf)
