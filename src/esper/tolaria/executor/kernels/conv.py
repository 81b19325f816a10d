"""Convolutions, and linear layers: a linear layer is a convolution of one pixel."""

from __future__ import annotations

from typing import NamedTuple

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.kernels.base import BLOCK, WIDE, copy, jit, zero_block, zero_fill
from esper.tolaria.executor.kernels.norms import sum_of
from esper.tolaria.executor.simd import fma_n, load, outer_n, splat, store, store_totals, zero16, zeros_for


class Taps(NamedTuple):
    """How a pass walks through its inputs and weights: distances in floats."""

    ins: int
    k: int
    x_plane: int
    row: int
    col: int
    y_plane: int
    next_out: int
    next_in: int
    next_tap: int


class Runs(NamedTuple):
    """Pixels whose rows lie side by side, in x as in y: `span` floats, rows x cols times."""

    rows: int
    cols: int
    span: int
    x_row: int
    x_col: int
    y_row: int
    y_col: int


@jit
def runs_of(k, stride, height, width, x_width, R):
    """Of height x width outputs over inputs of `x_width` pixels per line."""
    x_row, x_col, y_row = x_width * stride * R, stride * R, width * R
    if k == 1 and stride == 1:
        return Runs(1, 1, height * width * R, x_row, x_col, y_row, R)
    if stride > 1:
        return Runs(height, width, R, x_row, x_col, y_row, R)
    return Runs(height, 1, width * R, x_row, x_col, y_row, R)


@jit
def frame_images(A, x, C, H, W, R, out, height, width, edge, step):
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


# ---- values, and gradients of values


@jit
def conv_forward(op, mem, R):
    """y = w * x + bias."""
    k, edge, groups, H, W = op[o.K], op[o.PAD], op[o.GROUPS], op[o.H], op[o.W]
    taps, ig, og = k * k, op[o.IN] // groups, op[o.OUT] // groups
    height, width, X, x = H + 2 * edge, W + 2 * edge, mem.A, op[o.X] * R
    if edge > 0:
        frame_images(X, x, op[o.IN], H, W, R, mem.frame, height, width, edge, 1)
        X, x = mem.frame, 0
    runs = runs_of(k, op[o.STRIDE], op[o.HO], op[o.WO], width, R)
    row, col = op[o.DILATION] * width * R, op[o.DILATION] * R
    t = Taps(ig, k, height * width * R, row, col, op[o.HO] * op[o.WO] * R, ig * taps, taps, 1)
    for g in range(groups):
        weight, bias = op[o.WEIGHT] + g * og * ig * taps, op[o.BIAS] + g * og if op[o.BIAS] >= 0 else -1
        conv_group(
            X, x + g * ig * t.x_plane, mem.A, op[o.Y] * R + g * og * t.y_plane, mem.p, weight, bias, og, t, runs, False
        )


@jit
def conv_inputs(op, mem, R):
    """The gradient of x: that of y, stride by stride apart, under the mirrored taps."""
    k, groups, stride, HO, WO = op[o.K], op[o.GROUPS], op[o.STRIDE], op[o.HO], op[o.WO]
    taps, ig, og, reach = k * k, op[o.IN] // groups, op[o.OUT] // groups, op[o.DILATION] * (k - 1)
    height, width, Y, y = op[o.H] + reach, op[o.W] + reach, mem.G, op[o.Y] * R
    if height != HO or width != WO or stride != 1:
        frame_images(Y, y, op[o.OUT], HO, WO, R, mem.frame, height, width, reach - op[o.PAD], stride)
        Y, y = mem.frame, 0
    runs = runs_of(k, 1, op[o.H], op[o.W], width, R)
    row, col = op[o.DILATION] * width * R, op[o.DILATION] * R
    t = Taps(og, k, height * width * R, row, col, op[o.H] * op[o.W] * R, taps, ig * taps, -1)
    for g in range(groups):
        weight = op[o.WEIGHT] + taps - 1 + g * og * ig * taps
        x = op[o.X] * R + g * ig * t.y_plane
        conv_group(Y, y + g * og * t.x_plane, mem.G, x, mem.p, weight, -1, ig, t, runs, op[o.ADD_X] != 0)


@jit
def conv_group(X, x, Y, y, w, weight, bias, outs, t, runs, add):
    """All output channels of a group, four at a time as long as there are four."""
    zb, zt = zero_block(), zero16()
    o0 = 0
    while o0 < outs:
        many = 4 if outs - o0 >= 4 else 1
        at, b = weight + o0 * t.next_out, bias + o0 if bias >= 0 else -1
        for a in range(runs.rows):
            for c in range(runs.cols):
                xq, yq = x + a * runs.x_row + c * runs.x_col, y + o0 * t.y_plane + a * runs.y_row + c * runs.y_col
                if many == 4:
                    conv_run(X, xq, Y, yq, w, at, b, t, runs.span, add, (zb, zb, zb, zb), (zt, zt, zt, zt))
                else:
                    conv_run(X, xq, Y, yq, w, at, b, t, runs.span, add, (zb,), (zt,))
        o0 += many


