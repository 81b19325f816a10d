"""What all kernels share: how they are compiled, how wide registers are, and two ways to fill memory."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import binding as llvm

from esper.tolaria.executor.simd import load, store, zero16, zero64

F = np.float32
WIDE = bool(llvm.get_host_cpu_features().get("avx512f", False))
"""32 registers of 16 lanes. How work is cut into registers never changes a bit."""
zero_block = zero64 if WIDE else zero16
BLOCK = 64 if WIDE else 16

OPTIONS = {"fastmath": False, "error_model": "numpy", "boundscheck": False, "nogil": True}
jit = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)


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
