"""Workers on the machines of a Ray cluster. Ray starts processes and carries messages; it mends nothing.

A Ray restart would run a constructor again and forget the episode, and a failed call may have been carried out. So both
are off, and a lost worker is the pool's to replace, by replay. Without an address the cluster is this machine alone:
started for the pool, reachable from nowhere else, gone with it.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from esper.leyline.files import scratch_folder
from esper.tolaria.handles import MIN_SILENCE_S, POLL_S, SILENCE_FACTOR, START_S, Handle, check_hello, open_reply
from esper.tolaria.runtime import usable_cores
from esper.tolaria.worker import (
    BATCH,
    CANCEL,
    EPOCH,
    NUM_BEATS,
    TIME,
    BuildWorker,
    Hello,
    PoolFailure,
    Pulse,
    Reply,
    Request,
    StepCancelled,
    WorkerError,
    WorkerLost,
    answer,
    describe_failure,
    introduce,
)

PULSE_S = 2.0
"""Between two questions to a busy worker how far it is."""
HEAD_S = 6.0
"""The head of a cluster may be out of reach for this long. After a minute Ray would end this process by itself."""
_PULSE_GROUP = "pulse"
_SOCKETS = Path("/tmp") if Path("/tmp").is_dir() else None
"""Where a cluster on this machine keeps its files: its sockets' names may have 107 characters, 93 of them are Ray's."""
_START_ONE = ". Start one with `ray start --head`, or leave --ray-address out for one on this machine"
PRIVATE = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else it reports to a server
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else it writes one into the home folder; one per process, Ray keeps it
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else it listens on every address of the machine
    "RAY_worker_niceness": "0",  # else everybody else's work comes first
}
"""Settings of a cluster that is this machine alone."""


class RayWorker:
    """The far end: one worker inside a Ray actor. Calls come one at a time, questions for its pulse in between."""

    def __init__(self) -> None:
        self._numbers = [0.0] * NUM_BEATS

    def start(self, build: BuildWorker, spec: Any) -> bytes:
        """Builds the worker and introduces it."""
        torch.set_num_threads(1)
        try:
            self._worker = build(spec, Pulse(self._numbers, os.getpid()))
            reply = Reply(request_id=0, result=introduce(self._worker), failure=None)
        except Exception as error:
            reply = Reply(request_id=0, result=None, failure=describe_failure(error))
        return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)

    def answer(self, packed: bytes) -> bytes:
        """Carries out one request."""
        return pickle.dumps(answer(self._worker, pickle.loads(packed)), protocol=pickle.HIGHEST_PROTOCOL)

    def pulse(self) -> tuple[float, float, float]:
        """Seconds since the last batch, its epoch and its number. Clocks of two machines cannot be compared."""
        numbers = self._numbers
        return time.monotonic() - numbers[TIME], numbers[EPOCH], numbers[BATCH]


class RayHandle(Handle):
    """A worker in a Ray actor.

    Args:
        worker_id: Its number in the pool.
        build: Makes the worker; found by name on its machine.
        stored: What it is made of, in the cluster's object store.
        cluster: Where it runs.
    """

    def __init__(self, worker_id: int, build: BuildWorker, stored: Any, cluster: Cluster) -> None:
        super().__init__(worker_id, build, stored)
        self._cluster = cluster
        self._actor: Any = None
        self._answer: Any = None
        self._pulse: Any = None
        self._num_launched = 0
        self._asked_s = self._sent_s = self._slowest_s = 0.0

    def launch(self) -> None:
        self.close()
        self._num_launched += 1
        replaces = self._num_launched > 1
        try:
            if replaces:
                self._cluster.await_truth()
            self._actor = self._cluster.new_actor(may_share=replaces)
        except self._cluster.ray.exceptions.RayError as error:
            raise self._lost(f"could not be started ({type(error).__name__})") from None
        self._answer = self._actor.start.remote(self._build, self._spec)
        self._sent_s = time.monotonic()

    def greet(self) -> Hello:
        hello: Hello = self.receive(Request(request_id=0, call="start", arguments=()))
        return check_hello(hello)

    def send(self, request: Request) -> None:
        self._sent_s = time.monotonic()
        self._answer = self._actor.answer.remote(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self, request: Request) -> Any:
        ray = self._cluster.ray
        patience = max(MIN_SILENCE_S, SILENCE_FACTOR * self._slowest_s) if request.request_id else START_S
        while not ray.wait([self._answer], timeout=POLL_S)[0]:
            self._look_around(patience)
        try:
            reply = pickle.loads(ray.get(self._answer))
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(
                f"worker {self.worker_id} could not be used: {error}. Every machine of the cluster needs the same "
                "Esper and the modules that tasks come from"
            ) from None
        except ray.exceptions.RayError as error:
            raise self._lost(f"died, or its machine did ({type(error).__name__})") from None
        if request.request_id:  # starting up says nothing about the time of a step
            self._slowest_s = max(self._slowest_s, time.monotonic() - self._sent_s)
        return open_reply(self.worker_id, request, reply)

    def close(self) -> None:
        if self._actor is not None and self._cluster.has_head:
            self._cluster.ray.kill(self._actor, no_restart=True)
        self._actor = self._answer = self._pulse = None

    def _look_around(self, patience: float) -> None:
        """While an answer is awaited: is the run ending, is there still a cluster, is the worker at work?"""
        if self._numbers[CANCEL]:
            raise StepCancelled("the run is stopping")
        self._cluster.check_head()
        self._feel_pulse()
        silence = time.monotonic() - max(self._numbers[TIME], self._sent_s)
        if silence > patience:
            raise self._lost(f"gave no sign of life for {silence:.0f} s and was stopped")

    def _feel_pulse(self) -> None:
        """Asks now and then where the worker is: its beats are in the memory of another machine."""
        ray, now = self._cluster.ray, time.monotonic()
        if self._pulse is None and now - self._asked_s > PULSE_S:
            self._pulse, self._asked_s = self._actor.pulse.options(concurrency_group=_PULSE_GROUP).remote(), now
        elif self._pulse is not None and ray.wait([self._pulse], timeout=0)[0]:
            asked, self._pulse = self._pulse, None
            try:
                age_s, self._numbers[EPOCH], self._numbers[BATCH] = ray.get(asked)
            except ray.exceptions.RayError:
                return  # the answer that is awaited says so too
            self._numbers[TIME] = now - age_s

    def _lost(self, what: str) -> WorkerLost:
        self._cluster.require_head()
        self.close()
        return WorkerLost(f"worker {self.worker_id} {what}", None)


class Cluster:
    """This process's connection to a cluster, as far as handles need it."""

    def __init__(self, ray: Any, *, joined: bool = False) -> None:
        self.ray = ray
        self._joined = joined
        self.has_head = True
        self._head: str = ray.get_runtime_context().gcs_address
        self._seen_s = self._tried_s = time.monotonic()

    def new_actor(self, *, may_share: bool) -> Any:
        """Starts an actor on a CPU of its own. One that replaces another may share where none is free.

        So do those of a second pool of this process: the CPUs may all be the first one's, which waits meanwhile.
        """
        shares = self._joined or (may_share and self.ray.available_resources().get("CPU", 0.0) < 1.0)
        options = {
            "num_cpus": 0 if shares else 1,
            "max_restarts": 0,
            "max_task_retries": 0,
            "concurrency_groups": {_PULSE_GROUP: 1},
            "scheduling_strategy": "SPREAD",
        }
        return self.ray.remote(**options)(RayWorker).remote()

    def await_truth(self) -> None:
        """Waits until the cluster knows which machines are gone: until then it would send them new workers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            nodes = [node for node in self.ray.nodes() if node["Alive"]]
            if all(_answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") for node in nodes):
                return
            self.check_head()
            time.sleep(POLL_S)

    def count_workers(self, wanted: int | None, at_most: int | None) -> int:
        """How many workers there will be: as many as are wanted, or one per CPU of the cluster.

        Raises:
            PoolFailure: There are not that many CPUs.
        """
        cpus = int(self.ray.cluster_resources().get("CPU", 0))
        if cpus < (wanted or 1):
            raise PoolFailure(
                f"the Ray cluster at {self._head} has {cpus} CPUs, {wanted or 1} workers need one each. Lower "
                "--workers, or let more machines join it"
            )
        return wanted or min(cpus, at_most or cpus)

    def check_head(self) -> None:
        """Looks for the head about once a second.

        Raises:
            PoolFailure: It has been out of reach for too long.
        """
        now = time.monotonic()
        if now - self._tried_s < 1.0:
            return
        self._tried_s = now
        if _answers(self._head):
            self._seen_s = now
        elif now - self._seen_s > HEAD_S:
            self.has_head = False
            raise PoolFailure(
                f"the head of the Ray cluster at {self._head} is gone, and the workers with it. What was saved is "
                "safe: start the cluster again, or choose other workers, and resume the run"
            )

    def require_head(self) -> None:
        """Waits until the head was seen after this call; raises PoolFailure if it is not."""
        since = time.monotonic()
        while self._seen_s < since:
            time.sleep(max(0.0, self._tried_s + 1.0 - time.monotonic()))
            self.check_head()


# ---- opening


@contextmanager
def open_ray(
    build: BuildWorker, spec: Any, workers: int | None, *, address: str | None = None, at_most: int | None = None
) -> Iterator[Sequence[Handle]]:
    """Workers in a Ray cluster, one CPU each.

    Args:
        build: Makes a worker; importable on every machine.
        spec: What it is made of. It is stored once in the cluster, and rows are mapped by all workers of a machine.
        workers: Their number; if None, one per CPU of the cluster, but no more than `at_most`.
        address: Of the cluster's head as HOST:PORT, or "auto" for the one this machine is part of; None starts one on
            this machine, for this pool alone.
        at_most: How many workers can be of use.

    Raises:
        ValueError: Ray is not installed.
        PoolFailure: There is no such cluster, or it is too small.
    """
    with _connection(address, workers or min(usable_cores(), at_most or usable_cores())) as (ray, joined):
        cluster = Cluster(ray, joined=joined)
        cluster.await_truth()
        count = cluster.count_workers(workers, at_most)
        stored = ray.put(spec)
        yield [RayHandle(worker_id, build, stored, cluster) for worker_id in range(count)]


@contextmanager
def _connection(address: str | None, cpus: int) -> Iterator[tuple[Any, bool]]:
    """Ray, connected, and whether it was before: such a connection is used and stays."""
    with ExitStack() as stack:
        if address is None:
            stack.enter_context(environment(PRIVATE))
        with _own_signal_handlers():
            ray = _import_ray()
            if not (joined := ray.is_initialized()):
                folder = stack.enter_context(scratch_folder(_SOCKETS)) if address is None else None
                stack.callback(ray.shutdown)
                _connect(ray, address, cpus, None if folder is None else str(folder))
        yield ray, joined


def _answers(address: str) -> bool:
    """Whether something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError("worker kind 'ray' needs Ray: pip install 'esper-growth[ray]'") from error
    return ray