@jit
def conv_run(X, x, Y, y, w, weight, bias, t, span, add, blocks, rest):
    """A run of pixels, in blocks as wide as the registers allow."""
    whole = span // BLOCK * BLOCK
    conv_values(X, x, Y, y, 0, whole, BLOCK, w, weight, bias, t, add, blocks)
    if whole < span:
        conv_values(X, x, Y, y, whole, span, 16, w, weight, bias, t, add, rest)


@jit
def conv_values(X, x, Y, y, first, last, lanes, w, weight, bias, t, add, sums):
    """As many output channels as `sums` (zeros) is long, over consecutive values."""
    z = sums[0]
    for n in range(first, last, lanes):
        s, tap = sums, weight
        for ty in range(t.k):
            for tx in range(t.k):
                xq, wq = x + ty * t.row + tx * t.col + n, tap
                for _ in range(t.ins):
                    s = fma_n(s, w, wq, t.next_out, load(X, xq, z))
                    xq += t.x_plane
                    wq += t.next_in
                tap += t.next_tap
        for j in range(len(s)):
            q, v = y + j * t.y_plane + n, s[j]
            if bias >= 0:
                v = v + splat(w[bias + j], z)
            store(Y, q, load(Y, q, z) + v if add else v)


# ---- gradients of weights


@jit
def conv_weights(op, mem, R):
    """Gradients of weights and bias. Three taps of a row, or four inputs of a 1x1 kernel, share their loads."""
    z, G, dp = zero16(), mem.G, mem.dp
    H, W, k, edge, groups, dil = op[o.H], op[o.W], op[o.K], op[o.PAD], op[o.GROUPS], op[o.DILATION]
    g, plane = op[o.Y] * R, op[o.HO] * op[o.WO] * R
    if op[o.BIAS] >= 0:
        for c in range(op[o.OUT]):
            dp[op[o.BIAS] + c] = sum_of(G, g + c * plane, op[o.HO] * op[o.WO], R, R)
    X, x, height, width = mem.A, op[o.X] * R, H + 2 * edge, W + 2 * edge
    if edge > 0:
        frame_images(X, x, op[o.IN], H, W, R, mem.frame, height, width, edge, 1)
        X, x = mem.frame, 0
    runs = runs_of(k, op[o.STRIDE], op[o.HO], op[o.WO], width, R)
    ig, og, x_plane = op[o.IN] // groups, op[o.OUT] // groups, height * width * R
    next_out = ig * k * k
    for group in range(groups):
        g0, w0 = g + group * og * plane, op[o.WEIGHT] + group * og * next_out
        i = 0
        while i < ig:
            x0 = x + (group * ig + i) * x_plane
            if k == 1 and ig - i >= 4:
                weight_blocks(X, x0, x_plane, G, g0, plane, runs, dp, w0 + i, next_out, og, (z, z, z, z))
                i += 4
                continue
            for ty in range(k):
                tap, wq = x0 + ty * dil * width * R, w0 + (i * k + ty) * k
                if k == 3:
                    weight_blocks(X, tap, dil * R, G, g0, plane, runs, dp, wq, next_out, og, (z, z, z))
                else:
                    for tx in range(k):
                        weight_blocks(X, tap + tx * dil * R, 0, G, g0, plane, runs, dp, wq + tx, next_out, og, (z,))
            i += 1


@jit
def weight_blocks(X, x, x_step, G, g, g_plane, runs, dp, at, next_out, outs, xs):
    """The gradients of len(xs) weights of all outputs, as many outputs at a time as the registers hold."""
    j = 0
    while j < outs:
        gq, wq, many = g + j * g_plane, at + j * next_out, 1
        if WIDE and outs - j >= 8 and len(xs) < 4:
            many = 8
            weight_block(X, x, x_step, G, gq, g_plane, runs, dp, wq, next_out, zeros_for(xs, 8), xs)
        elif WIDE and outs - j >= 4:
            many = 4
            weight_block(X, x, x_step, G, gq, g_plane, runs, dp, wq, next_out, zeros_for(xs, 4), xs)
        elif not WIDE and outs - j >= 2:
            many = 2
            weight_block(X, x, x_step, G, gq, g_plane, runs, dp, wq, next_out, zeros_for(xs, 2), xs)
        else:
            weight_block(X, x, x_step, G, gq, g_plane, runs, dp, wq, next_out, zeros_for(xs, 1), xs)
        j += many


@jit
def weight_block(X, x, x_step, G, g, g_plane, runs, dp, at, next_out, sums, xs):
    """dp[at + j*next_out + t] = sum over pixels and rows of g[j] * x[t], for all j and t at once."""
    s = sums
    for a in range(runs.rows):
        for c in range(runs.cols):
            xq, gq = x + a * runs.x_row + c * runs.x_col, g + a * runs.y_row + c * runs.y_col
            for n in range(0, runs.span, 16):
                s = outer_n(s, G, gq + n, g_plane, X, xq + n, x_step, xs)
    store_totals(dp, at, next_out, s, xs)
