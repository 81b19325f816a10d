"""Value by value: activation, scale, mix, multiply."""

from __future__ import annotations

import math

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.kernels.base import F, jit
from esper.tolaria.executor.simd import (
    exp,
    fma,
    load,
    normal_cdf,
    sigmoid,
    splat,
    store,
    tanh,
    total,
    where_le,
    where_lt,
    zero16,
)


@jit
def activation_forward(op, mem, R):
    A = mem.A
    z = zero16()
    x, y, count, mode = op[o.X] * R, op[o.Y] * R, op[o.IN] * op[o.H] * op[o.W] * R, op[o.MODE]
    for n in range(0, count, 16):
        v = load(A, x + n, z)
        if mode == o.RELU:
            v = where_lt(v, z, z, v)
        elif mode == o.GELU:
            v = v * normal_cdf(v)
        elif mode == o.TANH:
            v = tanh(v)
        elif mode == o.SIGMOID:
            v = sigmoid(v)
        else:
            v = v * sigmoid(v)
        store(A, y + n, v)


@jit
def activation_backward(op, mem, R):
    A, G = mem.A, mem.G
    z = zero16()
    one, minus_half, density = splat(F(1), z), splat(F(-0.5), z), splat(F(1 / math.sqrt(2 * math.pi)), z)
    x, y, count, mode = op[o.X] * R, op[o.Y] * R, op[o.IN] * op[o.H] * op[o.W] * R, op[o.MODE]
    add = op[o.ADD_X] != 0
    for n in range(0, count, 16):
        g = load(G, y + n, z)
        if mode == o.RELU:
            d = where_le(load(A, y + n, z), z, z, g)
        elif mode == o.GELU:
            v = load(A, x + n, z)
            d = g * fma(v * density, exp(v * v * minus_half), normal_cdf(v))
        elif mode == o.TANH:
            v = load(A, y + n, z)
            d = g * (one - v * v)
        elif mode == o.SIGMOID:
            v = load(A, y + n, z)
            d = g * (v * (one - v))
        else:
            v = load(A, x + n, z)
            s = sigmoid(v)
            d = g * (s * fma(v, one - s, one))
        store(G, x + n, load(G, x + n, z) + d if add else d)


@jit
def factor(op, const, mem):
    """s of scale, mix and multiply."""
    return mem.scalars[op[o.SCALAR]] if op[o.SCALAR] >= 0 else const[o.CONST_S]


@jit
def scale_forward(op, const, mem, R):
    A, p = mem.A, mem.p
    z = zero16()
    C, span, w, b = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], op[o.BIAS]
    s, t = factor(op, const, mem), const[o.CONST_T]
    for c in range(C):
        x, y = op[o.X] * R + c * span, op[o.Y] * R + c * span
        gain = splat(s * p[w + c] if w >= 0 else s, z)
        shift = splat(p[b + c] + t if b >= 0 else t, z)
        for n in range(0, span, 16):
            store(A, y + n, fma(load(A, x + n, z), gain, shift))


@jit
def scale_backward(op, const, mem, R):
    A, G, p, dp = mem.A, mem.G, mem.p, mem.dp
    z = zero16()
    C, span, w, b = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], op[o.BIAS]
    s, add, need = factor(op, const, mem), op[o.ADD_X] != 0, op[o.NEED_X] != 0
    for c in range(C):
        x, y = op[o.X] * R + c * span, op[o.Y] * R + c * span
        gain = splat(s * p[w + c] if w >= 0 else s, z)
        sum_g, sum_gx = z, z
        for n in range(0, span, 16):
            g = load(G, y + n, z)
            sum_g = sum_g + g
            sum_gx = fma(g, load(A, x + n, z), sum_gx)
            if need:
                store(G, x + n, fma(gain, g, load(G, x + n, z)) if add else gain * g)
        if w >= 0:
            dp[w + c] = s * total(sum_gx)
        if b >= 0:
            dp[b + c] = total(sum_g)


@jit
def mix_forward(op, const, mem, R):
    A, p = mem.A, mem.p
    v = zero16()
    C, span, w, s = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], factor(op, const, mem)
    for c in range(C):
        x, y, z = op[o.X] * R + c * span, op[o.Y] * R + c * span, op[o.Z] * R + c * span
        gain = splat(s * p[w + c] if w >= 0 else s, v)
        for n in range(0, span, 16):
            store(A, y + n, fma(gain, load(A, z + n, v), load(A, x + n, v)))


@jit
def mix_backward(op, const, mem, R):
    A, G, p, dp = mem.A, mem.G, mem.p, mem.dp
    v = zero16()
    C, span, w, s = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], factor(op, const, mem)
    need_x, add_x, need_z, add_z = op[o.NEED_X] != 0, op[o.ADD_X] != 0, op[o.NEED_Z] != 0, op[o.ADD_Z] != 0
    for c in range(C):
        x, y, z = op[o.X] * R + c * span, op[o.Y] * R + c * span, op[o.Z] * R + c * span
        gain = splat(s * p[w + c] if w >= 0 else s, v)
        sum_gz = v
        for n in range(0, span, 16):
            g = load(G, y + n, v)
            if w >= 0:
                sum_gz = fma(g, load(A, z + n, v), sum_gz)
            if need_x:
                store(G, x + n, load(G, x + n, v) + g if add_x else g)
            if need_z:
                store(G, z + n, fma(gain, g, load(G, z + n, v)) if add_z else gain * g)
        if w >= 0:
            dp[w + c] = s * total(sum_gz)


@jit
def multiply_forward(op, const, mem, R):
    A = mem.A
    v = zero16()
    C, P, mode, s = op[o.IN], op[o.H] * op[o.W], op[o.MODE], splat(factor(op, const, mem), v)
    for c in range(C):
        x, y = (op[o.X] + c * P) * R, (op[o.Y] + c * P) * R
        z = (op[o.Z] + (c * P if mode == o.SAME else c if mode == o.PER_CHANNEL else 0)) * R
        step = R if mode == o.SAME else 0
        for i in range(P):
            for n in range(0, R, 16):
                store(A, y + i * R + n, s * (load(A, x + i * R + n, v) * load(A, z + i * step + n, v)))


@jit
def multiply_backward(op, const, mem, R):
    A, G = mem.A, mem.G
    v = zero16()
    C, P, mode, s = op[o.IN], op[o.H] * op[o.W], op[o.MODE], splat(factor(op, const, mem), v)
    need_x, add_x, need_z, add_z = op[o.NEED_X] != 0, op[o.ADD_X] != 0, op[o.NEED_Z] != 0, op[o.ADD_Z] != 0
    for c in range(C):
        x, y = (op[o.X] + c * P) * R, (op[o.Y] + c * P) * R
        z = (op[o.Z] + (c * P if mode == o.SAME else c if mode == o.PER_CHANNEL else 0)) * R
        step = R if mode == o.SAME else 0
        for n in range(0, R, 16):
            sum_gx = v
            for i in range(P):
                at = i * R + n
                g = s * load(G, y + at, v)
                gz = g * load(A, x + at, v)
                if need_x:
                    d = g * load(A, z + i * step + n, v)
                    store(G, x + at, load(G, x + at, v) + d if add_x else d)
                if mode == o.SAME:
                    if need_z:
                        store(G, z + at, load(G, z + at, v) + gz if add_z else gz)
                else:
                    sum_gx = sum_gx + gz
            if mode != o.SAME and need_z:
                first = mode == o.PER_CHANNEL or c == 0
                store(G, z + n, sum_gx if first and not add_z else load(G, z + n, v) + sum_gx)
