"""Signals, as a run in another process meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.leyline import ExitCode
from esper.simic.run.stop_signals import StopSignals
from tests.simic.run.saving import contents, newest, run_with, save
from tests.simic.run.system_calls import watched

LOOP = """
import signal, sys, time
from esper.simic.run.stop_signals import StopSignals
until, ignored = sys.argv[1], sys.argv[2:]
for name in ignored:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
cancelled = []
with StopSignals() as stops:
    stops.round_s = 12.3
    stops.watch(lambda: cancelled.append(1))
    print("ready", flush=True)
    while not getattr(stops, until, False):
        time.sleep(0.005)
print(stops.after_round, stops.now, len(cancelled))
sys.exit(stops.exit_code)
"""


class Loop:
    """A run that ends when its flag is set."""

    def __init__(self, until: str, *ignored: str) -> None:
        command = [sys.executable, "-c", LOOP, until, *ignored]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def send(self, signum: signal.Signals) -> None:
        os.killpg(self.process.pid, signum)

    def reported(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, out.strip()


@contextmanager
def loop(until: str, *ignored: str) -> Iterator[Loop]:
    made = Loop(until, *ignored)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_the_first_interrupt_waits_for_the_round_and_says_how_long() -> None:
    with loop("after_round") as run:
        run.send(signal.SIGINT)
        assert run.reported() == (
            "esper: stopping after this round (rounds take about 12 s); "
            "Ctrl-C again stops now and repeats it on resume\n"
        )
        assert run.end() == (130, "True False 0")


def test_the_second_interrupt_stops_now_and_cancels() -> None:
    with loop("now") as run:
        run.send(signal.SIGINT)
        assert "after this round" in run.reported()
        run.send(signal.SIGINT)
        assert "stopping now" in run.reported()
        assert run.end() == (130, "True True 1")


def test_the_third_interrupt_ends_the_process() -> None:
    with loop("never") as run:
        for words in ("after this round", "stopping now"):
            run.send(signal.SIGINT)
            assert words in run.reported()
        run.send(signal.SIGINT)
        assert run.end() == (130, "")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_request_to_end_stops_now(signum: signal.Signals, code: int) -> None:
    with loop("now") as run:
        run.send(signum)
        assert "stopping now" in run.reported()
        assert run.end() == (code, "True True 1")


def test_the_signal_that_stopped_the_run_gives_the_code() -> None:
    with loop("now") as run:
        run.send(signal.SIGINT)
        assert "after this round" in run.reported()
        run.send(signal.SIGTERM)
        assert run.end() == (143, "True True 1")


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM"])
def test_a_signal_ignored_at_the_start_stays_ignored(name: str) -> None:
    with loop("now", name) as run:
        run.send(signal.Signals[name])
        run.send(signal.SIGTERM if name != "SIGTERM" else signal.SIGHUP)
        assert run.end() == (143 if name != "SIGTERM" else 129, "True True 1")


def test_handlers_come_back_also_after_an_error() -> None:
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in signums]

    def fail() -> None:
        with StopSignals():
            assert all(signal.getsignal(signum) not in before for signum in signums)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [signal.getsignal(signum) for signum in signums] == before


def test_later_signals_change_nothing_and_a_late_watcher_is_reported() -> None:
    calls: list[int] = []
    with StopSignals() as stops:
        assert not stops.after_round
        signal.raise_signal(signal.SIGTERM)
        stops.watch(lambda: calls.append(1))
        for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(signum)
        assert (stops.after_round, stops.now, stops.exit_code) == (True, True, ExitCode.TERMINATED)
    assert calls == [1]


def test_where_a_screen_shows_the_answer_nothing_is_written_across_it(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stops:
        stops.on_screen = lambda: True
        signal.raise_signal(signal.SIGINT)
        assert stops.notice is not None
        assert stops.notice.startswith("stopping after this round; Ctrl-C again stops now")
        assert capfd.readouterr().err == ""
        stops.on_screen = lambda: False
        signal.raise_signal(signal.SIGINT)
        assert stops.notice.startswith("stopping now")
        assert capfd.readouterr().err == f"esper: {stops.notice}\n"


def test_in_another_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with StopSignals() as stops:
            seen.extend((signal.getsignal(signal.SIGTERM), stops.after_round, stops.exit_code))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, False, None]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_commit_in_progress_is_finished(call: str, tmp_path: Path) -> None:
    run = run_with(tmp_path)
    pending = [signal.SIGINT, signal.SIGTERM]

    def interrupt(number: int, name: str, args: tuple[object, ...]) -> None:
        if name == call and pending:
            signal.raise_signal(pending.pop(0))

    # Each handler tells on stderr with a call that is watched too; by then it is no longer pending.
    with StopSignals() as stops, watched(interrupt):
        save(run, 1)
        save(run, 2)
    assert (stops.now, stops.exit_code) == (True, ExitCode.TERMINATED)
    assert newest(run)[0].files == contents(2)
