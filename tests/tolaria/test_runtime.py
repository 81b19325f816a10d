"""Devices, precision, streams, clocks and threads, with fakes where this machine has no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from esper.tolaria import runtime
from esper.tolaria.runtime import CUDATimer, Placement, amp_dtype, one_thread, parse_device, parse_devices, usable_cores

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu:0", "cuda 0"])
def test_malformed_device_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="malformed device"):
        parse_device(name)


def test_an_absent_device_is_an_error_that_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda") == torch.device("cuda:0")
    assert parse_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"'cuda:2' is not on this machine. Found: cpu, cuda:0, cuda:1"):
        parse_device("cuda:2")


def test_lists_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_devices("cuda:0, cuda:1") == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ValueError, match="one kind"):
        parse_devices("cpu,cuda:0")
    with pytest.raises(ValueError, match="twice"):
        parse_devices("cuda,cuda:0")


def test_mixed_precision_prefers_bf16_and_never_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert amp_dtype("auto", GPU) is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert amp_dtype("auto", GPU) is torch.float16
    assert amp_dtype("auto", CPU) is None
    assert amp_dtype("off", GPU) is None
    with pytest.raises(ValueError, match="needs a CUDA device"):
        amp_dtype("bf16", CPU)
    with pytest.raises(ValueError, match="unknown amp 'half'"):
        amp_dtype("half", CPU)


def test_a_stream_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="a stream needs a CUDA device"):
        Placement(CPU, stream=object())  # type: ignore[arg-type]


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeTensor:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"memory kept for {stream.name}")


def test_a_batch_crosses_streams_by_a_wait_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    default = FakeStream("default", log)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    placement = Placement(GPU, stream=FakeStream("env", log))  # type: ignore[arg-type]
    placement.receive([FakeTensor(log), FakeTensor(log)])  # type: ignore[list-item]
    assert log == ["env waits for default", "memory kept for env", "memory kept for env"]


def test_the_fence_joins_every_env_stream_into_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    default = FakeStream("default", log)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    runtime.join_streams([Placement(GPU, stream=FakeStream(f"env{i}", log)) for i in range(2)])  # type: ignore[arg-type]
    assert log == ["default waits for env0", "default waits for env1"]


def test_the_cpu_timer_adds_up_blocks_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 4.0, 4.25])
    monkeypatch.setattr(runtime.time, "perf_counter", lambda: next(clock))
    timer = CUDATimer(CPU)
    for _ in range(2):
        with timer:
            pass
    assert timer.take_ms() == 750.0
    assert timer.take_ms() == 0.0


def test_the_cuda_timer_reads_events_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: FakeEvent) -> float:
            log.append("read")
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = CUDATimer(GPU)
    for _ in range(2):
        with timer:
            pass
    assert log == ["record"] * 4
    assert timer.take_ms() == 4.0
    assert timer.take_ms() == 0.0


def test_one_thread_is_put_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", None), ("200000 100000", 2), ("50000 100000", 1), ("junk", None)]
)
def test_cores_respect_the_quota_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert usable_cores(quota) == (64 if expected is None else expected)
    assert usable_cores(tmp_path / "absent") == 64
