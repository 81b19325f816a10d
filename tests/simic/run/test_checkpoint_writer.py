"""Saves that the event log allows, and those that it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.leyline import CheckpointRecorded, Severity, TelemetryEvent
from esper.nissa import Hub, HubHealth
from esper.simic.run.checkpoint import load_checkpoint
from esper.simic.run.checkpoint_schedule import CheckpointWriter
from esper.simic.training.config import TrainingConfig
from tests.simic.run.saving import contents, names, run_with


class Log(Hub):
    """A log with a clock: each flush takes as long as it is told to, and fails if it takes long. It explains a loss, so
    it takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.flushes_s: list[float] = []
        self.num_dropped: dict[str, int] = {}
        self.reported: list[tuple[Severity, str, int, str | None]] = []

    def emit(self, event: TelemetryEvent) -> None:
        assert isinstance(event.data, CheckpointRecorded)
        self.reported.append((event.severity, event.data.action, event.data.round, event.data.error))

    def health(self) -> HubHealth:
        return replace(super().health(), num_dropped=self.num_dropped)

    def flush(self, timeout: float, *, fsync: bool = False) -> bool:
        assert fsync, "a checkpoint counts events that a loss of power must not take"
        self._next_seq += 1
        took_s = self.flushes_s.pop(0) if self.flushes_s else 0.0
        self.now_s += min(took_s, timeout)
        return took_s < timeout


def writer_of(folder: Path, log: Log, **changes: Any) -> CheckpointWriter:
    config = TrainingConfig(**changes)
    return CheckpointWriter(run_with(folder), log, attempt=0, resumed_from=None, config=config, clock=lambda: log.now_s)


def test_one_slow_flush_does_not_put_off_saving_for_half_an_hour(tmp_path: Path) -> None:
    """Rounds of 30 s under the default schedule; the log hangs once, at the second of them."""
    log = Log()
    writer = writer_of(tmp_path, log)
    log.flushes_s = [0.0, 60.0]
    saved = []
    for index in range(1, 6):
        log.now_s += 30.0
        if writer.offer(index, lambda index=index: contents(index), score=None, last=False):  # type: ignore[misc]
            saved.append(index)
    assert saved == [1, 3, 4, 5]
    assert writer.saved_index == 5
    assert names(writer._run) == [f"ckpt-{index:08d}" for index in (3, 4, 5)]


def test_a_checkpoint_counts_the_events_that_are_durable_and_no_others(tmp_path: Path) -> None:
    log = Log()
    log._next_seq = 6
    saved = writer_of(tmp_path, log).offer(1, lambda: contents(1), score=None, last=False)
    assert saved is not None
    assert load_checkpoint(saved.path).facts.next_seq == 7


def test_a_save_that_the_log_does_not_allow_is_reported_as_failed(tmp_path: Path) -> None:
    log = Log()
    writer = writer_of(tmp_path, log, checkpoint_s=0.0, require_complete=True)
    log.flushes_s = [60.0]
    writer.offer(1, lambda: contents(1), score=None, last=False)
    log.now_s += 60.0
    log.num_dropped = {"EPOCH_COMPLETED": 1}
    writer.offer(2, lambda: contents(2), score=None, last=False)
    log.num_dropped = {}
    writer.offer(3, lambda: contents(3), score=None, last=False)
    assert log.reported == [
        (Severity.ERROR, "save_failed", 1, "the event log cannot be made durable"),
        (Severity.ERROR, "save_failed", 2, "the event log has lost events, and this run needs them all"),
        (Severity.INFO, "saved", 3, None),
    ]
    assert names(writer._run) == ["ckpt-00000003"]
