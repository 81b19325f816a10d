"""From modules to operation lists: what is fused, what is refused, and that no accepted list leaves its memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.tolaria.executor import ops as o
from esper.tolaria.executor.program import Program, check
from esper.tolaria.executor.trace import Unsupported
from esper.tolaria.executor.workspace import pack
from tests.tolaria.executor.harness import Do, no_meters, program_of, seat_of, workspace


def trace(module: nn.Module, shape=(2, 6, 6), *, training: bool = True) -> Program:
    return program_of(module, seat_of(module), shape, training=training)


def kinds(program: Program) -> list[str]:
    return [o.KINDS[kind] for kind in program.op_list[:, o.KIND]]


def test_a_norm_takes_the_relu_behind_it_and_a_mix_the_gain_before_it():
    layer = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
    gain = nn.Parameter(torch.ones(2))

    def residual(self, x):
        y = x + self.gain.view(-1, 1, 1) * self.layer(x)
        return y.mean(dim=(2, 3))

    program = trace(Do(residual, layer=layer, gain=gain))
    assert kinds(program) == ["conv", "batch_norm", "mix", "mean", "loss"]


def test_what_somebody_else_reads_is_not_fused_away():
    def two_readers(self, x):
        y = self.norm(x)
        return (torch.relu(y) + y).mean(dim=(2, 3))

    program = trace(Do(two_readers, norm=nn.BatchNorm2d(2)))
    assert kinds(program) == ["batch_norm", "activation", "mix", "mean", "loss"]


def test_validation_uses_memory_again():
    layers = [nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()) for _ in range(10)]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 3))
    assert trace(module, training=False).values < 5 * 72 < trace(module).values


class Flip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


REFUSED = {
    "Dropout": nn.Dropout(0.5),
    "flip": Flip(),
    "transposed": nn.ConvTranspose2d(2, 2, 2),
    "softmax": nn.Softmax(dim=1),
    "kernel of 1x3": nn.Conv2d(2, 2, (1, 3)),
    "tanh": nn.GELU(approximate="tanh"),
    "reflection": nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
    "running statistics": nn.BatchNorm2d(2, track_running_stats=False),
    "used twice": Do(lambda self, x: self.conv(self.conv(x)), conv=nn.Conv2d(2, 2, 1)),
    "not used": Do(lambda self, x: self.conv(x)[:, :1], conv=nn.Conv2d(2, 2, 1)),
    "no parameter": Do(lambda self, x: x * torch.ones(2, 1, 1)),
    "mean": Do(lambda self, x: x + x.mean(dim=1, keepdim=True)),
    "adding": Do(lambda self, x: x + x.mean(dim=(2, 3), keepdim=True)),
    "rows": Do(lambda self, x: x - x[:1]),
    "attention": Do(lambda self, x: F.scaled_dot_product_attention(x, x, x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_native_operation_is_refused(name):
    module = nn.Sequential(nn.Conv2d(2, 2, 1), REFUSED[name], nn.Flatten(), nn.LazyLinear(3))
    module.eval()(torch.zeros(2, 2, 6, 6))
    with pytest.raises(Unsupported):
        trace(module)


def test_a_refusal_names_the_operator():
    with pytest.raises(Unsupported, match=r"aten\.flip"):
        trace(nn.Sequential(Flip(), nn.Flatten(), nn.Linear(72, 3)))


# ---- operation lists that are damaged


def network() -> nn.Module:
    """Every kind of operation that needs memory of its own."""
    gain = nn.Parameter(torch.ones(4))

    def body(self, x):
        y = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        y = y + self.gain.view(-1, 1, 1) * self.group(self.second(y))
        z = F.interpolate(F.avg_pool2d(y, 3), scale_factor=3)
        y = y * torch.sigmoid(z) * torch.tanh(z.mean(dim=(2, 3)))[:, :, None, None]
        return self.head(torch.cat([y, 0.5 - y], dim=1).flatten(1))

    return Do(
        body,
        first=nn.Conv2d(2, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        second=nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
        group=nn.GroupNorm(2, 4),
        head=nn.Linear(72, 3),
        gain=gain,
    )


@pytest.mark.parametrize(
    ("kind", "column", "value", "message"),
    [
        (o.CONV, o.WEIGHT, 10**6, "kernel"),
        (o.CONV, o.BIAS, -2, "bias"),
        (o.CONV, o.X, -1, "input"),
        (o.CONV, o.Y, 10**6, "output"),
        (o.CONV, o.HO, 7, "windows"),
        (o.CONV, o.PAD, 3, "windows|padding"),
        (o.CONV, o.GROUPS, 3, "groups"),
        (o.BATCH_NORM, o.STAT, 40, "statistics"),
        (o.BATCH_NORM, o.SAVE, 10**6, "saved"),
        (o.GROUP_NORM, o.SAVE, -3, "saved"),
        (o.MIX, o.Z, 10**9, "second input"),
        (o.MIX, o.SCALAR, 0, "scalar"),
        (o.MULTIPLY, o.MODE, 3, "factor"),
        (o.RESAMPLE, o.ROW, 1, "pixels"),
        (o.RESAMPLE, o.COL_DEN, 0, "step"),
        (o.LOSS, o.MODE, 1, "totals"),
        (o.LOSS, o.KIND, 99, "kind"),
        (o.LOSS, o.X, 2**40, "range"),
        (o.ACTIVATION, o.MODE, 9, "function"),
        (o.ACTIVATION, o.IN, 0, "without values"),
        (o.ACTIVATION, o.ADD_X, 2, "flag"),
    ],
)
def test_a_damaged_operation_is_named(kind, column, value, message):
    program = trace(network())
    op_list = program.op_list.copy()
    op_list[np.flatnonzero(op_list[:, o.KIND] == kind)[0], column] = value
    with pytest.raises(ValueError, match=message):
        replace(program, op_list=op_list)


def test_a_call_with_other_memory_than_the_program_was_made_for_is_refused():
    module = network()
    seat = seat_of(module)
    program = program_of(module, seat, (2, 6, 6))
    batch = (torch.zeros(4, 2, 6, 6), torch.zeros(4, dtype=torch.int64))
    good = {
        "rows": pack([batch], 3),
        "scalars": np.zeros(0, np.float32),
        "totals": np.zeros((1, 2)),
        "meters": no_meters(seat),
    }
    for name, bad, message in (
        ("rows", pack([(batch[0][:, :1], batch[1])], 3), "values of a row"),
        ("scalars", np.zeros(1, np.float32), "scalars"),
        ("totals", np.zeros((2, 2)), "totals"),
    ):
        given = {**good, name: bad}
        with pytest.raises(ValueError, match=message):
            workspace().train(program, seat, **given)
    small = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    with pytest.raises(ValueError, match="parameters"):
        workspace().train(program, seat_of(small), **good)
    with pytest.raises(ValueError, match=r"targets must be in 0\.\.2, got 0\.\.3"):
        pack([(batch[0], torch.tensor([0, 1, 2, 3]))], 3)


FUZZ = """
import ctypes, mmap, sys
import numpy as np, torch
from dataclasses import replace
from esper.tolaria.executor import ops as o
from esper.tolaria.executor.workspace import Workspace, pack
from tests.tolaria.executor.harness import Do, no_meters, program_of, seat_of
from tests.tolaria.executor.test_program import network

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
alive = []

