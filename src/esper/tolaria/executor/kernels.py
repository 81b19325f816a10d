"""The native executor: one compiled function runs an epoch of any operation list (see ops.py).

Layout of every buffer: [channel, pixel, row], rows innermost and padded to R, a multiple of 16, so every loop runs over
whole vectors of rows. Padding rows hold numbers without meaning in activations and exact zeros in gradients; kernels
that sum over rows of activations leave them out. No kernel allocates, and every sum has one fixed order.

Names: A activations, G their gradients, p parameters, dp their gradients; x, y, z positions in A and G; P pixels.
Nothing is bounds-checked: `program.check` has looked at an operation list before it comes here.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numba
import numpy as np
from filelock import FileLock
from llvmlite import binding as llvm

from esper.tolaria.executor import ops as o
from esper.tolaria.executor import simd
from esper.tolaria.executor.simd import (
    exp,
    first_lanes,
    fma,
    fma_n,
    load,
    normal_cdf,
    outer_n,
    sigmoid,
    splat,
    sqrt,
    store,
    tanh,
    total,
    where_above,
    where_eq,
    where_le,
    where_lt,
    zero16,
    zero64,
    zeros_for,
)

F = np.float32
WIDE = bool(llvm.get_host_cpu_features().get("avx512f", False))
"""32 registers of 16 lanes. How work is cut into registers never changes a bit."""
zero_block = zero64 if WIDE else zero16
BLOCK = 64 if WIDE else 16

OPTIONS = {"fastmath": False, "error_model": "numpy", "boundscheck": False, "nogil": True}
jit = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)


# ---- convolutions


@jit
def zero_fill(A, start, stop):
    z = zero16()
    for n in range(start, stop, 16):
        store(A, n, z)


@jit
def copy(A, source, B, target, count):
    z = zero16()
    for n in range(0, count, 16):
        store(B, target + n, load(A, source + n, z))


@jit
def frame(A, x, C, H, W, R, out, height, width, edge, step):
    """Copies images into a frame of zeros, their pixels `step` apart."""
    for c in range(C):
        for a in range(height):
            at = (c * height + a) * width * R
            source = a - edge
            if source < 0 or source % step != 0 or source // step >= H:
                zero_fill(out, at, at + width * R)
                continue
            start = x + (c * H + source // step) * W * R
            if step == 1:
                zero_fill(out, at, at + edge * R)
                copy(A, start, out, at + edge * R, W * R)
                zero_fill(out, at + (edge + W) * R, at + width * R)
            else:
                zero_fill(out, at, at + width * R)
                for b in range(W):
                    copy(A, start + b * R, out, at + (edge + b * step) * R, R)


@jit
def conv_values(
    X, x, x_plane, Y, y, y_plane, first, last, lanes,
    w, at, next_out, next_in, next_tap, ins, k, row, col, bias, add, sums,
):  # fmt: skip
    """As many output channels as `sums` (zeros) is long, over consecutive values."""
    z = sums[0]
    for n in range(first, last, lanes):
        s, tap = sums, at
        for ty in range(k):
            for tx in range(k):
                xq, wq = x + ty * row + tx * col + n, tap
                for _ in range(ins):
                    s = fma_n(s, w, wq, next_out, load(X, xq, z))
                    xq += x_plane
                    wq += next_in
                tap += next_tap
        for j in range(len(s)):
            q, v = y + j * y_plane + n, s[j]
            if bias >= 0:
                v = v + splat(w[bias + j], z)
            store(Y, q, load(Y, q, z) + v if add else v)


@jit
def conv(op, A, G, p, pad, R, back):
    """y = w * x + bias; backward, the gradient of x: that of y, stride by stride apart, under the mirrored taps."""
    zb, zt = zero_block(), zero16()
    k, edge, groups, stride, dil = op[o.K], op[o.PAD], op[o.GROUPS], op[o.STRIDE], op[o.DILATION]
    taps, ig, og, reach = k * k, op[o.IN] // groups, op[o.OUT] // groups, dil * (k - 1)
    if back:
        S, T, x, y, add, bias = G, G, op[o.Y] * R, op[o.X] * R, op[o.ADD_X] != 0, -1
        H, W, HO, WO, ins, outs = op[o.HO], op[o.WO], op[o.H], op[o.W], og, ig
        start, next_out, next_in, next_tap = op[o.WEIGHT] + taps - 1, taps, ig * taps, -1
        height, width, edge, apart, stride = HO + reach, WO + reach, reach - edge, stride, 1
    else:
        S, T, x, y, add, bias = A, A, op[o.X] * R, op[o.Y] * R, False, op[o.BIAS]
        H, W, HO, WO, ins, outs = op[o.H], op[o.W], op[o.HO], op[o.WO], ig, og
        start, next_out, next_in, next_tap = op[o.WEIGHT], ig * taps, taps, 1
        height, width, apart = H + 2 * edge, W + 2 * edge, 1
    if height != H or width != W or apart != 1:
        frame(S, x, ins * groups, H, W, R, pad, height, width, edge, apart)
        S, x = pad, 0
    x_plane, y_plane, row, col = height * width * R, HO * WO * R, dil * width * R, dil * R
    rows, cols, span = HO, 1, WO * R
    if k == 1 and stride == 1:
        rows, span = 1, HO * WO * R
    elif stride > 1:
        cols, span = WO, R
    whole = span // BLOCK * BLOCK
    for g in range(groups):
        o0 = 0
        while o0 < outs:
            many = 4 if outs - o0 >= 4 else 1
            wq, b = start + g * og * ig * taps + o0 * next_out, bias + g * outs + o0 if bias >= 0 else -1
            for a in range(rows):
                for c in range(cols):
                    xq = x + g * ins * x_plane + (a * width + c) * stride * R
                    yq = y + (g * outs + o0) * y_plane + (a * WO + c) * R
                    if many == 4 and whole > 0:
                        conv_values(
                            S, xq, x_plane, T, yq, y_plane, xq - xq, whole, BLOCK,
                            p, wq, next_out, next_in, next_tap, ins, k, row, col, b, add, (zb, zb, zb, zb),
                        )  # fmt: skip
                    if many == 4 and whole < span:
                        conv_values(
                            S, xq, x_plane, T, yq, y_plane, whole, span, 16,
                            p, wq, next_out, next_in, next_tap, ins, k, row, col, b, add, (zt, zt, zt, zt),
                        )  # fmt: skip
                    if many == 1 and whole > 0:
                        conv_values(
                            S, xq, x_plane, T, yq, y_plane, xq - xq, whole, BLOCK,
                            p, wq, next_out, next_in, next_tap, ins, k, row, col, b, add, (zb,),
                        )  # fmt: skip
                    if many == 1 and whole < span:
                        conv_values(
                            S, xq, x_plane, T, yq, y_plane, whole, span, 16,
                            p, wq, next_out, next_in, next_tap, ins, k, row, col, b, add, (zt,),
                        )  # fmt: skip
            o0 += many


@jit
def weight_block(X, x, x_step, G, g, g_plane, rows, cols, span, width, WO, R, stride, dp, at, next_out, sums, xs):
    """dp[at + j*next_out + t] = sum over pixels and rows of g[j] * x[t], for all j and t at once."""
    s = sums
    for a in range(rows):
        for c in range(cols):
            xq, gq = x + (a * width + c) * stride * R, g + (a * WO + c) * R
            for n in range(0, span, 16):
                s = outer_n(s, G, gq + n, g_plane, X, xq + n, x_step, xs)
    many = len(sums) // len(xs)
    for t in range(len(xs)):
        for j in range(many):
            dp[at + j * next_out + t] = total(s[t * many + j])


@jit
def weight_blocks(X, x, x_step, G, g, g_plane, rows, cols, span, width, WO, R, stride, dp, at, next_out, outs, xs):
    """The same for all outputs, as many at a time as the registers hold."""
    j = 0
    while j < outs:
        gq, wq, many = g + j * g_plane, at + j * next_out, 1
        if WIDE and outs - j >= 8 and len(xs) < 4:
            many = 8
            weight_block(
                X, x, x_step, G, gq, g_plane, rows, cols, span, width, WO, R, stride, dp, wq, next_out,
                zeros_for(xs, 8), xs,
            )  # fmt: skip
        elif WIDE and outs - j >= 4:
            many = 4
            weight_block(
                X, x, x_step, G, gq, g_plane, rows, cols, span, width, WO, R, stride, dp, wq, next_out,
                zeros_for(xs, 4), xs,
            )  # fmt: skip
        elif not WIDE and outs - j >= 2:
            many = 2
            weight_block(
                X, x, x_step, G, gq, g_plane, rows, cols, span, width, WO, R, stride, dp, wq, next_out,
                zeros_for(xs, 2), xs,
            )  # fmt: skip
        else:
            weight_block(
                X, x, x_step, G, gq, g_plane, rows, cols, span, width, WO, R, stride, dp, wq, next_out,
                zeros_for(xs, 1), xs,
            )  # fmt: skip
        j += many


@jit
def conv_weights(op, A, G, dp, pad, R):
    """Gradients of weights and bias. Three taps of a row, or four inputs of a 1x1 kernel, share their loads."""
    z = zero16()
    ins, H, W, k, edge, groups = op[o.IN], op[o.H], op[o.W], op[o.K], op[o.PAD], op[o.GROUPS]
    HO, WO, stride, dil, g = op[o.HO], op[o.WO], op[o.STRIDE], op[o.DILATION], op[o.Y] * R
    if op[o.BIAS] >= 0:
        for c in range(op[o.OUT]):
            dp[op[o.BIAS] + c] = sum_of(G, g + c * HO * WO * R, HO * WO, R, R)
    X, x, height, width = A, op[o.X] * R, H + 2 * edge, W + 2 * edge
    if edge > 0:
        frame(A, x, ins, H, W, R, pad, height, width, edge, stride // stride)
        X, x = pad, 0
    rows, cols, span = HO, 1, WO * R
    if k == 1 and stride == 1:
        rows, span = 1, HO * WO * R
    elif stride > 1:
        cols, span = WO, R
    ig, og, x_plane, plane = ins // groups, op[o.OUT] // groups, height * width * R, HO * WO * R
    next_out, zero = ig * k * k, x - x
    for group in range(groups):
        g0, w0 = g + group * og * plane, op[o.WEIGHT] + group * og * next_out
        i = zero
        while i < ig:
            x0 = x + (group * ig + i) * x_plane
            if k == 1 and ig - i >= 4:
                weight_blocks(
                    X, x0, x_plane, G, g0, plane, rows, cols, span, width, WO, R, stride,
                    dp, w0 + i, next_out, og, (z, z, z, z),
                )  # fmt: skip
                i += 4
                continue
            for ty in range(k):
                tap, wq = x0 + ty * dil * width * R, w0 + (i * k + ty) * k
                if k == 3:
                    weight_blocks(
                        X, tap, dil * R, G, g0, plane, rows, cols, span, width, WO, R, stride,
                        dp, wq, next_out, og, (z, z, z),
                    )  # fmt: skip
                else:
                    for tx in range(k):
                        weight_blocks(
                            X, tap + tx * dil * R, zero, G, g0, plane, rows, cols, span, width, WO, R, stride,
                            dp, wq + tx, next_out, og, (z,),
                        )  # fmt: skip
            i += 1


# ---- norms


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
def batch_norm_forward(op, const, A, saved, p, stats, R, rows, train):
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
def batch_norm_backward(op, A, G, saved, p, dp, R, rows):
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
def group_norm_rows(op, const, A, p, R, n, z):
    """As many rows as `z` has lanes, from row n on."""
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
def group_norm_backward_rows(op, A, G, p, dp, R, n, z):
    """The same rows backward. Gradients of parameters add up over the calls, from row 0 on."""
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
def group_norm_forward(op, const, A, p, R):
    whole = R // 64 * 64
    for n in range(0, whole, 64):
        group_norm_rows(op, const, A, p, R, n, zero64())
    for n in range(whole, R, 16):
        group_norm_rows(op, const, A, p, R, n, zero16())


@jit
def group_norm_backward(op, A, G, p, dp, R):
    whole = R // 64 * 64
    for n in range(0, whole, 64):
        group_norm_backward_rows(op, A, G, p, dp, R, n, zero64())
    for n in range(whole, R, 16):
        group_norm_backward_rows(op, A, G, p, dp, R, n, zero16())


# ---- value by value


@jit
def activation_forward(op, A, R):
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
def activation_backward(op, A, G, R):
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
def factor(op, const, scalars):
    """s of scale, mix and multiply."""
    return scalars[op[o.SCALAR]] if op[o.SCALAR] >= 0 else const[o.CONST_S]


@jit
def scale_forward(op, const, scalars, A, p, R):
    z = zero16()
    C, span, w, b = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], op[o.BIAS]
    s, t = factor(op, const, scalars), const[o.CONST_T]
    for c in range(C):
        x, y = op[o.X] * R + c * span, op[o.Y] * R + c * span
        gain = splat(s * p[w + c] if w >= 0 else s, z)
        shift = splat(p[b + c] + t if b >= 0 else t, z)
        for n in range(0, span, 16):
            store(A, y + n, fma(load(A, x + n, z), gain, shift))


@jit
def scale_backward(op, const, scalars, A, G, p, dp, R):
    z = zero16()
    C, span, w, b = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], op[o.BIAS]
    s, add, need = factor(op, const, scalars), op[o.ADD_X] != 0, op[o.NEED_X] != 0
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
def mix_forward(op, const, scalars, A, p, R):
    v = zero16()
    C, span, w, s = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], factor(op, const, scalars)
    for c in range(C):
        x, y, z = op[o.X] * R + c * span, op[o.Y] * R + c * span, op[o.Z] * R + c * span
        gain = splat(s * p[w + c] if w >= 0 else s, v)
        for n in range(0, span, 16):
            store(A, y + n, fma(gain, load(A, z + n, v), load(A, x + n, v)))


@jit
def mix_backward(op, const, scalars, A, G, p, dp, R):
    v = zero16()
    C, span, w, s = op[o.IN], op[o.H] * op[o.W] * R, op[o.WEIGHT], factor(op, const, scalars)
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
def multiply_forward(op, const, scalars, A, R):
    v = zero16()
    C, P, mode, s = op[o.IN], op[o.H] * op[o.W], op[o.MODE], splat(factor(op, const, scalars), v)
    for c in range(C):
        x, y = (op[o.X] + c * P) * R, (op[o.Y] + c * P) * R
        z = (op[o.Z] + (c * P if mode == o.SAME else c if mode == o.PER_CHANNEL else 0)) * R
        step = R if mode == o.SAME else 0
        for i in range(P):
            for n in range(0, R, 16):
                store(A, y + i * R + n, s * (load(A, x + i * R + n, v) * load(A, z + i * step + n, v)))


@jit
def multiply_backward(op, const, scalars, A, G, R):
    v = zero16()
    C, P, mode, s = op[o.IN], op[o.H] * op[o.W], op[o.MODE], splat(factor(op, const, scalars), v)
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


# ---- pixels


@jit
def max_pool_forward(op, A, R):
    z = zero16()
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    k, stride, edge = op[o.K], op[o.STRIDE], op[o.PAD]
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            top, low = max(0, a * stride - edge), min(H, a * stride - edge + k)
            for b in range(WO):
                left, right = max(0, b * stride - edge), min(W, b * stride - edge + k)
                for n in range(0, R, 16):
                    best = load(A, x + (top * W + left) * R + n, z)
                    for u in range(top, low):
                        for t in range(left, right):
                            v = load(A, x + (u * W + t) * R + n, z)
                            best = where_above(v, best, v, best)
                    store(A, y + (a * WO + b) * R + n, best)


@jit
def max_pool_backward(op, A, G, R):
    """The first largest pixel of a window takes its gradient, as in torch."""
    z = zero16()
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    k, stride, edge, add = op[o.K], op[o.STRIDE], op[o.PAD], op[o.ADD_X] != 0
    apart = stride == k and edge == 0 and HO * k >= H and WO * k >= W
    if not apart and not add:
        zero_fill(G, op[o.X] * R, (op[o.X] + C * H * W) * R)
    add = add or not apart
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            top, low = max(0, a * stride - edge), min(H, a * stride - edge + k)
            for b in range(WO):
                left, right = max(0, b * stride - edge), min(W, b * stride - edge + k)
                for n in range(0, R, 16):
                    q = y + (a * WO + b) * R + n
                    rest, best = load(G, q, z), load(A, q, z)
                    for u in range(top, low):
                        for t in range(left, right):
                            at = x + (u * W + t) * R + n
                            v = load(A, at, z)
                            d = where_eq(v, best, rest, z)
                            rest = where_eq(v, best, z, rest)
                            store(G, at, load(G, at, z) + d if add else d)


@jit
def avg_pool_forward(op, A, R):
    z = zero16()
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    k, stride = op[o.K], op[o.STRIDE]
    share = splat(F(1) / F(k * k), z)
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            for b in range(WO):
                for n in range(0, R, 16):
                    s = z
                    for u in range(k):
                        for t in range(k):
                            s = s + load(A, x + ((a * stride + u) * W + b * stride + t) * R + n, z)
                    store(A, y + (a * WO + b) * R + n, s * share)


@jit
def avg_pool_backward(op, G, R):
    z = zero16()
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    k, stride = op[o.K], op[o.STRIDE]
    share = splat(F(1) / F(k * k), z)
    if not op[o.ADD_X]:
        zero_fill(G, op[o.X] * R, (op[o.X] + C * H * W) * R)
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            for b in range(WO):
                for n in range(0, R, 16):
                    d = load(G, y + (a * WO + b) * R + n, z) * share
                    for u in range(k):
                        for t in range(k):
                            at = x + ((a * stride + u) * W + b * stride + t) * R + n
                            store(G, at, load(G, at, z) + d)


@jit
def resample_forward(op, A, R):
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            row = op[o.ROW] + a * op[o.ROW_NUM] // op[o.ROW_DEN]
            for b in range(WO):
                col = op[o.COL] + b * op[o.COL_NUM] // op[o.COL_DEN]
                copy(A, x + (row * W + col) * R, A, y + (a * WO + b) * R, R)


@jit
def resample_backward(op, G, R):
    z = zero16()
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    if not op[o.ADD_X]:
        zero_fill(G, op[o.X] * R, (op[o.X] + C * H * W) * R)
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            row = op[o.ROW] + a * op[o.ROW_NUM] // op[o.ROW_DEN]
            for b in range(WO):
                col = op[o.COL] + b * op[o.COL_NUM] // op[o.COL_DEN]
                at, q = x + (row * W + col) * R, y + (a * WO + b) * R
                for n in range(0, R, 16):
                    store(G, at + n, load(G, at + n, z) + load(G, q + n, z))


@jit
def mean_forward(op, A, R):
    z = zero16()
    C, P = op[o.IN], op[o.H] * op[o.W]
    share = splat(F(1) / F(P), z)
    for c in range(C):
        for n in range(0, R, 16):
            s = z
            for i in range(P):
                s = s + load(A, (op[o.X] + c * P + i) * R + n, z)
            store(A, (op[o.Y] + c) * R + n, s * share)


@jit
def mean_backward(op, G, R):
    z = zero16()
    C, P, add = op[o.IN], op[o.H] * op[o.W], op[o.ADD_X] != 0
    share = splat(F(1) / F(P), z)
    for c in range(C):
        for n in range(0, R, 16):
            d = load(G, (op[o.Y] + c) * R + n, z) * share
            for i in range(P):
                at = (op[o.X] + c * P + i) * R + n
                store(G, at, load(G, at, z) + d if add else d)


# ---- the loss, and seeds that learn behind the host


@jit
def log(value):
    """The natural logarithm of a positive number, by a series of our own."""
    mantissa, exponent = math.frexp(value)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    t = (mantissa - 1.0) / (mantissa + 1.0)
    square, power, series = t * t, t, 0.0
    for n in range(12):
        series += power / (2 * n + 1)
        power *= square
    return 2.0 * series + exponent * 0.6931471805599453


@jit
def loss(op, A, G, work, R, rows, targets, totals, train):
    """Adds loss and hits of the rows to the totals; in training, leaves the gradient of the mean loss in G."""
    z = zero16()
    x, K, row = op[o.X] * R, op[o.OUT], op[o.MODE]
    share = F(1) / F(rows)
    for n in range(0, rows, 16):
        top = load(A, x + n, z)
        for k in range(1, K):
            v = load(A, x + k * R + n, z)
            top = where_above(v, top, v, top)
        s = z
        for k in range(K):
            e = exp(load(A, x + k * R + n, z) - top)
            store(work, 32 + 16 * k, e)
            s = s + e
        store(work, 0, top)
        store(work, 16, s)
        product = 1.0  # the logarithm of a product of 16 sums is one logarithm instead of 16
        for j in range(min(16, rows - n)):
            wanted = A[x + targets[n + j] * R + n + j]
            product *= np.float64(work[16 + j])
            totals[row, 0] += np.float64(work[j]) - np.float64(wanted)
            if wanted == work[j]:
                hit = 1.0
                for k in range(targets[n + j]):
                    if A[x + k * R + n + j] == wanted:
                        hit = 0.0
                totals[row, 1] += hit
        totals[row, 0] += log(product)
        if train:
            shares = first_lanes(rows - n, splat(share, z) / s)
            for k in range(K):
                v = first_lanes(rows - n, load(work, 32 + 16 * k, z))
                store(G, x + k * R + n, v * shares)
            for j in range(min(16, rows - n)):
                G[x + targets[n + j] * R + n + j] -= share


@jit
def attach_backward(op, A, G, R, rows, eta, rho, decay, book):
    """One training batch of a seed whose output z learns from the gradient of the features x, which stays as it is.

    Objective per row: <g, z> + |z|^2 / (2 * eta). In its first batch (eta below zero) the seed only listens, to get an
    eta; while that is NaN so are its gradients, and the update leaves it out. `book` takes (objective, rms of z over
    rms of x).
    """
    v = zero16()
    count = op[o.IN] * op[o.H] * op[o.W]
    x, z, meter = op[o.X] * R, op[o.Z] * R, op[o.MODE]
    before = eta[meter]
    listens = before < F(0)
    pull = F(0) if listens else F(1) / (before * F(rows))
    pulls = splat(pull, v)
    hh, gg, gd, dd = v, v, v, v
    for i in range(count):
        for n in range(0, R, 16):
            at = i * R + n
            h, g, d = load(A, x + at, v), load(G, x + at, v), load(A, z + at, v)
            if n + 16 > rows:
                h, d = first_lanes(rows - n, h), first_lanes(rows - n, d)
            hh, gg, gd, dd = fma(h, h, hh), fma(g, g, gg), fma(g, d, gd), fma(d, d, dd)
            store(G, z + at, fma(pulls, d, g))
    values = F(count * rows)
    h_rms, g_rms, d_rms = np.sqrt(total(hh) / values), np.sqrt(total(gg) / values), np.sqrt(total(dd) / values)
    fresh = rho * h_rms / (F(rows) * g_rms)
    if not listens:
        book[0] = total(gd) + total(dd) * pull * F(0.5)
        book[1] = d_rms / h_rms
    if fresh > F(0) and fresh < F(np.inf):
        eta[meter] = decay * before + (F(1) - decay) * fresh if before > F(0) else fresh
    elif listens:
        eta[meter] = F(np.nan)


# ---- the update


@jit
def power(base, exponent):
    """base ** exponent by squaring: libm's differs between machines."""
    value = 1.0
    while exponent > 0:
        if exponent & 1:
            value *= base
        base *= base
        exponent >>= 1
    return value


