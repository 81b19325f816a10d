"""The hub: takes events from the training thread, numbers them, and sees to it that they reach the log.

`emit` never blocks and touches no file; one thread does the writing. Only the parent process owns a hub. It knows the
catalogue's promises about events, not what they mean, and offers nothing to read back but its own health.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from esper.leyline import (
    EVENTS,
    SCHEMA_VERSION,
    EventsDropped,
    LoggedEvent,
    Severity,
    TelemetryEvent,
    TelemetryEventType,
    check_event,
    make_event,
    record,
)
from esper.nissa.backends import Backend, BackendReport, BackendThread, close_backends
from esper.nissa.heartbeat import HeartbeatWriter
from esper.nissa.log_file import LogFile
from esper.nissa.writer import URGENT, Drops, LogWriter, complain

MAX_HELD = 100_000
"""Events that may wait for a log that cannot be written before the run has to stop."""
EXIT_TIMEOUT_S = 5.0


@record
class HubLimits:
    """Sizes and times of a hub. Runs use the defaults."""

    queue_capacity: int = 8192
    """Events that may wait for the writer, or for a listener; beyond it only those that must not be lost are taken."""
    flush_interval_s: float = 0.5
    """Longest time an event waits."""
    heartbeat_s: float = 1.0
    """Time between two status files."""
    retry_s: float = 5.0
    """Time between two tries on a log that cannot be written."""
    hang_s: float = 30.0
    """Time after which a listener that does not return is switched off; one that does not start by then is an error."""


DEFAULT_LIMITS = HubLimits()


@record
class HubHealth:
    """State of a hub, and what became of its events so far."""

    queue_high_water: int = 0
    """Most events that ever waited for the writer at once."""
    num_held: int = 0
    """Events that wait in memory because the log cannot be written."""
    num_unwritten: int = 0
    """Accepted events that are not in the log, those included."""
    num_dropped: Mapping[str, int] = field(default_factory=dict)
    """Lost events by type, since this attempt began."""
    num_late: int = 0
    """Events offered after the hub was closed."""
    log_error: str | None = None
    must_stop: bool = False
    """True if the run should stop at the next round boundary, because its record is no longer good enough."""
    writer_cpu_ms: float = 0.0
    """CPU time of the writer's thread so far."""
    backends: Mapping[str, BackendReport]

    @property
    def complete(self) -> bool:
        """True if every event of this attempt is in the log."""
        return self.log_error is None and not self.num_unwritten and not self.num_dropped


class Hub:
    """A hub without a log: listeners receive the events; without any, failures are printed to stderr.

    Args:
        first_seq: The number that the log has come to, for a session without a log between two with one.
        backends: Listeners; their names must differ.
        limits: Sizes and times.
    """

    run_id = group = ""
    attempt = 0

    def __init__(
        self, *, first_seq: int = 0, backends: Sequence[Backend] = (), limits: HubLimits = DEFAULT_LIMITS
    ) -> None:
        names = [backend.name for backend in backends]
        if len(set(names)) != len(names):
            raise ValueError(f"backends need different names, got {', '.join(names)}")
        self._next_seq, self._num_shown, self._started = first_seq, 0, time.monotonic()
        self._backends: list[BackendThread] = []
        try:
            for backend in backends:
                self._backends.append(BackendThread(backend, capacity=limits.queue_capacity, hang_s=limits.hang_s))
        except BaseException:
            close_backends(self._backends, time.monotonic() + EXIT_TIMEOUT_S)
            raise

    @property
    def next_seq(self) -> int:
        """The number the next event gets; a checkpoint stores it after a durable flush."""
        return self._next_seq

    def emit(self, event: TelemetryEvent) -> None:
        """Takes an event. Never blocks."""
        if self._backends:
            line = self._stamp(self._num_shown, time.time(), time.monotonic() - self._started, event)
            self._num_shown += 1
            for backend in self._backends:
                backend.feed([line])
        elif event.severity in URGENT:
            where = "" if event.env is None else f" in env {event.env}, episode {event.episode}, epoch {event.epoch}"
            complain(f"{event.severity.value}: {event.type.value}{where}: {event.data}")

    def progress(self, phase: str, *, round: int | None = None, epoch: int | None = None) -> None:
        """Says that training moved on, for the heartbeat and for listeners that show it."""
        for backend in self._backends:
            backend.watch()
            if round is not None and epoch is not None:
                backend.tick((round, epoch))

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        """Waits until everything accepted so far is in the log, and asks the listeners to flush.

        Args:
            timeout: Most seconds to wait.
            fsync: True to also make it survive a loss of power.

        Returns:
            False if that did not happen in time or cannot happen now.
        """
        return True

    def close(self, timeout: float = EXIT_TIMEOUT_S) -> HubHealth:
        """Writes what is left and ends the listeners, within `timeout` seconds. More calls only report again."""
        close_backends(self._backends, time.monotonic() + timeout)
        return self.health()

    def health(self) -> HubHealth:
        """The state of the hub; works before and after `close`."""
        return HubHealth(backends=self._backend_reports())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _backend_reports(self) -> dict[str, BackendReport]:
        return {thread.backend.name: thread.report() for thread in self._backends}

    def _stamp(self, seq: int, wall: float, mono: float, event: TelemetryEvent) -> LoggedEvent:
        return LoggedEvent(
            v=SCHEMA_VERSION,
            run=self.run_id,
            attempt=self.attempt,
            seq=seq,
            wall=round(wall, 6),
            mono=round(mono, 6),
            type=event.type,
            severity=event.severity,
            round=event.round,
            episode=event.episode,
            env=event.env,
            epoch=event.epoch,
            group=self.group,
            data=event.data,
        )


