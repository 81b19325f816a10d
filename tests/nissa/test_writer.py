"""The writer and a log that refuses now and then: order, patience, and what counts as durable."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from esper.nissa import Hub
from esper.nissa import writer as writer_module
from esper.nissa.writer import LogWriter
from tests.nissa.events import ended, trend


class Log:
    """Takes lines unless it refuses to."""

    def __init__(self) -> None:
        self.refuses = False
        self.tries = 0
        self.seqs: list[int] = []
        self.sizes: list[int] = []

    def append(self, lines: bytes) -> None:
        self.tries += 1
        if self.refuses:
            raise OSError(28, "No space left on device")
        self.seqs += [json.loads(line)["seq"] for line in lines.splitlines()]
        self.sizes.append(len(lines))

    def sync(self) -> None:
        """Always works."""


def writer_of(log: Log) -> LogWriter:
    return LogWriter(log, retry_s=5.0)  # type: ignore[arg-type]


def write(writer: LogWriter, *seqs: int, may_be_lost: bool = False) -> None:
    event = trend() if may_be_lost else ended()
    writer.write([Hub()._stamp(seq, 0.0, 0.0, event) for seq in seqs])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes when it is told to."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_what_comes_later_waits_behind_what_is_held(clock: SimpleNamespace) -> None:
    log = Log()
    writer = writer_of(log)
    log.refuses = True
    write(writer, 0)
    log.refuses = False
    write(writer, 1)
    write(writer, 2, may_be_lost=True)
    assert (log.seqs, writer.num_held) == ([], 2)
    writer.retry(now=True)
    write(writer, 3)
    assert log.seqs == [0, 1, 3]
    assert [(gap.first_seq, gap.last_seq, gap.reason) for gap in writer.lost.take()] == [(2, 2, "write_failed")]


def test_a_log_that_refuses_is_tried_again_when_it_is_time_and_not_before(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    writer = writer_of(log)
    log.refuses = True
    write(writer, 0)
    tries = []
    for _ in range(130):
        clock.s += 0.5
        writer.retry()
        write(writer, may_be_lost=True)
        tries.append(log.tries)
    assert [tries.index(number) for number in (1, 2, 3, 4)] == [0, 9, 19, 29], "every 5 s"
    assert len(capsys.readouterr().err.splitlines()) == 2, "once a minute"


def test_nothing_is_durable_while_something_is_held(clock: SimpleNamespace) -> None:
    """A checkpoint would count it, and a resume would not make it again."""
    log = Log()
    writer = writer_of(log)
    write(writer, 0)
    assert writer.sync()
    log.refuses = True
    write(writer, 1)
    assert not writer.sync()
    log.refuses = False
    assert not writer.sync()
    writer.retry(now=True)
    assert writer.sync()


def test_a_chunk_is_at_most_a_mebibyte(clock: SimpleNamespace) -> None:
    log = Log()
    write(writer_of(log), *range(10_000))
    assert log.seqs == list(range(10_000))
    assert len(log.sizes) > 2
    assert max(log.sizes) <= 1 << 20