@jit
def adamw(p, m, v, dp, start, stop, clip, step, lr, decay, beta1, beta2, eps):
    z = zero16()
    scale = splat(clip, z)
    rate = splat(F(lr / (1.0 - power(beta1, step))), z)
    spread = splat(F(1.0 / math.sqrt(1.0 - power(beta2, step))), z)
    keep, tiny = splat(F(1.0 - lr * decay), z), splat(F(eps), z)
    new1, old2, new2 = splat(F(1.0 - beta1), z), splat(F(beta2), z), splat(F(1.0 - beta2), z)
    for n in range(start, stop, 16):
        g = load(dp, n, z) * scale
        before = load(m, n, z)
        mean = fma(new1, g - before, before)
        square = fma(new2 * g, g, old2 * load(v, n, z))
        store(m, n, mean)
        store(v, n, square)
        store(p, n, load(p, n, z) * keep - rate * mean / fma(sqrt(square), spread, tiny))


@jit
def sgd(p, m, dp, start, stop, clip, lr, decay, momentum):
    z = zero16()
    scale, rate, pull, hold = splat(clip, z), splat(F(lr), z), splat(F(decay), z), splat(F(momentum), z)
    for n in range(start, stop, 16):
        value = load(p, n, z)
        g = fma(pull, value, load(dp, n, z) * scale)
        if momentum != 0.0:
            g = fma(hold, load(m, n, z), g)
            store(m, n, g)
        store(p, n, value - rate * g)


