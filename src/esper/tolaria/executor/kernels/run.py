"""The interpreter: one compiled function for every operation list, and how it comes to be compiled."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path

import numba
import numpy as np
from filelock import FileLock
from numba import types

from esper.tolaria.executor import ops as o
from esper.tolaria.executor import simd
from esper.tolaria.executor.arrays import Learning, Memory, Meters, Optimizer, Rows
from esper.tolaria.executor.kernels.base import OPTIONS, F, copy
from esper.tolaria.executor.kernels.conv import conv_forward, conv_inputs, conv_weights
from esper.tolaria.executor.kernels.losses import attach_backward, loss
from esper.tolaria.executor.kernels.norms import (
    batch_norm_backward,
    batch_norm_forward,
    group_norm_backward,
    group_norm_forward,
)
from esper.tolaria.executor.kernels.pixels import (
    avg_pool_backward,
    avg_pool_forward,
    max_pool_backward,
    max_pool_forward,
    mean_backward,
    mean_forward,
    resample_backward,
    resample_forward,
)
from esper.tolaria.executor.kernels.pointwise import (
    activation_backward,
    activation_forward,
    mix_backward,
    mix_forward,
    multiply_backward,
    multiply_forward,
    scale_backward,
    scale_forward,
)
from esper.tolaria.executor.kernels.update import update


def compile_runner(source_hash):
    """The compiled `run`. Only it is cached on disk, with everything it calls inside.

    Numba finds a stale cache by the date of the file with the cached function alone. The hash of all sources is a
    variable of the closure, which is part of the cache's key, so a change in any of them compiles anew.
    """

    def run(train, op_list, consts, rows, totals, mem, optimizer, learning, meters):
        """All batches: forward; in training also backward and, where there are rates to learn at, the update."""
        if source_hash == "":
            return
        R, count, values = rows.inputs.shape[2], len(op_list), rows.inputs.shape[1] * rows.inputs.shape[2]
        silent = np.zeros(len(optimizer.groups), np.bool_)
        flat = rows.inputs.reshape(-1)
        for batch in range(len(rows.inputs)):
            real = rows.counts[batch]
            copy(flat, batch * values, mem.A, 0, values)
            for g in range(len(silent) if train else 0):
                silent[g] = meters.group[g] >= 0 and meters.eta[meters.group[g]] < F(0)
            for i in range(count):
                op, const = op_list[i], consts[i]
                kind = op[o.KIND]
                if kind == o.CONV:
                    conv_forward(op, mem, R)
                elif kind == o.BATCH_NORM:
                    batch_norm_forward(op, const, mem, R, real, train)
                elif kind == o.GROUP_NORM:
                    group_norm_forward(op, const, mem, R)
                elif kind == o.ACTIVATION:
                    activation_forward(op, mem, R)
                elif kind == o.SCALE:
                    scale_forward(op, const, mem, R)
                elif kind == o.MIX:
                    mix_forward(op, const, mem, R)
                elif kind == o.MULTIPLY:
                    multiply_forward(op, const, mem, R)
                elif kind == o.MAX_POOL:
                    max_pool_forward(op, mem, R)
                elif kind == o.AVG_POOL:
                    avg_pool_forward(op, mem, R)
                elif kind == o.RESAMPLE:
                    resample_forward(op, mem, R)
                elif kind == o.MEAN:
                    mean_forward(op, mem, R)
                elif kind == o.LOSS:
                    loss(op, mem, R, real, rows.targets[batch], totals, train)
            if not train:
                continue
            for i in range(count - 1, -1, -1):
                op, const = op_list[i], consts[i]
                kind = op[o.KIND]
                if not op[o.BACK]:
                    continue
                if kind == o.CONV:
                    conv_weights(op, mem, R)
                    if op[o.NEED_X]:
                        conv_inputs(op, mem, R)
                elif kind == o.BATCH_NORM:
                    batch_norm_backward(op, mem, R, real)
                elif kind == o.GROUP_NORM:
                    group_norm_backward(op, mem, R)
                elif kind == o.ACTIVATION:
                    activation_backward(op, mem, R)
                elif kind == o.SCALE:
                    scale_backward(op, const, mem, R)
                elif kind == o.MIX:
                    mix_backward(op, const, mem, R)
                elif kind == o.MULTIPLY:
                    multiply_backward(op, const, mem, R)
                elif kind == o.MAX_POOL:
                    max_pool_backward(op, mem, R)
                elif kind == o.AVG_POOL:
                    avg_pool_backward(op, mem, R)
                elif kind == o.RESAMPLE:
                    resample_backward(op, mem, R)
                elif kind == o.MEAN:
                    mean_backward(op, mem, R)
                elif kind == o.ATTACH:
                    attach_backward(op, mem, R, real, meters, meters.readings[batch, op[o.MODE]])
            if len(learning.rates):
                update(mem, optimizer, learning, silent)

    try:
        return numba.njit(cache=True, **OPTIONS)(run)
    except RuntimeError:  # there is no folder that numba may write to
        return numba.njit(**OPTIONS)(run)


def read_sources():
    """All that compiled code depends on."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(o.__file__), Path(simd.__file__)]
    return b"".join(path.read_bytes() for path in files)


run = compile_runner(hashlib.sha256(read_sources()).hexdigest())
f4, f42, f43 = types.float32[::1], types.float32[:, ::1], types.float32[:, :, ::1]
f8, f81, f82 = types.float64, types.float64[::1], types.float64[:, ::1]
i8, i81, i82 = types.int64, types.int64[::1], types.int64[:, ::1]
SIGNATURE = types.void(
    types.boolean,
    i82,
    f42,
    types.BaseTuple.from_types((f43, i82, i81), Rows),
    f82,
    types.BaseTuple.from_types((f4,) * 8, Memory),
    types.BaseTuple.from_types((i8, f81, f4, f4, f4, i82, i82, f4, i82), Optimizer),
    types.BaseTuple.from_types((f82, f8), Learning),
    types.BaseTuple.from_types((f4, i81, f8, f8, f43), Meters),
)


def cache_folder() -> Path | None:
    """Where compiled code is kept; None if there is no folder that can be written."""
    return None if run.stats.cache_path is None else Path(run.stats.cache_path)


def make_ready() -> None:
    """Compiles `run`, or loads what was compiled before. From then on other types of arguments are refused."""
    if run.signatures:
        return
    folder = cache_folder()
    # Who comes second waits, and loads what the first has compiled.
    with nullcontext() if folder is None else FileLock(folder / "esper-native.lock"):
        run.compile(SIGNATURE)
    run.disable_compile()
