"""Where host work runs: devices, streams, precision, threads, clocks. It knows no envs and no models."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from esper.leyline import check_known
from esper.tolaria.executor.available import VERSION as NATIVE_VERSION

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
AMP_CHOICES: tuple[str, ...] = ("off", "auto", "bf16", "fp16")


def machine_facts() -> dict[str, str]:
    """What the bits of host work depend on: the processor, and the versions of what computes on it."""
    return {
        "esper": version("esper-growth"),
        "torch": str(torch.__version__),
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
        "native": f"{NATIVE_VERSION}, numba {version('numba')}",
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def parse_device(name: str) -> torch.device:
    """Reads a device name.

    Raises:
        ValueError: The name is malformed, or this machine has no such device; the message says what it has.
    """
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"malformed device {name!r}: expected 'cpu', 'cuda' or 'cuda:<index>'")
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device(name if ":" in name else "cuda:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert device.index is not None
    if device.index >= count:
        found = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
        raise ValueError(f"device {name!r} is not on this machine. Found: {found}")
    return device


def parse_devices(names: str) -> tuple[torch.device, ...]:
    """Reads a comma-separated list of devices of one kind, such as 'cuda:0,cuda:1'."""
    devices = tuple(parse_device(name.strip()) for name in names.split(","))
    if len({device.type for device in devices}) > 1:
        raise ValueError(f"devices must be of one kind, got {names!r}")
    if len(set(devices)) != len(devices):
        raise ValueError(f"a device is listed twice: {names!r}")
    return devices


def amp_dtype(choice: str, device: torch.device) -> torch.dtype | None:
    """Number type of mixed precision on a device; None for full precision.

    Raises:
        ValueError: Unknown choice, or mixed precision on a CPU, where it would change results for nothing.
    """
    check_known("amp", choice, AMP_CHOICES)
    if choice == "off" or (choice == "auto" and device.type == "cpu"):
        return None
    if device.type == "cpu":
        raise ValueError(f"amp {choice!r} needs a CUDA device; use 'off' or 'auto' on a CPU")
    if choice == "auto":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if choice == "bf16" else torch.float16


class LossScaler:
    """By what the loss is multiplied so that gradients do not vanish in FP16. It stays on the device.

    The rule is that of `torch.amp.GradScaler`: half of it after an overflow, twice as much after 2000 updates without
    one. Torch's class reads it for every checkpoint, and takes a broken seed for an overflow of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), 65536.0, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """After a batch; `overflowed` is 1 where the update was left out, else 0."""
        torch._amp_update_scale_(self.scale, self._growth, overflowed, 2.0, 0.5, 2000)

    def numbers(self) -> Tensor:
        """The state, still on the device."""
        return torch.stack([self.scale.double(), self._growth.double()])

    def load(self, values: Sequence[float]) -> None:
        """Continues from a state."""
        self.scale.fill_(values[0])
        self._growth.fill_(int(values[1]))


class Placement:
    """The place of one env on a device: its stream, its number type and, for FP16, its loss scaler."""

    def __init__(
        self, device: torch.device, *, stream: torch.cuda.Stream | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if stream is not None and device.type != "cuda":
            raise ValueError(f"a stream needs a CUDA device, got {device}")
        self.device = device
        self.stream = stream
        self.dtype = dtype
        self.train_timer = CUDATimer(device)
        self.val_timer = CUDATimer(device)
        self.new_episode()

    def new_episode(self) -> None:
        """A fresh host gets a fresh loss scaler."""
        self.scaler = LossScaler(self.device) if self.dtype is torch.float16 else None

    def running(self) -> AbstractContextManager[object]:
        """The block's work goes to this env's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def autocast(self) -> AbstractContextManager[object]:
        """The block's forward passes run in this env's number type."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, dtype=self.dtype)

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Waits until tensors made on the device's default stream are ready, and keeps their memory while in use."""
        if self.stream is None:
            return
        # The default stream, not the current one: that is where batches are made.
        self.stream.wait_stream(torch.cuda.default_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(self.stream)


def make_placement(device: torch.device, amp: str) -> Placement:
    """A placement on a device, with a stream of its own where the device has streams."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return Placement(device, stream=stream, dtype=amp_dtype(amp, device))


def join_streams(placements: Iterable[Placement]) -> None:
    """Makes each device's default stream wait for the placements on it: the one fence of a step."""
    for placement in placements:
        if placement.stream is not None:
            torch.cuda.default_stream(placement.device).wait_stream(placement.stream)


class CUDATimer:
    """Adds up the time of blocks: `with timer: ...`. Never waits for a device by itself.

    On a CPU it reads a clock. On CUDA it records a pair of events on the current stream, and `take_ms` may be called
    once that stream is known to have finished.
    """

    def __init__(self, device: torch.device) -> None:
        self.uses_events = device.type == "cuda"
        self._total_ms = 0.0
        self._started = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> CUDATimer:
        if self.uses_events:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            self._pairs.append((start, end))
        else:
            self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.uses_events:
            self._pairs[-1][1].record()
        else:
            self._total_ms += (time.perf_counter() - self._started) * 1e3

    def take_ms(self) -> float:
        """Milliseconds since the last call, and starts anew."""
        total = self._total_ms + sum(float(start.elapsed_time(end)) for start, end in self._pairs)
        self._total_ms = 0.0
        self._pairs.clear()
        return total


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread for the block: float sums change with the thread count, and small hosts gain nothing by more."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity mask, limited by the container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):
        return allowed
    if quota == "max":
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))
