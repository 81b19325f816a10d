"""Windows and places of pixels: max_pool, avg_pool, resample, mean."""

from __future__ import annotations

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.kernels.base import F, copy, jit, zero_fill
from esper.tolaria.executor.simd import load, splat, store, where_above, where_eq, zero16


@jit
def max_pool_forward(op, mem, R):
    A = mem.A
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
def max_pool_backward(op, mem, R):
    """The first largest pixel of a window takes its gradient, as in torch."""
    A, G = mem.A, mem.G
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
def avg_pool_forward(op, mem, R):
    A = mem.A
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
def avg_pool_backward(op, mem, R):
    G = mem.G
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
def resample_forward(op, mem, R):
    A = mem.A
    C, H, W, HO, WO = op[o.IN], op[o.H], op[o.W], op[o.HO], op[o.WO]
    for c in range(C):
        x, y = (op[o.X] + c * H * W) * R, (op[o.Y] + c * HO * WO) * R
        for a in range(HO):
            row = op[o.ROW] + a * op[o.ROW_NUM] // op[o.ROW_DEN]
            for b in range(WO):
                col = op[o.COL] + b * op[o.COL_NUM] // op[o.COL_DEN]
                copy(A, x + (row * W + col) * R, A, y + (a * WO + b) * R, R)


@jit
def resample_backward(op, mem, R):
    G = mem.G
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
def mean_forward(op, mem, R):
    A = mem.A
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
def mean_backward(op, mem, R):
    G = mem.G
    z = zero16()
    C, P, add = op[o.IN], op[o.H] * op[o.W], op[o.ADD_X] != 0
    share = splat(F(1) / F(P), z)
    for c in range(C):
        for n in range(0, R, 16):
            d = load(G, (op[o.Y] + c) * R + n, z) * share
            for i in range(P):
                at = (op[o.X] + c * P + i) * R + n
                store(G, at, load(G, at, z) + d if add else d)
