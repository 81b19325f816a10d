"""Remembers a host's recent validation results and says how training is going. Knows nothing of hosts or heads."""

from __future__ import annotations

import copy
from typing import Any

from esper.leyline import TrainingSignals

WINDOW = 10
RECENT = 5
"""Entries of the history that are shown in the signals."""
PLATEAU_GAIN_PP = 0.5
"""Accuracy gain, in points, that counts as progress."""
STABLE_SHARE = 0.03
"""Fall of the best loss from the older to the newer half of the window below which training has settled."""


class SignalTracker:
    """The history of one env's episode. The first result it is given is the untrained host's."""

    def __init__(self, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 epoch, got {horizon}")
        self.horizon = horizon
        self._state: dict[str, Any] = {
            "losses": [],
            "accuracies_pct": [],
            "reference_pct": None,
            "plateau_epochs": 0,
            "stable": False,
        }

    def update(self, val_loss: float, val_accuracy_pct: float) -> TrainingSignals:
        """Takes one validation result and returns the signals that include it."""
        state = self._state
        losses = state["losses"] = [*state["losses"], val_loss][-WINDOW:]
        accuracies_pct = state["accuracies_pct"] = [*state["accuracies_pct"], val_accuracy_pct][-WINDOW:]
        # The reference moves only by whole gains, so a slow climb is progress and noise around a level is not.
        reference = state["reference_pct"]
        if reference is None or val_accuracy_pct >= reference + PLATEAU_GAIN_PP:
            state["reference_pct"], state["plateau_epochs"] = val_accuracy_pct, 0
        else:
            state["plateau_epochs"] += 1
        state["stable"] = state["stable"] or _settled(losses)
        return TrainingSignals(
            horizon=self.horizon,
            recent_accuracies_pct=tuple(accuracies_pct[-RECENT:]),
            plateau_epochs=state["plateau_epochs"],
            stable=state["stable"],
        )

    def state_dict(self) -> dict[str, Any]:
        """A copy of the history, as plain JSON."""
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved history."""
        self._state = copy.deepcopy(state)


def _settled(losses: list[float]) -> bool:
    if len(losses) < WINDOW:
        return False
    older, newer = min(losses[: WINDOW // 2]), min(losses[WINDOW // 2 :])
    return newer > older - STABLE_SHARE * abs(older)
