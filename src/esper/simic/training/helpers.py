"""Runs from start to end: a session on disk, and Tamiyo's heuristic. They add nothing to the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.leyline import BatchSummary
from esper.nissa import Backend
from esper.simic.run.session import RunStart, Session, SessionEnd, end_unopened
from esper.simic.run.stop_signals import StopSignals
from esper.simic.training.config import LEARNED, TrainingConfig, with_overrides
from esper.simic.training.vectorized import open_session, train_ppo_vectorized
from esper.tolaria.worker import StepCancelled

HEURISTIC = "heuristic"


def run_session(
    start: RunStart, stop: StopSignals, listeners: Sequence[Backend] = (), *, data_dir: Path | None = None
) -> SessionEnd:
    """Trains until the last round, a stop or an error, and leaves the run in a state that can be resumed.

    Raises:
        RunBusy: Another process works on this run.
        Exception: Whatever went wrong, after the log has its last event.
    """
    try:
        with open_session(start, stop, listeners, data_dir=data_dir) as session:
            if start.config.controller == LEARNED:
                train_ppo_vectorized(session=session)
            elif start.config.controller == HEURISTIC:
                train_heuristic(session=session)
            else:
                session.run()
    except StepCancelled:  # before the first round, while the scale was measured
        return end_unopened(start, stop.exit_code)
    return session.end(stop.exit_code)


def train_heuristic(
    config: TrainingConfig | None = None, /, *, session: Session | None = None, **overrides: Any
) -> list[BatchSummary]:
    """Runs Tamiyo's hand-written rules in the loop that trains policies, and returns the summaries of its rounds.

    Args:
        config: What to run; the defaults if None.
        session: A run of the heuristic that is open already; config and overrides then say nothing.
        overrides: Fields of the configuration that are to differ.
    """
    if session is not None:
        return session.run()
    base = TrainingConfig() if config is None else config
    with open_session(RunStart(config=with_overrides(base, {**overrides, "controller": HEURISTIC}))) as opened:
        return opened.run()
