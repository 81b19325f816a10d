"""What all tests share: one thread for torch, no clock in property tests, signals as a terminal gives them."""

from __future__ import annotations

import gc
import os
import signal

from hypothesis import settings

# Before anything imports torch, and for the processes that tests start. Float sums change with the number of threads,
# and tests that run side by side would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure, and timing belongs in benchmarks.
settings.register_profile("esper", deadline=None)
settings.load_profile("esper")

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


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage walks through it again, and some libraries ask often."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries complain about what is never freed."""
    gc.unfreeze()