@jit
def update(p, m, v, dp, steps, tensors, groups, rates, norms, seen, silent, clip_norm, kind, hyper):
    """Clips and updates each group; group 0 is the host. A seed whose gradient is not finite is left out and counted.

    `tensors[t]` is (start, stop) in p, `groups[g]` is (first tensor, last tensor + 1), `rates[g]` is (learning rate,
    weight decay). `norms[t]` keeps the last gradient norm, `seen[g]` counts (batches with gradient, batches left out).
    """
    z = zero16()
    for g in range(len(groups)):
        if silent[g]:
            continue
        squares = F(0)
        for t in range(groups[g, 0], groups[g, 1]):
            s = z
            for n in range(tensors[t, 0], tensors[t, 1], 16):
                d = load(dp, n, z)
                s = fma(d, d, s)
            norms[t] = np.sqrt(total(s))
            squares += norms[t] * norms[t]
        norm = np.sqrt(squares)
        seen[g, 0] += 1
        if g > 0 and not norm < F(np.inf):
            seen[g, 1] += 1
            continue
        clip = clip_norm / (norm + F(1e-6))
        clip = F(1) if clip > F(1) else clip
        for t in range(groups[g, 0], groups[g, 1]):
            start, stop = tensors[t, 0], tensors[t, 1]
            steps[t] += F(1)
            if kind == 0:
                step = np.int64(steps[t])
                adamw(p, m, v, dp, start, stop, clip, step, rates[g, 0], rates[g, 1], hyper[0], hyper[1], hyper[2])
            else:
                sgd(p, m, dp, start, stop, clip, rates[g, 0], rates[g, 1], hyper[0])


