"""The last event of a run: how it ended, and what it had come to. Nothing here ends a run."""

from __future__ import annotations

import time
import traceback
from types import TracebackType
from typing import Literal, Self

from esper.leyline import RunEnded, Severity, TelemetryEventType, make_event
from esper.nissa import Hub
from esper.simic.training.log_watch import LogWatch
from esper.simic.training.vectorized_trainer import VectorizedPPOTrainer
from esper.tolaria.messages import StepCancelled

TRACEBACK_CHARACTERS = 2_000


class EndMarker:
    """Tells the log how its `with` block was left.

    Args:
        hub: The log.
        watch: Knows whether the log itself ended the run.
    """

    def __init__(self, hub: Hub, watch: LogWatch) -> None:
        self.trainer: VectorizedPPOTrainer | None = None
        """To be set as soon as there is one."""
        self._hub, self._watch = hub, watch
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, StepCancelled | KeyboardInterrupt)
        self._tell(self._status(error, stopped=stopped), None if stopped else error)

    def _status(self, error: BaseException | None, *, stopped: bool) -> Literal["completed", "failed", "interrupted"]:
        if error is not None or self.trainer is None:
            return "interrupted" if stopped else "failed"
        return "completed" if self.trainer.next_round >= self.trainer.config.rounds else "interrupted"

    def _tell(self, status: Literal["completed", "failed", "interrupted"], problem: BaseException | None) -> None:
        history = [] if self.trainer is None else self.trainer.history
        tail = name = message = None
        if problem is not None:
            tail = "".join(traceback.format_exception(problem))[-TRACEBACK_CHARACTERS:]
            name, message = type(problem).__name__, str(problem)
        elif self._watch.reason is not None:
            name, message = "LogIncomplete", self._watch.reason
        payload = RunEnded(
            status=status,
            error_type=name,
            error_message=message,
            traceback_tail=tail,
            num_rounds_total=len(history),
            num_env_steps_total=0 if self.trainer is None else self.trainer.num_env_steps,
            best_accuracy_pct=max((row.accuracy_best_pct for row in history), default=None),
            final_accuracy_pct=history[-1].accuracy_mean_pct if history else None,
            wall_s=time.monotonic() - self._started,
            num_dropped_total=sum(self._hub.health().num_dropped.values()),
        )
        severity = Severity.ERROR if status == "failed" else Severity.INFO
        self._hub.emit(make_event(TelemetryEventType.RUN_ENDED, payload, severity))
