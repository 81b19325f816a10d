"""The parent's end of one worker: in this process, or behind a pipe. It carries requests and notices death."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import Any

from esper.leyline import PROTOCOL_VERSION
from esper.tolaria.runtime import usable_cores
from esper.tolaria.worker import (
    BATCH,
    CANCEL,
    EPOCH,
    NUM_BEATS,
    TIME,
    BuildWorker,
    Hello,
    Progress,
    Pulse,
    Reply,
    Request,
    StepCancelled,
    WorkerError,
    WorkerLost,
    introduce,
    serve,
)

POLL_S = 0.25
START_S = 120.0
"""A worker may take this long to come up: importing on a busy machine takes its time."""
MIN_SILENCE_S = 120.0
"""A worker may be silent for this long, or for SILENCE_FACTOR times its slowest answer, before it counts as hung."""
SILENCE_FACTOR = 20.0
CLOSE_S = 3.0

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Inherited pinning can put all workers on one core.
_PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class Handle(ABC):
    """One worker as the pool sees it. `send` and `receive` come in pairs.

    Args:
        worker_id: Its number in the pool.
        build: Makes the worker; found by name in a new process.
        spec: What it is made of.
    """

    def __init__(self, worker_id: int, build: BuildWorker, spec: Any) -> None:
        self.worker_id = worker_id
        self._build = build
        self._spec = spec
        self._numbers: MutableSequence[float] = [0.0] * NUM_BEATS

    @abstractmethod
    def launch(self) -> None:
        """Begins to bring a fresh worker up, without waiting for it, so that all of a pool can start at once."""

    @abstractmethod
    def greet(self) -> Hello:
        """Tells a launched worker what to build and waits for its first message; raises WorkerLost if none comes."""

    def start(self) -> Hello:
        """Brings a fresh worker up."""
        self.launch()
        return self.greet()

    @abstractmethod
    def send(self, request: Request) -> None:
        """Hands over a request."""

    @abstractmethod
    def receive(self, request: Request) -> Any:
        """Waits for the result of a request; raises WorkerLost, WorkerError or StepCancelled."""

    @abstractmethod
    def close(self) -> None:
        """Ends the worker."""

    def cancel(self) -> None:
        """Asks the worker to stop between two batches."""
        self._numbers[CANCEL] = 1.0

    def progress(self, env_ids: tuple[int, ...]) -> Progress:
        """Where the worker is."""
        return Progress(
            worker_id=self.worker_id,
            env_ids=env_ids,
            epoch=None if self._numbers[EPOCH] < 0 else int(self._numbers[EPOCH]),
            batch=int(self._numbers[BATCH]),
            age_s=time.monotonic() - self._numbers[TIME],
        )


def open_reply(worker_id: int, request: Request, reply: Reply) -> Any:
    """The result inside a reply, or the exception it stands for."""
    if reply.request_id != request.request_id:
        raise AssertionError(f"worker {worker_id} answered request {reply.request_id}, not {request.request_id}")
    if reply.failure is None:
        return reply.result
    failure = reply.failure
    if failure.cancelled:
        raise StepCancelled(failure.message)
    raise WorkerError(
        f"worker {worker_id} failed in {request.call!r} with {failure.kind}: {failure.message}\n"
        f"--- traceback of the worker ---\n{failure.trace}"
    )


def check_hello(hello: Hello) -> Hello:
    """Refuses a worker that speaks another version."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise WorkerError(
            f"a worker speaks protocol {hello.protocol_version}, this process {PROTOCOL_VERSION}. Install the same "
            "version of Esper wherever workers run"
        )
    return hello


class InlineHandle(Handle):
    """A worker in this process. Its exceptions are raised as they are."""

    def __init__(self, worker_id: int, build: BuildWorker, spec: Any) -> None:
        super().__init__(worker_id, build, spec)
        self._request: Request | None = None

    def launch(self) -> None:
        self._worker = self._build(self._spec, Pulse(self._numbers, os.getpid()))

    def greet(self) -> Hello:
        return check_hello(introduce(self._worker))

    def send(self, request: Request) -> None:
        self._request = request

    def receive(self, request: Request) -> Any:
        assert self._request is not None
        return getattr(self._worker, self._request.call)(*self._request.arguments)

    def close(self) -> None:
        self._request = None


class ProcessHandle(Handle):
    """A worker in a process of its own."""

    def __init__(self, worker_id: int, build: BuildWorker, spec: Any) -> None:
        super().__init__(worker_id, build, spec)
        self._slowest_s = 0.0
        self._sent_at = 0.0
        # Never the global start method: forking deadlocks once OpenMP has run and is illegal with CUDA.
        self._context = multiprocessing.get_context("spawn")
        self._numbers = self._context.RawArray("d", NUM_BEATS)
        self._process: SpawnProcess | None = None

    def launch(self) -> None:
        self._numbers[TIME] = time.monotonic()
        self._connection, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve,
            args=(theirs, self._numbers, os.getpid()),  # small: starting blocks on what a dying child leaves unread
            name=f"esper-worker-{self.worker_id}",
            daemon=True,
        )
        with _child_environment():
            process.start()
        self._process = process
        theirs.close()
        self._sent_at = time.monotonic()

    def greet(self) -> Hello:
        try:
            self._connection.send_bytes(pickle.dumps((self._build, self._spec), protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._lost("died") from None
        hello: Hello = self.receive(Request(request_id=0, call="start", arguments=()))
        return check_hello(hello)

    @property
    def pid(self) -> int | None:
        """The process that runs the worker; None before it was launched."""
        return None if self._process is None else self._process.pid

    def send(self, request: Request) -> None:
        self._sent_at = time.monotonic()
        try:
            self._connection.send_bytes(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._lost("died before it could take a request") from None

    def receive(self, request: Request) -> Any:
        patience = max(MIN_SILENCE_S, SILENCE_FACTOR * self._slowest_s) if request.request_id else START_S
        while not self._connection.poll(POLL_S):
            silence = time.monotonic() - max(self._numbers[TIME], self._sent_at)
            if silence > patience:
                assert self._process is not None
                self._process.kill()
                raise self._lost(f"gave no sign of life for {silence:.0f} s and was stopped")
        try:
            reply = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._lost("died") from None
        if request.request_id:  # starting up says nothing about the time of a step
            self._slowest_s = max(self._slowest_s, time.monotonic() - self._sent_at)
        return open_reply(self.worker_id, request, reply)

    def _lost(self, what: str) -> WorkerLost:
        assert self._process is not None
        self._process.join(CLOSE_S)
        code = self._process.exitcode
        self._connection.close()
        return WorkerLost(f"worker {self.worker_id} {what} (exit code {code})", code)

    def close(self) -> None:
        if self._process is None:
            return
        self.cancel()
        self._connection.close()
        self._process.join(CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(CLOSE_S)


@contextmanager
def _child_environment() -> Iterator[None]:
    """The environment a worker starts in: one thread, no inherited pinning."""
    before = {name: os.environ.get(name) for name in (*_ONE_THREAD, *_PINNING)}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    for name in _PINNING:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---- all workers of a pool


@contextmanager
def open_inline(build: BuildWorker, spec: Any, workers: int | None) -> Iterator[Sequence[Handle]]:
    """The one worker of this process."""
    yield [InlineHandle(0, build, spec)]


@contextmanager
def open_processes(build: BuildWorker, spec: Any, workers: int | None) -> Iterator[Sequence[Handle]]:
    """One process per worker; as many as there are usable cores if None."""
    count = usable_cores() if workers is None else workers
    yield [ProcessHandle(worker_id, build, spec) for worker_id in range(count)]