def _connect(ray: Any, address: str | None, cpus: int, folder: str | None) -> None:
    if address is None and not ray.util.get_node_ip_address().startswith("127."):
        raise PoolFailure(
            "Ray was imported before Esper could keep it to this machine: it reads its settings only then. Leave the "
            "import to Esper, or start a cluster and give its address"
        )
    if address is not None and address.rpartition(":")[2].isdigit() and not _answers(address):
        raise PoolFailure(f"no Ray cluster answers at {address}{_START_ONE}")  # Ray itself would try for minutes
    own = {"num_cpus": cpus, "include_dashboard": False, "_temp_dir": folder}
    try:
        ray.init(
            address="local" if address is None else address,
            log_to_driver=False,
            configure_logging=False,
            **(own if address is None else {}),
        )
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise PoolFailure(f"this machine is in no Ray cluster{_START_ONE}") from error
        place = "on this machine" if address is None else f"at {address}"
        remedy = "" if address is None else f". Expected HOST:PORT of a head{_START_ONE}"
        raise PoolFailure(f"no Ray cluster could be used {place}: {str(error).strip('.')}{remedy}") from error
    # Ray prints pages of its own state when a machine dies. The pool says that in one line.
    ray._private.worker._worker_logs_enabled = False


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets what is not set yet, and takes it back."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it is imported and when it connects; a run has its own way to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
