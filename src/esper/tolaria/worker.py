"""A worker process, and what parent and worker say to each other over the pipe. Plain records only.

A worker builds its engine from plain data and answers requests until the pipe closes. It decides nothing.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from esper.leyline import FeatureContext, Worker, WorkersFailed, record
from esper.tolaria.engine import Beat
from esper.tolaria.runtime import machine_facts

# ---- messages


@record
class Hello:
    """A worker's first message: who it is and what it will train."""

    protocol_version: int
    pid: int
    threads: int
    cores: tuple[int, ...]
    """Cores it may run on; empty where the system does not say."""
    machine: Mapping[str, str]
    """What its bits depend on, as `machine_facts` says."""
    contexts: Mapping[str, FeatureContext]
    """Its tasks by name."""


@record
class Request:
    """One of the four calls of a worker."""

    request_id: int
    call: str
    arguments: tuple[Any, ...]


@record
class Failure:
    """An exception in a worker, as text."""

    kind: str
    message: str
    trace: str
    cancelled: bool


@record
class Reply:
    """The answer to one request. Exactly one of `result` and `failure` counts."""

    request_id: int
    result: Any
    failure: Failure | None


class StepCancelled(Exception):
    """A step was stopped between two batches because the run is ending. The envs are of no further use."""


class WorkerError(RuntimeError):
    """Code inside a worker raised: a defect, so nothing is retried. The message holds the worker's traceback."""


class WorkerLost(Exception):
    """A worker died, hung or never came up."""

    def __init__(self, reason: str, exit_code: int | None) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class PoolFailure(WorkersFailed):
    """Workers cannot be kept alive; the run must stop."""


NUM_BEATS = 4
TIME, EPOCH, BATCH, CANCEL = range(NUM_BEATS)


@record
class Progress:
    """Where a worker is. `age_s` is the time since its last sign of life."""

    worker_id: int
    env_ids: tuple[int, ...]
    epoch: int | None
    batch: int
    age_s: float


class Pulse:
    """A worker's sign of life, written once per batch into numbers the parent can see. Feeds no computation."""

    def __init__(self, numbers: MutableSequence[float], parent_pid: int) -> None:
        self._numbers = numbers
        self._parent_pid = parent_pid
        self(None, 0)

    def __call__(self, epoch: int | None, batch: int) -> None:
        """Notes the progress.

        Raises:
            StepCancelled: The parent asked to stop, or is gone.
        """
        numbers = self._numbers
        numbers[TIME] = time.monotonic()
        numbers[EPOCH] = -1.0 if epoch is None else float(epoch)
        numbers[BATCH] = float(batch)
        if numbers[CANCEL]:
            raise StepCancelled("the run is stopping")
        if self._parent_pid not in (os.getpid(), os.getppid()):
            raise SystemExit("the parent process is gone")


# ---- the process


BuildWorker = Callable[[Any, Beat], Worker]
"""Makes a worker from its spec; must be importable by name."""


def introduce(worker: Worker) -> Hello:
    """The first message of a worker."""
    return Hello(
        protocol_version=worker.protocol_version,
        pid=os.getpid(),
        threads=torch.get_num_threads(),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        machine=machine_facts(),
        contexts=worker.contexts,
    )


def serve(connection: Connection, numbers: MutableSequence[float], parent: int) -> None:
    """The life of a worker process. The first message says what to build."""
    # A terminal sends the interrupt to the whole group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    try:
        build, spec = pickle.loads(connection.recv_bytes())
        worker = build(spec, Pulse(numbers, parent))
    except Exception as error:
        _send(connection, Reply(request_id=0, result=None, failure=describe_failure(error)))
        return
    _send(connection, Reply(request_id=0, result=introduce(worker), failure=None))
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        _send(connection, answer(worker, request))


def answer(worker: Worker, request: Request) -> Reply:
    """Carries out one request. An exception becomes part of the reply."""
    try:
        result = getattr(worker, request.call)(*request.arguments)
        if request.call == "step":
            result = replace(result, contexts={})  # the pool has them since reset, and they are larger than the reports
    except Exception as error:
        return Reply(request_id=request.request_id, result=None, failure=describe_failure(error))
    return Reply(request_id=request.request_id, result=result, failure=None)


def describe_failure(error: Exception) -> Failure:
    """An exception as it travels."""
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        trace=traceback.format_exc(),
        cancelled=isinstance(error, StepCancelled),
    )


def _send(connection: Connection, reply: Reply) -> None:
    try:
        connection.send_bytes(pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL))
    except (BrokenPipeError, ConnectionResetError):
        raise SystemExit("the parent process is gone") from None
