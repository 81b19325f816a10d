"""Remembers a host's recent validation results and says how training is going. Knows nothing of hosts or heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from esper.leyline import TrainingSignals

WINDOW = 10
RECENT = 5
"""Entries of the history that are shown in the signals."""
PLATEAU_GAIN_PP = 0.5
"""Accuracy gain, in points, that counts as progress."""
STABLE_SHARE = 0.03
"""Fall of the best loss from the older to the newer half of the window below which training has settled."""


class TrackerState(TypedDict):
    """What a tracker must remember; plain JSON."""

    losses: list[float]
    accuracies_pct: list[float]
    reference_pct: float | None
    plateau_epochs: int
    stable: bool


def _fresh() -> TrackerState:
    return TrackerState(
        losses=[],
        accuracies_pct=[],
        reference_pct=None,
        plateau_epochs=0,
        stable=False,
    )


class SignalTracker:
    """The history of one env's episode. The first result it is given is the untrained host's."""

    def __init__(self, horizon: int, window: int = WINDOW) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 epoch, got {horizon}")
        if window < 2:
            raise ValueError(f"window must be at least 2 epochs, got {window}")
        self.horizon = horizon
        self.window = window
        self._state = _fresh()

    def reset(self) -> None:
        """Forgets everything: a new episode starts."""
        self._state = _fresh()

    def update(self, val_loss: float, val_accuracy_pct: float) -> TrainingSignals:
        """Takes one validation result and returns the signals that include it."""
        self._state = self._next(val_loss, val_accuracy_pct)
        return self._signals(self._state)

    def peek(self, val_loss: float, val_accuracy_pct: float) -> TrainingSignals:
        """Returns what `update` would return, and remembers nothing."""
        return self._signals(self._next(val_loss, val_accuracy_pct))

    def state_dict(self) -> TrackerState:
        """The whole memory, independent of the tracker's later life."""
        return _copy(self._state)

    def load_state_dict(self, state: TrackerState) -> None:
        """Continues from a saved memory."""
        self._state = _copy(state)

    def _next(self, val_loss: float, val_accuracy_pct: float) -> TrackerState:
        old = self._state
        losses = [*old["losses"], val_loss][-self.window :]
        reference = old["reference_pct"]
        # The reference moves only by whole gains, so a slow climb is progress and noise around a level is not.
        progressed = reference is None or val_accuracy_pct >= reference + PLATEAU_GAIN_PP
        return TrackerState(
            losses=losses,
            accuracies_pct=[*old["accuracies_pct"], val_accuracy_pct][-self.window :],
            reference_pct=val_accuracy_pct if progressed else reference,
            plateau_epochs=0 if progressed else old["plateau_epochs"] + 1,
            stable=old["stable"] or self._settled(losses),
        )

    def _settled(self, losses: Sequence[float]) -> bool:
        if len(losses) < self.window:
            return False
        middle = self.window // 2
        older, newer = min(losses[:middle]), min(losses[middle:])
        return newer > older - STABLE_SHARE * abs(older)

    def _signals(self, state: TrackerState) -> TrainingSignals:
        return TrainingSignals(
            horizon=self.horizon,
            recent_accuracies_pct=tuple(state["accuracies_pct"][-RECENT:]),
            plateau_epochs=state["plateau_epochs"],
            stable=state["stable"],
        )


def _copy(state: TrackerState) -> TrackerState:
    copy = TrackerState(**state)
    copy["losses"] = list(state["losses"])
    copy["accuracies_pct"] = list(state["accuracies_pct"])
    return copy
