"""Optional listeners beside the log: each with its own queue and thread, so that none can slow or stop anything else.

A listener may lose events, raise or hang. The log has whatever it missed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol, runtime_checkable

from esper.leyline import LoggedEvent, record
from esper.nissa.writer import complain

MAX_ERRORS = 3
"""Exceptions in a row after which a listener is switched off."""

State = Literal["running", "failed", "hung", "closed"]


class Backend(Protocol):
    """What the hub asks of a listener. All calls come from one thread of its own."""

    name: str
    """Unique within a hub."""

    def start(self) -> None:
        """Opens what it needs. An exception here, or not returning, stops the run before training begins."""

    def write(self, line: LoggedEvent) -> bool:
        """Takes one event; False if it was none of the listener's business, which is no sign that it works."""

    def flush(self) -> None:
        """Shows or stores what it may have kept back."""

    def close(self) -> None:
        """Ends in good order."""


@runtime_checkable
class ProgressListener(Protocol):
    """A listener that also shows how far a round has come."""

    def tick(self, round: int, epoch: int) -> None:
        """Receives the newest position now and then; those between are left out."""


@record
class BackendReport:
    """State and counts of one listener."""

    state: State
    num_taken: int
    num_lost: int
    error: str | None


class BackendThread:
    """The queue and the thread of one listener, which is started here.

    Args:
        backend: The listener.
        capacity: Events that may wait for it.
        hang_s: Time after which a call that does not return is given up.

    Raises:
        ValueError: The listener did not start in time.
        Exception: Whatever its start raised.
    """

    def __init__(self, backend: Backend, *, capacity: int, hang_s: float) -> None:
        self.backend = backend
        self._queue: deque[LoggedEvent] = deque()
        self._capacity, self._hang_s = capacity, hang_s
        self._wake = threading.Condition()
        self._flush_wanted = self._closing = False
        self._position: tuple[int, int] | None = None
        self._busy_since: float | None = None
        self._state: State = "running"
        self._error: str | None = None
        self._num_errors = self._num_taken = self._num_lost = 0
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"esper-{backend.name}", daemon=True)
        self._thread.start()
        if not self._started.wait(hang_s):
            self._state = "hung"
            raise ValueError(
                f"{backend.name} did not start within {hang_s:g} s. Leave it out, or mend what it waits for"
            )
        if self._start_error is not None:
            raise self._start_error

    def feed(self, batch: list[LoggedEvent]) -> None:
        """Offers events; what finds no room is lost to this listener."""
        with self._wake:
            room = self._capacity - len(self._queue) if self._state == "running" else 0
            self._queue.extend(batch[:room])
            self._num_lost += max(0, len(batch) - room)
            self._wake.notify()

    def tick(self, position: tuple[int, int]) -> None:
        """Offers the newest position to a listener that wants it."""
        if isinstance(self.backend, ProgressListener):
            with self._wake:
                self._position = position
                self._wake.notify()

    def ask_flush(self) -> None:
        """Asks without waiting."""
        with self._wake:
            self._flush_wanted = True
            self._wake.notify()

    def watch(self) -> None:
        """Gives up on a listener that has not come back from a call."""
        since = self._busy_since
        if self._state == "running" and since is not None and time.monotonic() - since > self._hang_s:
            self._switch_off("hung", f"no return from a call for {self._hang_s:g} s")

    def ask_close(self) -> None:
        """Lets the listener finish, without waiting."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def close(self, timeout: float) -> None:
        """Lets the listener finish, for at most `timeout` seconds."""
        self.ask_close()
        if self._state != "hung":  # what was given up is not waited for once more
            self._thread.join(max(0.0, timeout))
        if self._thread.is_alive() and self._state == "running":
            self._switch_off("hung", "did not end in time")

    def report(self) -> BackendReport:
        """Its state and counts."""
        with self._wake:
            lost = self._num_lost + (0 if self._state == "running" else len(self._queue))
            return BackendReport(state=self._state, num_taken=self._num_taken, num_lost=lost, error=self._error)

    def _run(self) -> None:
        try:
            self.backend.start()
        except BaseException as error:  # it belongs to whoever opens the hub, and is raised there
            self._start_error = error
            return
        finally:
            self._started.set()
        while self._state == "running":
            self._step()

    def _step(self) -> None:
        """Does the next thing: an event first, then the position, then a flush, then the end."""
        with self._wake:
            while not (self._queue or self._position or self._flush_wanted or self._closing):
                self._wake.wait()
            line = self._queue.popleft() if self._queue else None
            if line is None:
                position, self._position = self._position, None
                flush, self._flush_wanted = self._flush_wanted, False
        if line is not None:
            taken = self._call(partial(self.backend.write, line))
            with self._wake:  # the hub's thread counts what found no room
                self._num_taken += taken
                self._num_lost += not taken
            return
        if position is not None and isinstance(self.backend, ProgressListener):
            self._call(partial(self.backend.tick, *position))
        if flush:
            self._call(self.backend.flush)
        if self._closing and self._state == "running":
            ended = self._call(self.backend.close)
            with self._wake:
                if self._state == "running":
                    self._state = "closed" if ended else "failed"

    def _call(self, act: Callable[[], object]) -> bool:
        """Whether a call came back without an error. Only one that was of use shows that the listener works."""
        self._busy_since = time.monotonic()
        try:
            used = act()
        except (Exception, SystemExit) as error:  # a listener may fail in any way without touching the run
            self._note(f"{type(error).__name__}: {error}")
            return False
        finally:
            self._busy_since = None
        if used is True:
            self._num_errors = 0
        return True

    def _note(self, error: str) -> None:
        self._error = error
        self._num_errors += 1
        if self._num_errors >= MAX_ERRORS:
            self._switch_off("failed", error)
        elif self._num_errors == 1:
            again = "" if self._closing else " and is tried again"
            complain(f"{self.backend.name} failed ({error}){again}. The log has everything")

    def _switch_off(self, state: State, why: str) -> None:
        with self._wake:
            if self._state != "running":
                return
            self._state, self._error = state, why
            self._wake.notify()
        complain(f"{self.backend.name} is switched off ({why}). The run goes on; the log has everything")


def close_backends(threads: Sequence[BackendThread], deadline: float) -> None:
    """Ends all listeners by a time of the monotonic clock, side by side: one that hangs costs the others nothing."""
    for thread in threads:
        thread.ask_close()
    for thread in threads:
        thread.close(deadline - time.monotonic())
