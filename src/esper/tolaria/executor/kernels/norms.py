"""batch_norm and group_norm (a layer norm is a group norm of one group)."""

from __future__ import annotations

import numpy as np

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.kernels.base import F, jit
from esper.tolaria.executor.simd import (
    first_lanes,
    fma,
    load,
    splat,
    sqrt,
    store,
    total,
    where_le,
    where_lt,
    zero16,
    zero64,
)


@jit
def sum_of(A, at, P, R, rows):
    """The sum of P pixels of the first rows."""
    z, z4 = zero16(), zero64()
    if rows == R:
        n, s4, s = 0, z4, z
        while n + 64 <= P * R:
            s4 = s4 + load(A, at + n, z4)
            n += 64
        while n < P * R:
            s = s + load(A, at + n, z)
            n += 16
        return total(s4) + total(s)
    s = z
    for i in range(P):
        for n in range(0, rows, 16):
            s = s + first_lanes(rows - n, load(A, at + i * R + n, z))
    return total(s)


@jit
def sum_of_squares(A, at, P, R, rows, mean):
    """The sum of (value - mean)^2."""
    z, z4 = zero16(), zero64()
    m = splat(mean, z)
    if rows == R:
        n, s4, s, m4 = 0, z4, z, splat(mean, z4)
        while n + 64 <= P * R:
            d4 = load(A, at + n, z4) - m4
            s4 = fma(d4, d4, s4)
            n += 64
        while n < P * R:
            d = load(A, at + n, z) - m
            s = fma(d, d, s)
            n += 16
        return total(s4) + total(s)
    s = z
    for i in range(P):
        for n in range(0, rows, 16):
            d = first_lanes(rows - n, load(A, at + i * R + n, z) - m)
            s = fma(d, d, s)
    return total(s)


@jit
def batch_norm_forward(op, const, mem, R, rows, train):
    A, saved, p, stats = mem.A, mem.saved, mem.p, mem.stats
    z = zero16()
    C, P, w, b, stat, save = op[o.IN], op[o.H] * op[o.W], op[o.WEIGHT], op[o.BIAS], op[o.STAT], op[o.SAVE]
    relu, eps, momentum, count = op[o.MODE] != 0, const[o.CONST_S], const[o.CONST_T], F(P * rows)
    for c in range(C):
        x, y = (op[o.X] + c * P) * R, (op[o.Y] + c * P) * R
        if train:
            mean = sum_of(A, x, P, R, rows) / count
            var = sum_of_squares(A, x, P, R, rows, mean) / count
            stats[stat + c] = (F(1) - momentum) * stats[stat + c] + momentum * mean
            unbiased = var * (count / (count - F(1)))
            stats[stat + C + c] = (F(1) - momentum) * stats[stat + C + c] + momentum * unbiased
        else:
            mean, var = stats[stat + c], stats[stat + C + c]
        rstd = F(1) / np.sqrt(var + eps)
        saved[save + 2 * c] = mean
        saved[save + 2 * c + 1] = rstd
        gain = rstd * p[w + c] if w >= 0 else rstd
        shift = (p[b + c] if b >= 0 else F(0)) - mean * gain
        g, s = splat(gain, z), splat(shift, z)
        for n in range(0, P * R, 16):
            v = fma(load(A, x + n, z), g, s)
            store(A, y + n, where_lt(v, z, z, v) if relu else v)


@jit
def batch_norm_backward(op, mem, R, rows):
    A, G, saved, p, dp = mem.A, mem.G, mem.saved, mem.p, mem.dp
    z = zero16()
    C, P, w, b, save = op[o.IN], op[o.H] * op[o.W], op[o.WEIGHT], op[o.BIAS], op[o.SAVE]
    relu, add, count = op[o.MODE] != 0, op[o.ADD_X] != 0, F(P * rows)
    for c in range(C):
        x, y = (op[o.X] + c * P) * R, (op[o.Y] + c * P) * R
        mean, rstd = saved[save + 2 * c], saved[save + 2 * c + 1]
        m, s, t = splat(mean, z), z, z
        for n in range(0, P * R, 16):
            g = load(G, y + n, z)
            if relu:
                g = where_le(load(A, y + n, z), z, z, g)
                store(G, y + n, g)
            s = s + g
            t = fma(g, load(A, x + n, z) - m, t)
        sum_g, sum_gx = total(s), total(t) * rstd
        if w >= 0:
            dp[w + c] = sum_gx
        if b >= 0:
            dp[b + c] = sum_g
        if not op[o.NEED_X]:
            continue
        k = rstd * p[w + c] if w >= 0 else rstd
        kg, k0, kx = splat(k, z), splat(-(k * sum_g / count), z), splat(-(k * sum_gx * rstd / count), z)
        for i in range(P):
            for n in range(0, R, 16):
                at = i * R + n
                v = fma(kx, load(A, x + at, z) - m, fma(kg, load(G, y + at, z), k0))
                if n + 16 > rows:
                    v = first_lanes(rows - n, v)
                store(G, x + at, load(G, x + at, z) + v if add else v)