class TelemetryHub(Hub):
    """One run's way into its log: begins a new attempt. Use it as a context manager, or call `close`.

    Args:
        run_dir: The run directory; created if missing.
        run_id: Name of the run; None for the one the directory holds, or a new one.
        group: Cohort of the run; None for the one the directory holds, or the default.
        first_seq: Number of the first event: 0, or the checkpoint's `next_seq`.
        backends: Listeners; their names must differ.
        require_complete: True if the run should stop as soon as the log is not complete.
        limits: Sizes and times.

    Raises:
        ValueError: The directory belongs to another run or group, or holds a log of another format.
        OSError: The directory cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str | None = None,
        group: str | None = None,
        first_seq: int = 0,
        backends: Sequence[Backend] = (),
        require_complete: bool = False,
        limits: HubLimits = DEFAULT_LIMITS,
    ) -> None:
        log = LogFile(run_dir, run_id=run_id, group=group, first_seq=first_seq)
        try:
            super().__init__(first_seq=first_seq, backends=backends, limits=limits)
        except BaseException:  # a listener that does not start; the run itself is as it was
            log.discard()
            raise
        self.run_dir, self.run_id, self.attempt, self.group = run_dir, log.run_id, log.file.attempt, log.group
        self._limits, self._require_complete = limits, require_complete
        self._writer = LogWriter(log, retry_s=limits.retry_s)
        self._heartbeat = HeartbeatWriter(run_dir, run_id=self.run_id, attempt=self.attempt, every_s=limits.heartbeat_s)
        # Guarded by the condition, which also signals changes, as is `_next_seq`:
        self._changed = threading.Condition()
        self._queue: list[tuple[int, float, float, TelemetryEvent]] = []
        self._drops = Drops()
        self._high_water = self._num_late = 0
        self._num_asked = self._num_served = 0
        self._urgent = self._sync_wanted = self._flush_ok = self._closing = self._done = False
        self._crash: str | None = None
        self._writer_cpu_s = 0.0
        self._position: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="esper-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ---- what the training thread calls

    def emit(self, event: TelemetryEvent) -> None:
        """Takes an event. Never blocks."""
        problem = _problem(event)
        wall, mono = time.time(), time.monotonic() - self._started
        with self._changed:
            if self._closing or self._done:
                self._num_late += 1
                return
            seq = self._next_seq
            self._next_seq += 1
            if problem is not None:
                self._drops.add(event.type.value, seq, "invalid")
            elif len(self._queue) >= self._limits.queue_capacity and not EVENTS[event.type].must:
                self._drops.add(event.type.value, seq, "queue_full")
            else:
                self._queue.append((seq, wall, mono, event))
                self._high_water = max(self._high_water, len(self._queue))
            if event.severity in URGENT or len(self._queue) >= self._limits.queue_capacity:
                self._urgent = True
                self._changed.notify_all()
        if problem is not None:
            complain(f"an event is lost because it breaks the catalogue: {problem}")

    def progress(self, phase: str, *, round: int | None = None, epoch: int | None = None) -> None:
        """Says that training moved on, for the heartbeat and for listeners that show it."""
        self._heartbeat.progress(phase, round, epoch)
        if round is not None and epoch is not None:
            self._position = round, epoch

    @property
    def next_seq(self) -> int:
        """The number the next event gets; a checkpoint stores it after a durable flush."""
        with self._changed:
            return self._next_seq

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        """Waits until everything accepted so far is in the log; False if it is not in time or cannot be now."""
        with self._changed:
            self._num_asked += 1
            mine = self._num_asked
            self._sync_wanted = self._sync_wanted or fsync
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_served >= mine or self._done, timeout)
            return self._flush_ok if self._num_served >= mine else self._done and self._log_error() is None

    def close(self, timeout: float = EXIT_TIMEOUT_S) -> HubHealth:
        """Writes what is left and ends the listeners, within `timeout` seconds. More calls only report again."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        close_backends(self._backends, deadline)
        atexit.unregister(self.close)
        health = self.health()
        return health if self._done else replace(health, log_error="the writer did not end in time")

    def health(self) -> HubHealth:
        """The state of the hub; works before and after `close`."""
        with self._changed:
            held, error, dropped = self._writer.num_held, self._log_error(), self._all_dropped()
            unwritten = held + len(self._queue)
            incomplete = bool(held or error or dropped)
            return HubHealth(
                queue_high_water=self._high_water,
                num_held=held,
                num_unwritten=unwritten,
                num_dropped=dropped,
                num_late=self._num_late,
                log_error=error,
                must_stop=unwritten > MAX_HELD or self._crash is not None or (self._require_complete and incomplete),
                writer_cpu_ms=1000.0 * self._writer_cpu_s,
                backends=self._backend_reports(),
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TelemetryHub belongs to the process that opened it and cannot be pickled")

    # ---- what the writer's thread does

    def _run(self) -> None:
        try:
            while not self._done:
                with self._changed:
                    self._changed.wait_for(self._has_work, self._limits.flush_interval_s)
                    asked, sync, closing = self._num_asked, self._sync_wanted, self._closing
                    self._urgent = self._sync_wanted = False
                self._serve(asked, sync=sync, closing=closing)
        except Exception:
            # A defect here must not stop training, and must not pass unseen either.
            self._crash = traceback.format_exc(limit=-3)
            complain(f"the log's writer failed; this run's log ends here:\n{self._crash}")
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._urgent or self._closing or self._num_asked > self._num_served

    def _serve(self, asked: int, *, sync: bool, closing: bool) -> None:
        flushing = asked > self._num_served
        self._writer.retry(now=flushing or closing)
        batch = self._take()
        self._writer.write(batch)
        if (closing or flushing) and (rest := self._take()):  # explanations of what only the writer found unusable
            self._writer.write(rest)
            batch += rest
        self._feed(batch, flush=flushing)
        flushed = self._writer.sync() if sync else self._writer.error is None
        if closing:
            self._writer.close()
        self._write_status(closed=closing)
        with self._changed:
            self._writer_cpu_s = time.thread_time()
            self._flush_ok, self._num_served, self._done = flushed, asked, closing
            self._changed.notify_all()

    def _take(self) -> list[LoggedEvent]:
        """Everything accepted so far, then the explanations of what was lost, if they can be written."""
        with self._changed:
            gaps = self._drops.take()
            if self._writer.error is None:
                gaps += self._writer.lost.take()
            for gap in gaps:
                self._queue.append(self._explanation(gap))
            taken, self._queue = self._queue, []
        return [self._stamp(*each) for each in taken]

    def _explanation(self, gap: EventsDropped) -> tuple[int, float, float, TelemetryEvent]:
        seq = self._next_seq
        self._next_seq += 1
        mono = time.monotonic() - self._started
        return seq, time.time(), mono, make_event(TelemetryEventType.EVENTS_DROPPED, gap, Severity.WARNING)

    def _feed(self, batch: list[LoggedEvent], *, flush: bool) -> None:
        position, self._position = self._position, None
        for backend in self._backends:
            backend.watch()
            backend.feed(batch)
            if position is not None:
                backend.tick(position)
            if flush:
                backend.ask_flush()

    def _write_status(self, *, closed: bool) -> None:
        with self._changed:
            last_seq, dropped = self._next_seq - 1, self._all_dropped()
        self._heartbeat.beat(
            last_seq=last_seq, dropped=dropped, num_held=self._writer.num_held, error=self._log_error(), closed=closed
        )

    def _all_dropped(self) -> dict[str, int]:
        return dict(self._drops.total + self._writer.lost.total)

    def _log_error(self) -> str | None:
        return self._crash or self._writer.error or self._writer.sync_error


def _problem(event: TelemetryEvent) -> str | None:
    """What is wrong with an event; None if it is as the catalogue wants it."""
    try:
        check_event(event)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


_NO_LOG = Hub()
_current: Hub = _NO_LOG


def get_hub() -> Hub:
    """The hub of this process, or one without a log. For composition roots; everyone else is handed a hub."""
    return _current


def set_hub(hub: TelemetryHub | None) -> None:
    """Makes a hub the one of this process; None to have none."""
    global _current
    _current = _NO_LOG if hub is None else hub
