"""The same bits every time: in repeats, threads and processes, and on every machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.tolaria.executor.arrays import Learning
from esper.tolaria.executor.available import VERSION
from esper.tolaria.executor.workspace import Workspace, pack
from tests.tolaria.executor.harness import no_meters, optimizer_of, program_of, seat_of, workspace

BITS = {1: "26f9e7d578ee794d"}
"""What `digest` gives, by version of the executor. A change of any bit needs a new version and a new row."""


def spread(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers in [-0.5, 0.5) by whole-number arithmetic, the same everywhere."""
    count = int(np.prod(shape))
    whole = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed * 40503)) % np.uint64(
        2**32
    )
    return torch.from_numpy((whole.astype(np.float64) / 2**32 - 0.5).astype(np.float32)).view(shape)


class Net(nn.Module):
    """Something of everything, on a batch that is no multiple of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 5, 3, padding=2, dilation=2)
        self.group = nn.GroupNorm(1, 5)
        self.deep = nn.Conv2d(5, 5, 3, padding=1, groups=5)
        self.gate = nn.Linear(5, 5)
        self.head = nn.Linear(80, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        y = F.gelu(self.group(self.second(y)))
        z = torch.sigmoid(self.gate(y.mean(dim=(2, 3))))[:, :, None, None]
        y = y + 0.5 * torch.tanh(self.deep(y)) * z
        return self.head(F.silu(y).flatten(1))


def digest(space: Workspace) -> str:
    """A hash of everything that four epochs of training and a validation leave behind."""
    module = Net()
    for index, param in enumerate(module.parameters()):
        param.data = spread(tuple(param.shape), index)
    batches = [(spread((37, 1, 8, 8), 100 + i), torch.arange(37) % 7) for i in range(4)]
    found = hashlib.sha256()
    for kind, momentum in (("adamw", 0.0), ("sgd", 0.9)):
        optimizer = optimizer_of(module, kind, momentum)
        seat = seat_of(module, optimizer)
        totals, rows = np.zeros((1, 2)), pack(batches, 7)
        program = program_of(module, seat, (1, 8, 8))
        learning = Learning(rates=np.array([optimizer.rates("host")]), clip_norm=0.5)
        for _ in range(4):
            space.train(
                program,
                seat,
                rows,
                scalars=np.zeros(0, np.float32),
                totals=totals,
                meters=no_meters(seat),
                learning=learning,
            )
        program = program_of(module, seat, (1, 8, 8), training=False)
        space.validate(program, seat, rows, scalars=np.zeros(0, np.float32), totals=totals)
        for array in (seat.params, seat.stats, seat.state.first, seat.state.second, seat.state.norms, totals):
            found.update(array.tobytes())
    return found.hexdigest()[:16]


def test_the_bits_of_this_version():
    assert digest(workspace()) == BITS[VERSION]


def test_repeats_and_fresh_memory_give_the_same_bits():
    dirty = workspace()
    for name in ("activations", "activation gradients", "frame", "saved"):
        dirty.room(name, 1 << 16)[:] = np.nan
    assert digest(dirty) == digest(Workspace()) == digest(workspace())


def test_two_threads_at_the_same_time_give_the_same_bits():
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(digest, [Workspace() for _ in range(4)])) == {BITS[VERSION]}


def _in_a_process(prelude: str = "", **env: str) -> str:
    code = f"{prelude}\nfrom tests.tolaria.executor.test_bits import digest, Workspace\nprint(digest(Workspace()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_another_process_with_more_torch_threads_gives_the_same_bits():
    assert _in_a_process(OMP_NUM_THREADS="2") == BITS[VERSION]


NARROW = """
import llvmlite.binding as llvm
found = llvm.get_host_cpu_features()
less = type(found)({name: on and 'avx512' not in name for name, on in found.items()})
llvm.get_host_cpu_features = lambda: less
"""


@pytest.mark.slow
def test_other_registers_and_other_code_give_the_same_bits(tmp_path):
    """AVX2 code with blocks cut for 16 registers, compiled from nothing."""
    assert _in_a_process(NARROW, NUMBA_CPU_NAME="haswell", NUMBA_CACHE_DIR=str(tmp_path)) == BITS[VERSION]


READ_ONLY = """
import errno
from numba.core.caching import _CacheLocator
def refuse(self):
    raise OSError(errno.EROFS, "Read-only file system")
_CacheLocator.ensure_cache_path = refuse
from esper.tolaria.executor.available import warm_up
said = []
warm_up(said.append)
assert "no folder for compiled code can be written" in said[0], said
"""


@pytest.mark.slow
def test_where_no_folder_can_be_written_it_says_so_and_compiles_uncached():
    assert _in_a_process(READ_ONLY) == BITS[VERSION]


COLD = """
from tests.tolaria.executor.test_bits import digest, Workspace
found = digest(Workspace())
from esper.tolaria.executor.kernels.run import run
print(found, sum(run.stats.cache_misses.values()), sum(run.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_of_processes_that_start_cold_together_one_compiles_and_the_others_load(tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", COLD], stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)
    ]
    found = sorted(process.communicate(timeout=900)[0].strip() for process in started)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert found == sorted([f"{BITS[VERSION]} 1 0", f"{BITS[VERSION]} 0 1", f"{BITS[VERSION]} 0 1"])
