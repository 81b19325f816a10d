"""One HTML file about a run: what it was, what came of it, what went wrong, and whether the record can be trusted.

The file needs nothing but itself: pictures are inside, there is no script, and its policy lets browsers load nothing.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from esper.karn import charts
from esper.karn.console import describe_payload, figure
from esper.karn.diagnosis import RunCondition, diagnose
from esper.karn.history import RunHistory, read_history
from esper.karn.integrity import check_run
from esper.karn.page import render_page
from esper.karn.process import read_heartbeat
from esper.karn.replay import replay
from esper.leyline import Severity
from esper.leyline.files import read_regular
from esper.leyline.rundir import CONFIG_FILE

MAX_CONFIG_BYTES = 1_000_000
MAX_WARNINGS = 300


def make_report(run_dir: Path, wall: float) -> str:
    """The report of a run as HTML, as of a time in Unix seconds."""
    history, checked = read_history(replay(run_dir)), check_run(run_dir)
    verdict, *others = diagnose(
        history.view, read_heartbeat(run_dir, wall), wall, run_dir=run_dir, problems=checked.damage
    )
    if verdict.state is RunCondition.COMPLETED:  # elsewhere it advises to make a report
        verdict = replace(verdict, next="read on; nothing needs to be done")
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        {"measured": _measured, "utc": _utc, "words": describe_payload},
        name=run_dir.name,
        history=history,
        max_warnings=MAX_WARNINGS,
        view=history.view,
        begun=history.starts[-1] if history.starts else None,
        checked=checked,
        verdict=verdict,
        others=[other for other in others if other.severity is not Severity.INFO],
        charts=charts,
        provenance=list(_provenance(history)),
        config=_config(run_dir),
    )


def _config(run_dir: Path) -> str | None:
    """The configuration as it lies in the run directory, or why it cannot be shown; None if there is none."""
    try:
        return read_regular(run_dir / CONFIG_FILE, MAX_CONFIG_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"not shown: {error}"


def _measured(value: float | None, unit: str = "") -> str:
    return figure(value, ".2f", unit, missing="not measured")


def _utc(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall))


def _provenance(history: RunHistory) -> Iterator[tuple[str, str]]:
    yield "run", history.view.run or "unknown"
    if not history.starts:
        return
    begun = history.starts[-1]
    for field in fields(begun):
        value = getattr(begun, field.name)
        words = _ABSENT.get(field.name, "unknown") if value is None else _words(field.name, value)
        yield field.name.replace("_", " "), words
    for number, again in enumerate(history.starts[1:], start=1):
        yield f"resume {number}", again.resumed_from or "without a checkpoint"


_ABSENT = {
    "cuda_version": "no",
    "amp_dtype": "no",
    "backend": "torch",
    "resumed_from": "no",
    "param_budget": "no limit",
    "reward_mode": "none",
}
"""What it means that a field is None, where that is known."""


def _words(name: str, value: object) -> str:
    if name == "argv" and isinstance(value, tuple):
        return shlex.join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return str(value)