def guarded(size):
    '''So many floats that end where memory ends, with forbidden pages on both sides.'''
    pages = -(-4 * size // PAGE)
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, 0) == 0
    alive.append(region)
    return np.frombuffer(region, np.float32, size, (pages + 1) * PAGE - 4 * size)

class Guarded(Workspace):
    def room(self, name, size):
        found = self._floats.get(name)
        if found is None or len(found) != max(size, 16):
            found = self._floats[name] = guarded(max(size, 16))
        return found

rng = np.random.default_rng(int(sys.argv[1]))
module = network()
seat = seat_of(module)
program = program_of(module, seat, (2, 6, 6))
batch = (torch.randn(9, 2, 6, 6), torch.randint(0, 3, (9,)))
rows, accepted, workspace = pack([batch], 3), 0, Guarded()
for name in ("params", "stats"):
    setattr(seat, name, guarded(getattr(seat, name).size))
for _ in range(int(sys.argv[2])):
    op_list = program.op_list.copy()
    for _ in range(rng.integers(1, 4)):
        row, column = rng.integers(len(op_list)), rng.integers(o.COLUMNS)
        op_list[row, column] += rng.choice([-1, 1, 2, -3, 7, 64, -100, 1000])
    try:
        damaged = replace(program, op_list=op_list)
    except ValueError:
        continue
    accepted += 1
    workspace.train(damaged, seat, rows, scalars=np.zeros(0, np.float32), totals=np.zeros((1, 2)),
                    meters=no_meters(seat))
print("accepted", accepted)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forbids memory pages by mprotect")
def test_no_accepted_list_touches_memory_that_is_not_its_own():
    """Damages a list at random; what passes the check runs between forbidden pages, where a step outside is a crash."""
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, "7", "1500"], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 100


def test_the_check_runs_when_a_program_is_made():
    program = trace(network())
    check(program)
    with pytest.raises(ValueError, match="scratch"):
        replace(program, frame_values=program.frame_values - 1)
    with pytest.raises(ValueError, match="columns"):
        replace(program, op_list=program.op_list[:, :-1])
