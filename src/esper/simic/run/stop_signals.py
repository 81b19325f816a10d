"""How a run is asked to stop: signals become two flags that the loop reads. Nothing is saved or closed in here.

| signal | what it asks for |
|---|---|
| first SIGINT (Ctrl-C) | finish this round, save, end |
| second SIGINT, SIGTERM or SIGHUP | stop now; the unfinished round is repeated on resume |
| third SIGINT | the process ends at once; what was committed is intact |
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from esper.leyline import ExitCode

_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}


class StopSignals:
    """While entered, signals set flags instead of ending the process; afterwards they do what they did before.

    A signal that is ignored when the run starts stays ignored, so `nohup` and background jobs work as usual. Outside
    the main thread nothing is installed, because Python delivers signals there only.
    """

    def __init__(self) -> None:
        self.after_round = False
        """The run is to end at the next boundary, or earlier."""
        self.now = False
        """The run is to end without completing its round."""
        self.exit_code: ExitCode | None = None
        """What the process should end with; None: nobody asked it to stop."""
        self.round_s: float | None = None
        """How long a round takes, for the message; None: not known yet."""
        self.notice: str | None = None
        """The message for the terminal; None: nobody asked to stop."""
        self.on_screen: Callable[[], bool] = lambda: False
        """True while something draws `notice`: a line written across its drawing would be lost."""
        self._cancels: list[Callable[[], None]] = []
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in _CODES:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signum, before = self._before.popitem()
            # None: it was set outside Python and cannot be set again.
            signal.signal(signum, signal.SIG_DFL if before is None else before)

    def watch(self, cancel: Callable[[], None]) -> None:
        """Takes what makes a running step stop at once. It is called inside the handler, so it may only set flags."""
        self._cancels.append(cancel)
        if self.now:
            cancel()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts == 3:
            os._exit(ExitCode.INTERRUPTED)
        if self.now:
            return
        self.exit_code = _CODES[signal.Signals(signum)]
        self.after_round = True
        if signum == signal.SIGINT and self._interrupts == 1:
            self._notify(
                f"stopping after this round{_duration(self.round_s)}; Ctrl-C again stops now and repeats it on resume"
            )
            return
        self.now = True
        self._notify(
            "stopping now; the unfinished round is repeated on resume. A third Ctrl-C ends the process at once"
        )
        for cancel in self._cancels:
            cancel()

    def _notify(self, words: str) -> None:
        self.notice = words
        if not self.on_screen():
            _write(f"esper: {words}\n")


def _duration(round_s: float | None) -> str:
    return "" if round_s is None else f" (rounds take about {round_s:.0f} s)"


def _write(line: str) -> None:
    # Not through sys.stderr: the handler may have interrupted a write to it, and buffered files do not allow two. A
    # terminal that is gone, as after SIGHUP, is no reason to fail.
    with suppress(OSError):
        os.write(2, line.encode())
