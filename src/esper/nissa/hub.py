"""The hub: takes events from the training thread, numbers them, and sees to it that they reach the log.

`emit` never blocks and touches no file; one thread does the writing. Only the parent process owns a hub. It knows the
catalogue's promises about events, not what they mean, and offers nothing to read back but its own health.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from esper.leyline import (
    EVENTS,
    SCHEMA_VERSION,
    EventsDropped,
    LoggedEvent,
    RunManifest,
    Severity,
    TelemetryEvent,
    TelemetryEventType,
    check_event,
    make_event,
)
from esper.leyline.rundir import DEFAULT_GROUP
from esper.nissa.backends import Backend, BackendLane, close_lanes, reports_of
from esper.nissa.codec import encode
from esper.nissa.drops import Drops
from esper.nissa.heartbeat import Heartbeat
from esper.nissa.jsonl import LogFile
from esper.nissa.reports import HubHealth, HubReport
from esper.nissa.segments import read_manifest
from esper.nissa.writer import URGENT, LogWriter

MAX_HELD = 100_000
"""Events that may wait for a log that cannot be written before the run has to stop."""
EXIT_TIMEOUT_S = 5.0

__all__ = ["MAX_HELD", "URGENT", "TelemetryHub", "complain"]


def complain(message: str) -> None:
    """One line for the person at the terminal, if there is one: a process may have no standard error at all."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"esper: {message}\n")
        sys.stderr.flush()


