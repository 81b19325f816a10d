"""What all tests share: signals as a terminal gives them to a program."""

from __future__ import annotations

import signal

STOPS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def pytest_configure() -> None:
    """A shell starts its background jobs with interrupts ignored, which Esper respects; its tests send some."""
    for signum, usual in STOPS.items():
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, usual)
