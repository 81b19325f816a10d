"""A worker process: builds its engine from plain data, answers requests until the pipe closes. Decides nothing."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, MutableSequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from esper.leyline import HostLayout, LifecycleConfig, Worker
from esper.tolaria.engine import Beat
from esper.tolaria.messages import Failure, Hello, Pulse, Reply, Request, StepCancelled


class EngineWorker(Worker, Protocol):
    """A worker that can say what it trains."""

    layout: HostLayout
    lifecycle: LifecycleConfig


BuildWorker = Callable[[Any, Beat], EngineWorker]
"""Makes a worker from its spec; must be importable by name."""


def introduce(worker: EngineWorker) -> Hello:
    """The first message of a worker."""
    return Hello(
        protocol_version=worker.protocol_version,
        pid=os.getpid(),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        layout=worker.layout,
        lifecycle=worker.lifecycle,
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
        _send(connection, Reply(request_id=0, result=None, failure=_failure(error)))
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
    except Exception as error:
        return Reply(request_id=request.request_id, result=None, failure=_failure(error))
    return Reply(request_id=request.request_id, result=result, failure=None)


def _failure(error: Exception) -> Failure:
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
