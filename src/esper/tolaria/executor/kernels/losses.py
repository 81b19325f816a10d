"""The loss, and attach: seeds that learn behind the host."""

from __future__ import annotations

import math

import numpy as np

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.kernels.base import F, jit
from esper.tolaria.executor.simd import exp, first_lanes, fma, load, splat, store, total, where_above, zero16


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
def loss(op, mem, R, rows, targets, totals, train):
    """Adds loss and hits of the rows to the totals; in training, leaves the gradient of the mean loss in G."""
    A, G, work = mem.A, mem.G, mem.frame
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
def attach_backward(op, mem, R, rows, meters, book):
    """One training batch of a seed whose output z learns from the gradient of the features x, which stays as it is.

    Objective per row: <g, z> + |z|^2 / (2 * eta). In its first batch (eta below zero) the seed only listens, to get an
    eta; while that is NaN so are its gradients, and the update leaves it out. `book` takes (objective, rms of z over
    rms of x).
    """
    A, G, eta, decay = mem.A, mem.G, meters.eta, F(meters.decay)
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
    fresh = F(meters.rho) * h_rms / (F(rows) * g_rms)
    if not listens:
        book[0] = total(gd) + total(dd) * pull * F(0.5)
        book[1] = d_rms / h_rms
    if fresh > F(0) and fresh < F(np.inf):
        eta[meter] = decay * before + (F(1) - decay) * fresh if before > F(0) else fresh
    elif listens:
        eta[meter] = F(np.nan)
