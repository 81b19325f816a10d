"""What parent and worker say to each other, and the few shared numbers beside the pipe. Plain records only."""

from __future__ import annotations

import os
import time
from collections.abc import MutableSequence
from typing import Any

from esper.leyline import HostLayout, LifecycleConfig, WorkersFailed, record


@record
class Hello:
    """A worker's first message: who it is and what it will train."""

    protocol_version: int
    pid: int
    torch_version: str
    threads: int
    cores: tuple[int, ...]
    """Cores it may run on; empty where the system does not say."""
    layout: HostLayout
    lifecycle: LifecycleConfig


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