@jit
def group_norm_rows(op, const, mem, R, n, z):
    """As many rows as `z` has lanes, from row n on."""
    A, p = mem.A, mem.p
    groups, P, w, b = op[o.GROUPS], op[o.H] * op[o.W], op[o.WEIGHT], op[o.BIAS]
    relu, per = op[o.MODE] != 0, op[o.IN] // op[o.GROUPS]
    count = per * P
    inverse, eps = splat(F(1) / F(count), z), splat(const[o.CONST_S], z)
    for g in range(groups):
        x, y, save = (op[o.X] + g * count) * R + n, (op[o.Y] + g * count) * R + n, (op[o.SAVE] + 2 * g) * R + n
        s, q = z, z
        for i in range(count):
            s = s + load(A, x + i * R, z)
        mean = s * inverse
        for i in range(count):
            d = load(A, x + i * R, z) - mean
            q = fma(d, d, q)
        rstd = splat(F(1), z) / sqrt(fma(q, inverse, eps))
        store(A, save, mean)
        store(A, save + R, rstd)
        for c in range(per):
            gain = rstd * splat(p[w + g * per + c], z) if w >= 0 else rstd
            shift = splat(p[b + g * per + c], z) if b >= 0 else z
            for i in range(c * P, (c + 1) * P):
                v = fma(load(A, x + i * R, z) - mean, gain, shift)
                store(A, y + i * R, where_lt(v, z, z, v) if relu else v)


@jit
def group_norm_backward_rows(op, mem, R, n, z):
    """The same rows backward. Gradients of parameters add up over the calls, from row 0 on."""
    A, G, p, dp = mem.A, mem.G, mem.p, mem.dp
    groups, P, w, b = op[o.GROUPS], op[o.H] * op[o.W], op[o.WEIGHT], op[o.BIAS]
    relu, add, per = op[o.MODE] != 0, op[o.ADD_X] != 0, op[o.IN] // op[o.GROUPS]
    count = per * P
    inverse = splat(F(1) / F(count), z)
    for g in range(groups):
        x, y, save = (op[o.X] + g * count) * R + n, (op[o.Y] + g * count) * R + n, (op[o.SAVE] + 2 * g) * R + n
        mean, rstd = load(A, save, z), load(A, save + R, z)
        s, t = z, z
        for c in range(per):
            sc, tc = z, z
            for i in range(c * P, (c + 1) * P):
                u = load(G, y + i * R, z)
                if relu:
                    u = where_le(load(A, y + i * R, z), z, z, u)
                    store(G, y + i * R, u)
                sc = sc + u
                tc = fma(u, (load(A, x + i * R, z) - mean) * rstd, tc)
            k = g * per + c
            if w >= 0:
                gain = splat(p[w + k], z)
                s, t = fma(gain, sc, s), fma(gain, tc, t)
                dp[w + k] = (dp[w + k] if n > 0 else F(0)) + total(tc)
            else:
                s, t = s + sc, t + tc
            if b >= 0:
                dp[b + k] = (dp[b + k] if n > 0 else F(0)) + total(sc)
        if not op[o.NEED_X]:
            continue
        s, t = s * inverse, t * inverse
        for c in range(per):
            gain = splat(p[w + g * per + c] if w >= 0 else F(1), z)
            for i in range(c * P, (c + 1) * P):
                scaled = (load(A, x + i * R, z) - mean) * rstd
                v = rstd * ((gain * load(G, y + i * R, z) - s) - scaled * t)
                store(G, x + i * R, load(G, x + i * R, z) + v if add else v)


@jit
def group_norm_forward(op, const, mem, R):
    whole = R // 64 * 64
    for n in range(0, whole, 64):
        group_norm_rows(op, const, mem, R, n, zero64())
    for n in range(whole, R, 16):
        group_norm_rows(op, const, mem, R, n, zero16())


@jit
def group_norm_backward(op, mem, R):
    whole = R // 64 * 64
    for n in range(0, whole, 64):
        group_norm_backward_rows(op, mem, R, n, zero64())
    for n in range(whole, R, 16):
        group_norm_backward_rows(op, mem, R, n, zero16())
