"""One HTML file about a run: what it was, what came of it, what went wrong, and whether the record can be trusted.

The file needs nothing but itself: pictures are inside, there is no script, and the browser is told to load nothing.
"""

from __future__ import annotations

import shlex
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from msgspec import structs

from esper.karn import charts
from esper.karn.console import clean_lines, describe
from esper.karn.finding import State
from esper.karn.integrity import Integrity, check_run
from esper.karn.process import read_heartbeat
from esper.karn.replay import replay
from esper.karn.story import Story, tell
from esper.karn.verdict import Verdict, verdict
from esper.karn.view import RunView
from esper.leyline import LoggedEvent, RunEnded, Severity
from esper.leyline.rundir import CONFIG_FILE

MAX_WARNINGS = 300
MAX_PROBLEMS = 30


def make_report(run_dir: Path, wall: float) -> str:
    """The report of a run as HTML, as of a time in Unix seconds."""
    story, checked = tell(replay(run_dir)), check_run(run_dir)
    found = _judge(story.view, checked, run_dir, wall)
    return _render(
        title=f"Run {story.view.log.run or run_dir.name}",
        subtitle=_subtitle(story),
        found=found,
        others=[finding for finding in found.findings[1:] if finding.severity is not Severity.INFO],
        outcome=list(_outcome(story)),
        charts={
            "learning": _picture(charts.learning_chart(story)),
            "outcome": _picture(charts.outcome_chart(story)),
            "timeline": _picture(charts.timeline_chart(story)),
            "policy": _picture(charts.policy_chart(story)),
        },
        timeline_note=f"Life of the seeds in the newest {charts.MAX_TIMELINE_EPISODES} episodes, at most "
        f"{charts.MAX_LANES} slots. Thin lines part episodes, a cross is a prune.",
        blueprints=list(_blueprints(story)),
        warnings=[_warning(event) for event in story.warnings[-MAX_WARNINGS:]],
        num_warnings=len(story.warnings),
        integrity_class="sev-error" if checked.damage else "sev-info" if checked.complete else "sev-warning",
        integrity_words=_whole(checked),
        integrity=list(_integrity(checked)),
        problems=checked.problems[:MAX_PROBLEMS],
        provenance=list(_provenance(story)),
        config=_config(run_dir),
    )


def _judge(view: RunView, checked: Integrity, run_dir: Path, wall: float) -> Verdict:
    """The verdict in the light of a check of the files, which opens the page if they are damaged."""
    checked_view = structs.replace(view, log=structs.replace(view.log, problems=checked.damage))
    found = verdict(checked_view, read_heartbeat(run_dir, wall), wall, run_dir=run_dir)
    if found.state is State.COMPLETED:  # elsewhere it advises to make a report
        return replace(found, next="read on; nothing needs to be done")
    return found


def _whole(checked: Integrity) -> str:
    if checked.damage:
        return "The record is NOT whole."
    return "The record is whole." if checked.complete else "Nothing is damaged, but the run has no end marker yet."


def _config(run_dir: Path) -> str | None:
    """The configuration as it lies in the run directory; None if it cannot be read."""
    try:
        return (run_dir / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _render(**values: object) -> str:
    try:
        import jinja2
    except ImportError:
        raise ImportError("reports need Jinja2: pip install 'esper-growth[runs]'") from None
    page = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    # Everything in a log is text of unknown origin, so everything is escaped, and nothing turns lines around.
    world = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, finalize=_printable)
    return world.from_string(page).render(values)


def _printable(value: object) -> object:
    """What the page is given; what it makes itself is markup already, and left alone."""
    return clean_lines(value) if type(value) is str else value


def _picture(svg: str | None) -> str | None:
    """As an image and not as markup: whatever names a chart shows, they cannot become part of the page."""
    return None if svg is None else "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()


def _subtitle(story: Story) -> str:
    log = story.view.log
    if not story.starts or log.first_wall is None or log.last_wall is None:
        return "The log has no beginning."
    begun = story.starts[-1]
    return (
        f"{begun.task}, controller {begun.controller}, seed {begun.run_seed}, group {log.group}; "
        f"{_clock(log.first_wall)} to {_clock(log.last_wall)} UTC"
    )


def _outcome(story: Story) -> Iterator[tuple[str, str]]:
    view = story.view
    ended, last = view.progress.ended, view.progress.last_round
    yield "status", "no end marker" if ended is None else ended.data.status
    yield "rounds", f"{len(story.rounds)} of {story.starts[-1].num_rounds}" if story.starts else str(len(story.rounds))
    yield "episodes", f"{len(story.episodes)}"
    if ended is not None:
        yield "best accuracy (best single host)", _figure(ended.data.best_accuracy_pct, ".2f", " %")
        yield "final accuracy (mean over envs)", _figure(ended.data.final_accuracy_pct, ".2f", " %")
        yield "time of the last attempt" if view.log.attempt else "time", f"{ended.data.wall_s:.0f} s"
    if last is not None:
        yield "committed accuracy, last round", _figure(last.data.committed_accuracy_pct, ".2f", " %")
        yield "parameters, last round", f"{last.data.params_ratio_mean:.2f} times the host's own"
    yield "rollbacks", str(view.safety.num_rollbacks)


def _blueprints(story: Story) -> Iterator[tuple[str, ...]]:
    for name, grown in sorted(story.view.growth.blueprints.items()):
        alive = grown.num_germinated - grown.num_fossilized - grown.num_pruned
        mean = grown.sum_contribution_pp / grown.num_measured if grown.num_measured else None
        counts = (grown.num_germinated, grown.num_fossilized, grown.num_pruned, alive)
        yield (name, *map(str, counts), _figure(mean, ".2f"))


def _warning(event: LoggedEvent) -> dict[str, object]:
    return {
        "seq": event.seq,
        "round": "" if event.round is None else event.round,
        "env": "" if event.env is None else event.env,
        "severity": event.severity.value,
        "type": event.type.value,
        "text": describe(event.data),
        "traceback": event.data.traceback_tail if isinstance(event.data, RunEnded) else None,
    }


def _integrity(checked: Integrity) -> Iterator[tuple[str, str]]:
    yield "lines", f"{checked.num_lines:,}"
    yield "damaged lines", f"{checked.num_malformed:,}"
    yield "written again after a resume", f"{checked.num_superseded:,}"
    yield "missing events", f"{checked.num_missing_seq:,}, of which {checked.num_dropped:,} reported as dropped"
    yield "bytes of torn lines", f"{checked.torn_tail_bytes:,}"
    yield "end marker", "yes" if checked.has_end else "no"


def _provenance(story: Story) -> Iterator[tuple[str, str]]:
    yield "run", story.view.log.run or "unknown"
    if not story.starts:
        return
    begun = story.starts[-1]
    for field in fields(begun):
        value = getattr(begun, field.name)
        words = _ABSENT.get(field.name, "unknown") if value is None else _words(field.name, value)
        yield field.name.replace("_", " "), words
    for number, again in enumerate(story.starts[1:], start=1):
        yield f"resume {number}", again.resumed_from or "without a checkpoint"


_ABSENT = {
    "cuda_version": "no",
    "amp_dtype": "no",
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


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "not measured" if value is None else format(value, form) + unit


def _clock(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall))