# ---- the interpreter


def compile_runner(source_hash):
    """The compiled `run`. Only it is cached on disk, with everything it calls inside.

    Numba finds a stale cache by the date of the file with the cached function alone. The hash of all sources is a
    variable of the closure, which is part of the cache's key, so a change in any of them compiles anew.
    """

    def run(
        train, learn, op_list, consts, scalars, inputs, targets, rows_of, totals,
        A, G, saved, pad, p, stats, dp,
        m, v, steps, tensors, groups, rates, norms, seen, clip_norm, optimizer, hyper,
        eta, group_meter, rho, decay, books,
    ):  # fmt: skip
        """All batches: forward; in training also backward and, if it is to learn, the update."""
        if source_hash == "":
            return
        R, count, values = inputs.shape[2], len(op_list), inputs.shape[1] * inputs.shape[2]
        silent = np.zeros(len(groups), np.bool_)
        flat = inputs.reshape(-1)
        for batch in range(len(inputs)):
            rows = rows_of[batch]
            copy(flat, batch * values, A, values - values, values)
            for g in range(len(groups)):
                silent[g] = group_meter[g] >= 0 and eta[group_meter[g]] < F(0)
            for i in range(2 * count if train else count):
                back = i >= count
                op, const = (op_list[2 * count - 1 - i], consts[2 * count - 1 - i]) if back else (op_list[i], consts[i])
                kind = op[o.KIND]
                if back and not op[o.BACK]:
                    continue
                if kind == o.CONV:
                    if back:
                        conv_weights(op, A, G, dp, pad, R)
                    if not back or op[o.NEED_X]:
                        conv(op, A, G, p, pad, R, back)
                elif kind == o.BATCH_NORM:
                    if back:
                        batch_norm_backward(op, A, G, saved, p, dp, R, rows)
                    else:
                        batch_norm_forward(op, const, A, saved, p, stats, R, rows, train)
                elif kind == o.GROUP_NORM:
                    if back:
                        group_norm_backward(op, A, G, p, dp, R)
                    else:
                        group_norm_forward(op, const, A, p, R)
                elif kind == o.ACTIVATION:
                    if back:
                        activation_backward(op, A, G, R)
                    else:
                        activation_forward(op, A, R)
                elif kind == o.SCALE:
                    if back:
                        scale_backward(op, const, scalars, A, G, p, dp, R)
                    else:
                        scale_forward(op, const, scalars, A, p, R)
                elif kind == o.MIX:
                    if back:
                        mix_backward(op, const, scalars, A, G, p, dp, R)
                    else:
                        mix_forward(op, const, scalars, A, p, R)
                elif kind == o.MULTIPLY:
                    if back:
                        multiply_backward(op, const, scalars, A, G, R)
                    else:
                        multiply_forward(op, const, scalars, A, R)
                elif kind == o.MAX_POOL:
                    if back:
                        max_pool_backward(op, A, G, R)
                    else:
                        max_pool_forward(op, A, R)
                elif kind == o.AVG_POOL:
                    if back:
                        avg_pool_backward(op, G, R)
                    else:
                        avg_pool_forward(op, A, R)
                elif kind == o.RESAMPLE:
                    if back:
                        resample_backward(op, G, R)
                    else:
                        resample_forward(op, A, R)
                elif kind == o.MEAN:
                    if back:
                        mean_backward(op, G, R)
                    else:
                        mean_forward(op, A, R)
                elif kind == o.LOSS:
                    loss(op, A, G, pad, R, rows, targets[batch], totals, train)
                elif kind == o.ATTACH and back:
                    attach_backward(op, A, G, R, rows, eta, rho, decay, books[batch, op[o.MODE]])
            if train and learn:
                update(p, m, v, dp, steps, tensors, groups, rates, norms, seen, silent, clip_norm, optimizer, hyper)

    try:
        return numba.njit(cache=True, **OPTIONS)(run)
    except RuntimeError:  # there is no folder that numba may write to
        return numba.njit(**OPTIONS)(run)


SOURCES = b"".join(Path(path).read_bytes() for path in (__file__, o.__file__, simd.__file__))
run = compile_runner(hashlib.sha256(SOURCES).hexdigest())
SIGNATURE = (
    "void(b1, b1, i8[:,::1], f4[:,::1], f4[::1], f4[:,:,::1], i8[:,::1], i8[::1], f8[:,::1], "
    "f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], "
    "f4[::1], f4[::1], f4[::1], i8[:,::1], i8[:,::1], f8[:,::1], f4[::1], i8[:,::1], f4, i8, f8[::1], "
    "f4[::1], i8[::1], f4, f4, f4[:,:,::1])"
)


def make_ready() -> None:
    """Compiles `run`, or loads what was compiled before. From then on other types of arguments are refused."""
    if run.signatures:
        return
    if run.stats.cache_path is None:
        run.compile(SIGNATURE)
    else:
        # Who comes second waits, and loads what the first has compiled.
        with FileLock(Path(run.stats.cache_path) / "esper-native.lock"):
            run.compile(SIGNATURE)
    run.disable_compile()
