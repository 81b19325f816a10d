"""The verdict on a run: what it is doing, why that is said, what to do next. Pure, and the only one there is."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

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


_RUN = re.compile(r"\bRUN\b")
"""The word that stands for the run directory in advice."""


def verdict(view: RunView, heartbeat: Heartbeat | None, wall: float, *, run_dir: Path | None = None) -> Verdict:
    """Judges a run.

    Args:
        view: The run, folded from its log.
        heartbeat: What its status file and process say; None if there is no such file.
        wall: Unix seconds now.
        run_dir: Where the run is, for commands that are advised; None leaves the word RUN in them.
    """
    findings = tuple(_placed(finding, run_dir) for rule in RULES for finding in rule(view, heartbeat, wall))
    first = findings[0]
    return Verdict(
        state=first.state,
        severity=first.severity,
        now=first.now,
        why=first.why,
        next=first.next,
        findings=findings,
    )


def _placed(finding: Finding, run_dir: Path | None) -> Finding:
    if run_dir is None:
        return finding
    place = shlex.quote(str(run_dir))
    return replace(finding, next=_RUN.sub(lambda _: place, finding.next))
