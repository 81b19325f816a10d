"""`esper bench viewers`: do open pages slow a training run down?"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro
from rich.text import Text

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console

RUN, NOTES = "watched", "readers.txt"
START_S = 120.0
"""Longest wait for the first epoch, or for the server."""
SETTLE_S = 5.0
_READERS = """
import http.client, sys, threading, time
port, run, count, notes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
received = [0] * count
def read(number):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", f"/api/stream?run={run}")
    answer = connection.getresponse()
    while more := answer.read1(65536):
        received[number] += len(more)
for number in range(count):
    threading.Thread(target=read, args=(number,), daemon=True).start()
while True:
    time.sleep(0.2)
    with open(notes, "w") as file:
        file.write(f"{min(received)} {sum(received)} ")
"""
"""Readers of one stream each; they note what the least served of them and all together have got."""


def bench_viewers_command(
    tabs: Annotated[int, tyro.conf.arg(help="Streams that are open at once, each of the same run.")] = 50,
    pairs: Annotated[int, tyro.conf.arg(help="Windows with streams, and as many without, in turns.")] = 8,
    window_s: Annotated[float, tyro.conf.arg(help="Length of a window in seconds.")] = 10.0,
    task: Annotated[str, tyro.conf.arg(help="Hosts that are trained meanwhile.")] = "digits_mlp",
    out: Annotated[Path | None, tyro.conf.arg(help="File for the figures as JSON.")] = None,
) -> None:
    """Measure what open pages cost a training run.

    A run trains all the while. In turns, `esper serve` sends it to many readers, or there is neither server nor
    reader. Compared are env steps per second, and the CPU time of the training processes per env step. Tabs of one
    browser share one stream, so 50 streams are more than 50 tabs.
    """
    check_out(out)
    if tabs < 1 or pairs < 1 or window_s <= 0.0:
        raise ValueError(f"tabs, pairs and window-s must be positive, got {tabs}, {pairs} and {window_s:g}")
    console = plain_console(soft_wrap=True)
    words = Text(f"{pairs} pairs of windows of {window_s:g} s")
    with TemporaryDirectory(prefix="esper-") as folder, _training(Path(folder), task) as trainer, console.status(words):
        figures = measure(Path(folder), trainer, tabs=tabs, pairs=pairs, window_s=window_s)
    speed, cost = figures["speed_ratio"], figures["cpu_ratio"]
    console.print(f"{tabs} streams against none, {pairs} pairs of {window_s:g} s of {task}:")
    console.print(f"env steps per second: {speed['median']:.3f} times, {speed['low']:.3f} to {speed['high']:.3f}")
    console.print(f"CPU time of training per env step: {cost['median']:.3f} times")
    console.print(
        f"the server used {figures['server_cpu_share']:.1%} of a core and sent {figures['bytes_per_s']:,.0f} B/s"
    )
    if out is not None:
        write_figures(out, figures)


def measure(folder: Path, trainer: int, *, tabs: int, pairs: int, window_s: float) -> dict[str, Any]:
    """Looks at a run that trains, with and without readers in turns; which comes first changes from pair to pair."""
    speeds, costs, shares, rates = [], [], [], []
    for pair in range(pairs):
        found: dict[bool, tuple[float, float]] = {}
        for watched in (pair % 2 == 0, pair % 2 == 1):
            if not watched:
                found[watched] = _window(folder, trainer, window_s)
                continue
            with _watching(folder, tabs) as server:
                used, sent = cpu_s(server), _received(folder)
                found[watched] = _window(folder, trainer, window_s)
                shares.append((cpu_s(server) - used) / window_s)
                rates.append((_received(folder) - sent) / tabs / window_s)
        (steps, cost), (alone_steps, alone_cost) = found[True], found[False]
        speeds.append(steps / alone_steps)
        costs.append(cost / alone_cost)
    return {
        "tabs": tabs,
        "speed_ratio": _spread(speeds),
        "cpu_ratio": _spread(costs),
        "server_cpu_share": statistics.median(shares),
        "bytes_per_s": statistics.median(rates),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _window(folder: Path, trainer: int, window_s: float) -> tuple[float, float]:
    """Env steps per second, and CPU seconds of the trainer per env step."""
    steps, used, begun = _steps(folder), cpu_s(trainer), time.monotonic()
    time.sleep(window_s)
    done = max(_steps(folder) - steps, 1)
    return done / (time.monotonic() - begun), (cpu_s(trainer) - used) / done


def _steps(folder: Path) -> int:
    """Env steps that are in the log."""
    return sum(
        line.startswith(b'{"type":"EPOCH_COMPLETED"')
        for path in (folder / RUN / "events").glob("*.jsonl")
        for line in path.open("rb")
    )


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for_readers(folder: Path, deadline: float) -> None:
    """Returns when the least served reader has got something: on a busy machine that takes a while."""
    while (folder / NOTES).read_text().split()[:1] in ([], ["0"]):
        if time.monotonic() > deadline:
            raise ValueError(f"a reader got nothing from the server within {START_S:g} s")
        time.sleep(0.2)


def _received(folder: Path) -> int:
    """Bytes that the readers have got together."""
    _, total, *_ = map(int, (folder / NOTES).read_text().split())
    return total


@contextmanager
def _training(folder: Path, task: str) -> Iterator[int]:
    """A run of a fixed controller that trains until the block ends; gives its process."""
    words = ["train", "heuristic", "--task", task, "--runs", str(folder), "--run-id", RUN, "--rounds", "9999"]
    words += ["--envs", "4", "--worker-kind", "inline", "--console", "off", "--calibration-runs", "0"]
    with _process([sys.executable, "-m", "esper.scripts.cli", *words]) as pid:
        deadline = time.monotonic() + START_S
        while not _steps(folder):
            if time.monotonic() > deadline:
                raise ValueError(f"no epoch of {task} was trained within {START_S:g} s; try a smaller task")
            time.sleep(0.2)
        yield pid


@contextmanager
def _watching(folder: Path, tabs: int) -> Iterator[int]:
    """A server and its readers; gives the process of the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "esper.scripts.cli", "serve", str(folder), "--port", str(port)]
    with _process(serve) as server:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        (folder / NOTES).write_text("")
        with _process([sys.executable, "-c", _READERS, str(port), RUN, str(tabs), str(folder / NOTES)]):
            time.sleep(SETTLE_S)
            _wait_for_readers(folder, deadline)  # every one has what there is so far
            yield server


@contextmanager
def _process(command: list[str]) -> Iterator[int]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as started:
        try:
            yield started.pid
        finally:
            started.terminate()
            try:
                started.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                started.kill()
