"""The verdict on a run: what it is doing, why that is said, what to do next. Pure, and the only one there is."""

from __future__ import annotations

from esper.karn.finding import Finding, State, headline
from esper.karn.process import Heartbeat
from esper.karn.rules import RULES
from esper.karn.view import RunView
from esper.leyline import Severity, record


@record
class Verdict:
    """The most urgent finding, and all of them in order of urgency."""

    state: State
    severity: Severity
    now: str
    why: str
    next: str
    findings: tuple[Finding, ...]

    @property
    def headline(self) -> str:
        """The state and what is the case, in one sentence."""
        return headline(self.state, self.now)


def verdict(view: RunView, heartbeat: Heartbeat | None, wall: float) -> Verdict:
    """Judges a run.

    Args:
        view: The run, folded from its log.
        heartbeat: What its status file and process say; None if there is no such file.
        wall: Unix seconds now.
    """
    findings = tuple(finding for rule in RULES for finding in rule(view, heartbeat, wall))
    first = findings[0]
    return Verdict(
        state=first.state,
        severity=first.severity,
        now=first.now,
        why=first.why,
        next=first.next,
        findings=findings,
    )
