"""The status file: shows that the process lives and where it is. A convenience, never evidence."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec

from esper.leyline.files import free_bytes, write_atomic
from esper.leyline.rundir import STATUS_FILE, RunStatus, process_started_s

REMEMBERED_EPOCHS = 20


class HeartbeatWriter:
    """Remembers where training is and writes it down now and then."""

    def __init__(self, run_dir: Path, *, run_id: str, attempt: int, every_s: float) -> None:
        self._run_dir, self._run_id, self._attempt, self._every_s = run_dir, run_id, attempt, every_s
        self._process_started_s = process_started_s(os.getpid())
        self._host = socket.gethostname()
        self._where: tuple[str, int | None, int | None] = ("starting", None, None)
        self._progress_at = time.monotonic()
        self._epoch_at: float | None = None
        self._epoch_times_s: deque[float] = deque(maxlen=REMEMBERED_EPOCHS)
        self._written_at = float("-inf")

    def progress(self, phase: str, round_idx: int | None, epoch: int | None) -> None:
        """Notes that training moved on. Called by the training thread; does no I/O."""
        now = time.monotonic()
        if epoch is not None and (round_idx, epoch) != self._where[1:]:
            if self._epoch_at is not None:
                self._epoch_times_s.append(now - self._epoch_at)
            self._epoch_at = now
        self._where, self._progress_at = (phase, round_idx, epoch), now

    def beat(
        self, *, last_seq: int, dropped: Mapping[str, int], num_held: int, error: str | None, closed: bool = False
    ) -> None:
        """Writes the status if it is time to, or if this is the last one. A failure is not worth a word."""
        now = time.monotonic()
        if not closed and now - self._written_at < self._every_s:
            return
        self._written_at = now
        times = tuple(self._epoch_times_s)
        phase, round_idx, epoch = self._where
        status = RunStatus(
            run=self._run_id,
            attempt=self._attempt,
            pid=os.getpid(),
            host=self._host,
            process_started_s=self._process_started_s,
            written_wall=time.time(),
            closed=closed,
            phase=phase,
            round=round_idx,
            epoch=epoch,
            last_seq=last_seq,
            silence_s=now - self._progress_at,
            median_epoch_s=median(times) if times else None,
            num_dropped=dropped,
            num_held=num_held,
            log_error=error,
            disk_free_bytes=free_bytes(self._run_dir),
        )
        with contextlib.suppress(OSError):
            write_atomic(self._run_dir / STATUS_FILE, msgspec.json.encode(status), durable=False)
