"""Listeners: served apart from the log, free to fail, never in anyone's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from esper.leyline import LoggedEvent
from tests.nissa.events import log_path, open_hub, read_lines, trend
from tests.nissa.test_failing_disk import wait_for


class Listener:
    """Keeps what it hears; a subclass misbehaves."""

    def __init__(self, name: str = "listener") -> None:
        self.name = name
        self.heard: list[int] = []
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def write(self, line: LoggedEvent) -> bool:
        self.heard.append(line.seq)
        return True

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


class Raising(Listener):
    def __init__(self, fail_on: Collection[int]) -> None:
        super().__init__("raising")
        self.fail_on = fail_on

    def write(self, line: LoggedEvent) -> bool:
        if line.seq in self.fail_on:
            raise RuntimeError("no server")
        return super().write(line)


class Hanging(Listener):
    def __init__(self) -> None:
        super().__init__("hanging")
        self.release = threading.Event()

    def write(self, line: LoggedEvent) -> bool:
        return self.release.wait(60)


def test_a_listener_hears_everything_in_order_and_is_closed(tmp_path: Path) -> None:
    listener = Listener()
    with open_hub(tmp_path, backends=(listener,)) as hub:
        for tag in range(100):
            hub.emit(trend(tag))
        hub.flush(10)
    assert listener.heard == list(range(100))
    assert (listener.calls[0], listener.calls[-1]) == ("start", "close")
    assert "flush" in listener.calls
    report = hub.close().backends["listener"]
    assert (report.state, report.num_taken, report.num_lost, report.error) == ("closed", 100, 0, None)


def test_three_errors_in_a_row_switch_a_listener_off_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raising, calm = Raising(range(5, 100)), Listener("calm")
    with open_hub(tmp_path, backends=(raising, calm)) as hub:
        for tag in range(20):
            hub.emit(trend(tag))
        hub.flush(10)
        wait_for(lambda: hub.health().backends["raising"].state == "failed")
    report = hub.close()
    assert raising.heard == list(range(5))
    assert calm.heard == list(range(20))
    assert report.complete  # a listener's loss is not the log's
    assert report.backends["raising"].num_taken == 5
    assert report.backends["raising"].num_lost == 15
    assert capsys.readouterr().err.count("raising is switched off (RuntimeError: no server)") == 1


def test_a_listener_that_wants_to_leave_the_process_is_switched_off(tmp_path: Path) -> None:
    class Leaving(Listener):
        def write(self, line: LoggedEvent) -> bool:
            raise SystemExit(1)

    with open_hub(tmp_path, backends=(Leaving("leaving"),)) as hub:
        for tag in range(5):
            hub.emit(trend(tag))
    report = hub.close()
    assert report.complete
    assert report.backends["leaving"].state == "failed"


def test_a_listener_may_ask_how_far_a_round_is(tmp_path: Path) -> None:
    class Watcher(Listener):
        def tick(self, round: int, epoch: int) -> None:
            self.calls.append(f"{round}.{epoch}")

    watcher = Watcher()
    with open_hub(tmp_path, backends=(watcher, Listener("other"))) as hub:
        for epoch in range(3):
            hub.progress("play", round=2, epoch=epoch)
            hub.flush(10)
            wait_for(lambda epoch=epoch: f"2.{epoch}" in watcher.calls)  # type: ignore[misc]
        hub.progress("save", round=3)
    assert [call for call in watcher.calls if "." in call] == ["2.0", "2.1", "2.2"]


def test_single_errors_are_forgiven(tmp_path: Path) -> None:
    raising = Raising({3, 4, 6, 8})
    with open_hub(tmp_path, backends=(raising,)) as hub:
        for tag in range(10):
            hub.emit(trend(tag))
    assert raising.heard == [0, 1, 2, 5, 7, 9]
    assert hub.close().backends["raising"].state == "closed"


def test_a_listener_that_cannot_end_is_reported_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stuck(Listener):
        def close(self) -> None:
            raise RuntimeError("no upload")

    with open_hub(tmp_path, backends=(Stuck("stuck"),)) as hub:
        hub.emit(trend(0))
    report = hub.close().backends["stuck"]
    assert (report.state, report.num_taken, report.error) == ("failed", 1, "RuntimeError: no upload")
    assert "stuck failed (RuntimeError: no upload). The log has everything" in capsys.readouterr().err


def test_a_hanging_listener_delays_nothing_and_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hanging = Hanging()
    hub = open_hub(tmp_path, backends=(hanging,), hang_s=0.05, flush_interval_s=0.01)
    for tag in range(10):
        hub.emit(trend(tag))
    assert hub.flush(10)
    assert len(read_lines(log_path(tmp_path))) == 10
    wait_for(lambda: hub.health().backends["hanging"].state == "hung")
    assert hub.close().complete
    assert capsys.readouterr().err.count("hanging is switched off") == 1
    hanging.release.set()


def test_close_waits_for_a_hanging_listener_no_longer_than_asked(tmp_path: Path) -> None:
    hanging = Hanging()
    hub = open_hub(tmp_path, backends=(hanging,))
    hub.emit(trend())
    begun = time.monotonic()
    report = hub.close(timeout=0.5)
    assert time.monotonic() - begun < 30  # it would hang for a minute
    assert report.complete
    assert report.backends["hanging"].state == "hung"
    hanging.release.set()


def test_a_hanging_listener_takes_no_time_to_close_from_the_others(tmp_path: Path) -> None:
    hanging, calm = Hanging(), Listener("calm")
    hub = open_hub(tmp_path, backends=(hanging, calm))
    hub.emit(trend())
    report = hub.close(timeout=1.0)
    assert calm.calls[-1] == "close"
    assert {name: one.state for name, one in report.backends.items()} == {"hanging": "hung", "calm": "closed"}
    hanging.release.set()


def test_a_slow_listener_loses_events_and_they_are_counted(tmp_path: Path) -> None:
    hanging = Hanging()
    hub = open_hub(tmp_path, backends=(hanging,), queue_capacity=5, flush_interval_s=60.0)
    for tag in range(20):
        hub.emit(trend(tag))
        hub.flush(10)
    assert hub.health().backends["hanging"].num_lost >= 14
    hanging.release.set()
    report = hub.close()
    assert report.complete
    assert report.backends["hanging"].num_taken + report.backends["hanging"].num_lost == 20


def test_a_listener_that_cannot_start_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    class Unstartable(Listener):
        def start(self) -> None:
            raise ConnectionError("no server")

    first = Listener("first")
    with pytest.raises(ConnectionError, match="no server"):
        open_hub(tmp_path, backends=(first, Unstartable("second")))
    assert first.calls[-1] == "close"
    open_hub(tmp_path).close()


def test_a_listener_that_never_starts_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    class Endless(Hanging):
        def start(self) -> None:
            self.release.wait(60)

    first, endless = Listener("first"), Endless()
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"hanging did not start within 0\.1 s\. Leave it out"):
        open_hub(tmp_path, backends=(first, endless), hang_s=0.1)
    assert time.monotonic() - begun < 30
    assert first.calls[-1] == "close"
    endless.release.set()
    open_hub(tmp_path).close()


def test_listeners_have_different_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="different names, got listener, listener"):
        open_hub(tmp_path, backends=(Listener(), Listener()))