class TelemetryHub:
    """One run's way into its log. Use it as a context manager, or call `close`.

    Args:
        run_dir: A run directory in which `begin_attempt` entered this attempt.
        run_id: Name of the run.
        attempt: Which start of the run this is.
        first_seq: Number of the first event.
        group: Cohort of the run.
        queue_capacity: Events that may wait for the writer; beyond it only those that must not be lost are taken.
        flush_interval_s: Longest time an event waits.
        rotate_bytes: Size at which the log continues in a new file.
        heartbeat_s: Time between two status files.
        backends: Listeners; their names must differ.
        strict: True to raise on events that break the catalogue; otherwise they are counted and named on stderr.
        require_complete: True if the run should stop as soon as the log is not complete.
        retry_s: Time between two tries on a log that cannot be written.
        hang_s: Time after which a listener that does not return is switched off. One that does not start in this time
            is an error, as is one whose start fails.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str,
        attempt: int,
        first_seq: int,
        group: str = DEFAULT_GROUP,
        queue_capacity: int = 8192,
        flush_interval_s: float = 0.5,
        rotate_bytes: int = 64 << 20,
        heartbeat_s: float = 1.0,
        backends: Sequence[Backend] = (),
        strict: bool = False,
        require_complete: bool = False,
        retry_s: float = 5.0,
        hang_s: float = 30.0,
    ) -> None:
        names = [backend.name for backend in backends]
        if len(set(names)) != len(names):
            raise ValueError(f"backends need different names, got {', '.join(names)}")
        self.run_dir, self.run_id, self.attempt, self.group = run_dir, run_id, attempt, group
        self._capacity, self._flush_interval_s = queue_capacity, flush_interval_s
        self._strict, self._require_complete = strict, require_complete
        self._mono_start = time.monotonic()
        log = LogFile(run_dir, _manifest_of(run_dir, run_id, attempt), rotate_bytes=rotate_bytes)
        self._writer = LogWriter(log, retry_s=retry_s, complain=complain)
        self._heartbeat = Heartbeat(run_dir, run_id=run_id, attempt=attempt, every_s=heartbeat_s)
        # Guarded by the condition, which also tells of changes:
        self._changed = threading.Condition()
        self._next_seq = first_seq
        self._queue: list[tuple[int, float, float, TelemetryEvent]] = []
        self._drops = Drops()
        self._high_water = self._num_late = 0
        self._num_asked = self._num_served = 0
        self._urgent = self._sync_wanted = self._flush_ok = self._closing = self._done = False
        self._crash: str | None = None
        self._writer_cpu_s = 0.0
        self._position: tuple[int, int] | None = None

        self._lanes: list[BackendLane] = []
        try:
            for backend in backends:
                self._lanes.append(BackendLane(backend, capacity=queue_capacity, hang_s=hang_s, complain=complain))
        except BaseException:
            close_lanes(self._lanes, time.monotonic() + EXIT_TIMEOUT_S)
            log.close()
            raise
        self._thread = threading.Thread(target=self._run, name="esper-log", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    # ---- what the training thread calls

    def emit(self, event: TelemetryEvent) -> None:
        """Takes an event. Never blocks, and raises only if strict."""
        problem = self._problem(event)
        wall, mono = time.time(), time.monotonic() - self._mono_start
        with self._changed:
            if self._closing or self._done:
                self._num_late += 1
                return
            seq = self._next_seq
            self._next_seq += 1
            if problem is not None:
                self._drops.add(event.type.value, seq, "invalid")
            elif len(self._queue) >= self._capacity and not EVENTS[event.type].must:
                self._drops.add(event.type.value, seq, "queue_full")
            else:
                self._queue.append((seq, wall, mono, event))
                self._high_water = max(self._high_water, len(self._queue))
            if event.severity in URGENT or len(self._queue) >= self._capacity:
                self._urgent = True
                self._changed.notify_all()
        if problem is not None:
            complain(f"an event is lost because it breaks the catalogue: {problem}")

    def progress(self, phase: str, *, round: int | None = None, epoch: int | None = None) -> None:
        """Says that training moved on, for the heartbeat and for listeners that want to know."""
        self._heartbeat.progress(phase, round, epoch)
        if round is not None and epoch is not None:
            self._position = round, epoch

    @property
    def next_seq(self) -> int:
        """The number the next event gets; a checkpoint stores it after a durable flush."""
        with self._changed:
            return self._next_seq

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        """Waits until everything accepted so far is in the file, and asks the backends to flush.

        Args:
            timeout: Most seconds to wait.
            fsync: True to also make it survive a loss of power.

        Returns:
            False if that did not happen in time or cannot happen now.
        """
        with self._changed:
            self._num_asked += 1
            mine = self._num_asked
            self._sync_wanted = self._sync_wanted or fsync
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_served >= mine or self._done, timeout)
            return self._flush_ok if self._num_served >= mine else self._done and self._log_error() is None

    def close(self, timeout: float = EXIT_TIMEOUT_S) -> HubReport:
        """Writes what is left and ends the backends, within `timeout` seconds. More calls only report again."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        close_lanes(self._lanes, deadline)
        atexit.unregister(self._close_at_exit)
        with self._changed:
            unwritten, dropped = len(self._queue) + self._writer.num_held, self._all_dropped()
            error = self._log_error() if self._done else "the writer did not end in time"
            return HubReport(
                next_seq=self._next_seq,
                num_written=self._writer.num_written,
                num_unwritten=unwritten,
                num_dropped=dropped,
                num_late=self._num_late,
                log_error=error,
                complete=error is None and not unwritten and not dropped,
                backends=reports_of(self._lanes),
            )

    def health(self) -> HubHealth:
        """How the hub fares; works before and after `close`."""
        with self._changed:
            held, error, dropped = self._writer.num_held, self._log_error(), self._all_dropped()
            waiting = held + len(self._queue)
            incomplete = bool(held or error or dropped)
            return HubHealth(
                num_queued=len(self._queue),
                queue_high_water=self._high_water,
                num_held=held,
                num_dropped=dropped,
                log_error=error,
                must_stop=waiting > MAX_HELD or self._crash is not None or (self._require_complete and incomplete),
                writer_cpu_ms=1000.0 * self._writer_cpu_s,
                backends=reports_of(self._lanes),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TelemetryHub belongs to the process that opened it and cannot be pickled")

    def _problem(self, event: TelemetryEvent) -> str | None:
        try:
            check_event(event)
            if self._strict:
                encode(self._stamp(0, 0.0, 0.0, event))
        except (TypeError, ValueError) as error:
            if self._strict:
                raise
            return str(error)
        return None

    # ---- what the writer's thread does

    def _run(self) -> None:
        try:
            while not self._done:
                with self._changed:
                    self._changed.wait_for(self._has_work, self._flush_interval_s)
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
        self._beat(closed=closing)
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
        mono = time.monotonic() - self._mono_start
        return seq, time.time(), mono, make_event(TelemetryEventType.EVENTS_DROPPED, gap, Severity.WARNING)

    def _stamp(self, seq: int, wall: float, mono: float, event: TelemetryEvent) -> LoggedEvent:
        return stamp(event, run=self.run_id, attempt=self.attempt, group=self.group, seq=seq, wall=wall, mono=mono)

    def _feed(self, batch: list[LoggedEvent], *, flush: bool) -> None:
        position, self._position = self._position, None
        for lane in self._lanes:
            lane.watch()
            lane.feed(batch)
            if position is not None:
                lane.tick(position)
            if flush:
                lane.ask_flush()

    def _beat(self, *, closed: bool) -> None:
        if not closed and not self._heartbeat.is_due:
            return
        with self._changed:
            last_seq, dropped = self._next_seq - 1, self._all_dropped()
        self._heartbeat.beat(
            last_seq=last_seq, dropped=dropped, num_held=self._writer.num_held, error=self._log_error(), closed=closed
        )

    # ---- small facts

    def _all_dropped(self) -> dict[str, int]:
        return dict(self._drops.total + Counter(self._writer.lost.total))

    def _log_error(self) -> str | None:
        return self._crash or self._writer.error or self._writer.sync_error

    def _close_at_exit(self) -> None:
        self.close(EXIT_TIMEOUT_S)


def stamp(
    event: TelemetryEvent, *, run: str, attempt: int, group: str, seq: int, wall: float, mono: float
) -> LoggedEvent:
    """An event as a line of a log."""
    return LoggedEvent(
        v=SCHEMA_VERSION,
        run=run,
        attempt=attempt,
        seq=seq,
        wall=round(wall, 6),
        mono=round(mono, 6),
        type=event.type,
        severity=event.severity,
        round=event.round,
        episode=event.episode,
        env=event.env,
        epoch=event.epoch,
        group=group,
        data=event.data,
    )


def _manifest_of(run_dir: Path, run_id: str, attempt: int) -> RunManifest:
    manifest = read_manifest(run_dir)
    if manifest is None or manifest.run != run_id or manifest.attempts[-1].attempt != attempt:
        raise ValueError(f"{run_dir} has not been prepared for attempt {attempt} of run {run_id}: call begin_attempt")
    return manifest
