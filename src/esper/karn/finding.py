"""What can be said about a run: the states it can be in, and a finding with its evidence."""

from __future__ import annotations

from enum import Enum

from esper.leyline import Severity, record


class State(str, Enum):
    """What a run is doing, in one word."""

    FAILED = "failed"
    DIED = "died"
    EVIDENCE_BROKEN = "evidence broken"
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    STALLED = "stalled"
    BROKEN_UPDATE = "broken update"
    UNSAFE = "unsafe"
    REWARD_HACKING = "reward hacking"
    STARTING = "starting"
    WARMING_UP = "warming up"
    ALARM = "alarm"
    NOT_ACTING = "not acting"
    WARNING = "warning"
    IMPROVING = "improving"
    PLATEAU = "plateau"
    DEGRADING = "degrading"
    STEADY = "steady"


@record
class Finding:
    """One rule that matched, with its evidence."""

    state: State
    severity: Severity
    now: str
    """What is the case."""
    why: str
    """Metric, value, limit and sequence number."""
    next: str
    """What to do about it."""

    @property
    def headline(self) -> str:
        """The state and what is the case, without saying it twice."""
        return headline(self.state, self.now)


def headline(state: State, now: str) -> str:
    """One sentence that begins with the state."""
    return now if now.startswith(state.value) else f"{state.value}: {now}"
