"""Optional listeners of the log: each with its own queue and thread, so that none can slow or stop anything else.

A listener may lose events, raise or hang. The log can rebuild whatever it missed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

from esper.leyline import LoggedEvent, record

MAX_ERRORS = 3
"""Exceptions in a row after which a listener is switched off."""

State = Literal["running", "failed", "hung", "closed"]


class Backend(Protocol):
    """What the hub asks of a listener. All calls come from one thread of its own."""

    name: str
    """Unique within a hub."""

    def start(self) -> None:
        """Opens what it needs. An exception here, or not returning, stops the run before training begins."""

    def write(self, line: LoggedEvent) -> None:
        """Takes one event."""

    def flush(self) -> None:
        """Shows or stores what it may have kept back."""

    def close(self) -> None:
        """Ends in good order."""


@record
class BackendReport:
    """How a listener fared."""

    state: State
    num_taken: int
    num_lost: int
    error: str | None


class BackendLane:
    """The queue and the thread of one listener.

    Args:
        backend: The listener; it is started here.
        capacity: Events that may wait for it.
        hang_s: Time after which a call that does not return is given up.
        complain: Tells a person.

    Raises:
        ValueError: The listener did not start in time.
        Exception: Whatever its start raised.
    """

    def __init__(self, backend: Backend, *, capacity: int, hang_s: float, complain: Callable[[str], None]) -> None:
        self.backend = backend
        self._queue: deque[LoggedEvent] = deque()
        self._capacity = capacity
        self._hang_s = hang_s
        self._complain = complain
        self._wake = threading.Condition()
        self._flush_wanted = self._closing = False
        self._busy_since: float | None = None
        self._state: State = "running"
        self._error: str | None = None
        self._num_errors = self._num_taken = self._num_lost = 0
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"esper-{backend.name}", daemon=True)
        self._thread.start()
        self._await_start()

    def feed(self, batch: list[LoggedEvent]) -> None:
        """Offers events; what finds no room is lost to this listener."""
        with self._wake:
            room = self._capacity - len(self._queue) if self._state == "running" else 0
            self._queue.extend(batch[:room])
            self._num_lost += max(0, len(batch) - room)
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
        """How it fares."""
        with self._wake:
            lost = self._num_lost + (0 if self._state == "running" else len(self._queue))
            return BackendReport(state=self._state, num_taken=self._num_taken, num_lost=lost, error=self._error)

    def _await_start(self) -> None:
        if not self._started.wait(self._hang_s):
            self._state = "hung"
            raise ValueError(
                f"{self.backend.name} did not start within {self._hang_s:g} s. Leave it out, or mend what it waits for"
            )
        if self._start_error is not None:
            raise self._start_error

    def _run(self) -> None:
        try:
            self.backend.start()
        except BaseException as error:  # it belongs to whoever opens the hub, and is raised there
            self._start_error = error
            return
        finally:
            self._started.set()
        while self._state == "running":
            line, flush, closing = self._next()
            if line is not None:
                taken = self._call(partial(self.backend.write, line))
                self._num_taken += taken
                self._num_lost += not taken
            if flush:
                self._call(self.backend.flush)
            if closing and self._state == "running":
                self._call(self.backend.close)
                with self._wake:
                    self._state = "closed" if self._state == "running" else self._state

    def _next(self) -> tuple[LoggedEvent | None, bool, bool]:
        """The next thing to do: events first, then a flush, then the end."""
        with self._wake:
            while not (self._queue or self._flush_wanted or self._closing):
                self._wake.wait()
            if self._queue:
                return self._queue.popleft(), False, False
            flush, self._flush_wanted = self._flush_wanted, False
            return None, flush, self._closing

    def _call(self, act: Callable[[], None]) -> bool:
        self._busy_since = time.monotonic()
        try:
            act()
        except Exception as error:  # a listener may fail in any way without touching the run
            self._error = f"{type(error).__name__}: {error}"
            self._num_errors += 1
            if self._num_errors >= MAX_ERRORS:
                self._switch_off("failed", self._error)
            return False
        finally:
            self._busy_since = None
        self._num_errors = 0
        return True

    def _switch_off(self, state: State, why: str) -> None:
        with self._wake:
            if self._state != "running":
                return
            self._state, self._error = state, why
            self._wake.notify()
        self._complain(f"{self.backend.name} is switched off ({why}). The run goes on; the log has everything")
