"""The update: clipping, AdamW and SGD."""

from __future__ import annotations

import math

import numpy as np

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.kernels.base import F, jit
from esper.tolaria.executor.simd import fma, load, splat, sqrt, store, total, zero16


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
def adamw(mem, optimizer, start, stop, clip, step, lr, decay):
    p, dp, m, v = mem.p, mem.dp, optimizer.first, optimizer.second
    beta1, beta2, eps = optimizer.hyper[0], optimizer.hyper[1], optimizer.hyper[2]
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
def sgd(mem, optimizer, start, stop, clip, lr, decay):
    p, dp, m, momentum = mem.p, mem.dp, optimizer.first, optimizer.hyper[0]
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
def gradient_norm(dp, optimizer, first, last):
    """Of some tensors together; that of each is kept."""
    z, squares = zero16(), F(0)
    tensors, norms = optimizer.tensors, optimizer.norms
    for t in range(first, last):
        s = z
        for n in range(tensors[t, 0], tensors[t, 1], 16):
            d = load(dp, n, z)
            s = fma(d, d, s)
        norms[t] = np.sqrt(total(s))
        squares += norms[t] * norms[t]
    return np.sqrt(squares)


@jit
def update(mem, optimizer, learning, silent):
    """Clips and updates each group but the silent ones; group 0 is the host.

    A seed whose gradient is not finite is left out and counted.
    """
    groups, tensors, seen, rates = optimizer.groups, optimizer.tensors, optimizer.seen, learning.rates
    for g in range(len(groups)):
        if silent[g]:
            continue
        norm = gradient_norm(mem.dp, optimizer, groups[g, 0], groups[g, 1])
        seen[g, 0] += 1
        if g > 0 and not norm < F(np.inf):
            seen[g, 1] += 1
            continue
        clip = F(learning.clip_norm) / (norm + F(1e-6))
        clip = F(1) if clip > F(1) else clip
        lr, decay = rates[g, 0], rates[g, 1]
        for t in range(groups[g, 0], groups[g, 1]):
            start, stop = tensors[t, 0], tensors[t, 1]
            optimizer.steps[t] += F(1)
            if optimizer.kind == o.ADAMW:
                adamw(mem, optimizer, start, stop, clip, np.int64(optimizer.steps[t]), lr, decay)
            else:
                sgd(mem, optimizer, start, stop, clip, lr, decay)
