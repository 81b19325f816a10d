"""What all fixed controllers share: one decision per env, made inside the masks, and a memory that can be saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from esper.leyline import ActionExecutionResult, ActionSpec, LifecycleOp
from esper.tamiyo.situation import Setting, Situation, situations


class Controller(ABC):
    """A rule that looks at one env at a time. Runs in the same loop as a learned policy."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts a round of episodes from their reset state."""
        self.forget()
        for situation in situations(state, self.setting):
            self.meet(situation)

    def act(self, state: ActionExecutionResult) -> tuple[ActionSpec, ...]:
        """One spec per env, in env order. Where only waiting is legal, the rule is not asked."""
        return tuple(
            situation.wait() if situation.masks.op.count(True) == 1 else self.decide(situation)
            for situation in situations(state, self.setting)
        )

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Takes note of what every env has become."""
        for situation, outcome in zip(situations(after, self.setting), after.outcomes, strict=True):
            if outcome.applied:
                self.learn(situation, outcome.op)

    @abstractmethod
    def decide(self, situation: Situation) -> ActionSpec:
        """The choice for one env. It must be legal there."""

    # A rule without a memory need not override the rest.

    def forget(self) -> None:  # noqa: B027
        """Drops what is remembered of earlier episodes."""

    def meet(self, situation: Situation) -> None:  # noqa: B027
        """Sees an env at the start of its episode."""

    def learn(self, situation: Situation, op: LifecycleOp) -> None:  # noqa: B027
        """Sees an env after a step in which it took `op`."""

    def state_dict(self) -> dict[str, Any]:
        """The memory as plain JSON; empty for a rule that needs none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a saved memory."""
        assert not state, f"{type(self).__name__} has no memory to restore"
