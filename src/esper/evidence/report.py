"""The evaluation in words: a table for the terminal, and report.md and summary.json made from the files alone.

Equal files give equal bytes: nothing here looks at the clock, the machine or the test split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from esper.evidence.arms import ARMS, SAMPLED
from esper.evidence.claims import Outcome, Verdict
from esper.evidence.manifest import SCHEMA_VERSION, Check, Manifest, Session
from esper.evidence.results import RunResult
from esper.evidence.statistics import LEVEL, MIN_PAIRS, RESAMPLES, Comparison
from esper.evidence.summary import Pair, Spread, Summary

MAX_RATE_GAP = 0.1
"""How far the op rates of chance may be from those it is matched to, as a share, before the report says so."""
PROTOCOL = """\
All arms of a pair share run seed, initial weights (where shapes agree), batches, batch size, augmentation, optimizer,
learning rate schedule, number of epochs and parameter budget. What counts is the committed network (host and kept
seeds) after the last epoch, never the best epoch. Differences are paired by run seed. A failed run keeps its place in
its pair."""


def is_about_subject(manifest: Manifest) -> bool:
    """True if arms are compared with a learned subject; otherwise with waiting."""
    return ARMS[manifest.subject].learned


# ---- cells


def header(manifest: Manifest) -> list[str]:
    """The columns of the main table."""
    unit = "points" if manifest.metric == "accuracy" else "nats"
    pair = f"{manifest.subject} - arm ({unit})" if is_about_subject(manifest) else f"gain over wait_only ({unit})"
    return [
        "arm",
        "accuracy (%)",
        "loss (nats)",
        "parameters",
        "peak",
        "parameter-epochs",
        "seconds",
        "kept",
        pair,
        "p (Holm)",
        "W/T/L",
        "failed",
    ]


def cells(manifest: Manifest, summary: Summary) -> Iterator[list[str]]:
    """One row per arm, best first."""
    pairs = (
        {pair.second: pair for pair in summary.subject_against}
        if is_about_subject(manifest)
        else {pair.first: pair for pair in summary.against_baseline}
    )
    for arm in summary.arms:
        pair = pairs.get(arm.arm)
        found = None if pair is None else pair.comparison
        yield [
            arm.arm,
            spread(arm.figures["test_accuracy_pct"], 2),
            spread(arm.figures["test_loss"], 3),
            f"{arm.figures['params'].mean:,.0f}",
            f"{arm.figures['peak_params'].mean:,.0f}",
            f"{arm.figures['param_epochs'].mean:,.0f}",
            f"{arm.figures['run_s'].mean:.1f}",
            f"{arm.figures['num_kept'].mean:.1f}",
            "" if found is None else difference(found, 2 if manifest.metric == "accuracy" else 3),
            "" if pair is None or pair.holm_p is None else f"{pair.holm_p:.4f}",
            "" if found is None else f"{found.wins}/{found.ties}/{found.losses}",
            f"{arm.num_failed}/{arm.num_runs}",
        ]


def spread(found: Spread, digits: int) -> str:
    """Mean ± standard deviation."""
    return f"{found.mean:.{digits}f}" + ("" if found.sd is None else f" ± {found.sd:.{digits}f}")


def difference(found: Comparison, digits: int) -> str:
    """Mean and interval; the standard deviation where there is no interval."""
    if found.low is not None and found.high is not None:
        return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
    return f"{found.mean:+.{digits}f}" + ("" if found.sd is None else f" ± {found.sd:.{digits}f}")


# ---- terminal


def terminal_table(manifest: Manifest, summary: Summary) -> Table:
    """The main table, without the columns that only a file has room for."""
    hidden = {"peak", "parameter-epochs", "kept", "p (Holm)"}
    hidden.add("loss (nats)" if manifest.metric == "accuracy" else "accuracy (%)")
    if not any(arm.num_failed for arm in summary.arms):
        hidden.add("failed")
    title = f"{manifest.task}: test split, {manifest.horizon} epochs, {len(manifest.run_seeds)} paired run seeds"
    # Headings may wrap, figures may not: all columns have to fit into 80 characters.
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    names = ["params" if name == "parameters" else name for name in header(manifest)]
    shown = [position for position, name in enumerate(names) if name not in hidden]
    widths = [max(map(len, column)) for column in zip(*cells(manifest, summary), strict=True)]
    for position in shown:
        justify: JustifyMethod = "left" if position == 0 else "right"
        table.add_column(names[position], justify=justify, min_width=widths[position])
    for row in cells(manifest, summary):
        table.add_row(*(row[position] for position in shown))
    return table


def verdict_line(verdict: Verdict) -> str:
    """A claim and what became of it, in one line."""
    return f"{verdict.letter}. {verdict.words}: {verdict.outcome.value}: {'; '.join(verdict.reasons)}"


# ---- files


def summary_json(manifest: Manifest, summary: Summary, verdicts: Sequence[Verdict]) -> str:
    """summary.json."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "setup": manifest.setup,
        "task": manifest.task,
        "metric": manifest.metric,
        "subject": manifest.subject,
        "num_seeds": len(manifest.run_seeds),
        "num_policies": len(manifest.policies),
        "arms": {arm.arm: asdict(arm) for arm in summary.arms},
        "against_baseline": [_pair_json(pair) for pair in summary.against_baseline],
        "subject_against": [_pair_json(pair) for pair in summary.subject_against],
        "missing": [list(key) for key in summary.missing],
        "gates": [asdict(check) for check in manifest.gates],
        "controls": [asdict(check) for check in manifest.controls],
        "verdicts": [{**asdict(verdict), "outcome": verdict.outcome.value} for verdict in verdicts],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {"first": pair.first, "second": pair.second, **asdict(pair.comparison), "holm_p": pair.holm_p}


def report_md(
    manifest: Manifest, summary: Summary, verdicts: Sequence[Verdict], rows: Sequence[RunResult], figures: str
) -> str:
    """report.md.

    Args:
        manifest: What the evaluation was.
        summary: What its rows say.
        verdicts: What became of the claims.
        rows: The rows themselves, for failures and times.
        figures: A line about the figures.
    """
    parts = [
        f"# {manifest.task}: {manifest.description}",
        *_facts(manifest, rows),
        "## Arms",
        _table(header(manifest), list(cells(manifest, summary))),
        _reading(manifest),
        "## Claims",
        "\n".join(f"- {verdict_line(verdict)}" for verdict in verdicts) or "None: arms are put side by side.",
        *_checks("## Learning gates", manifest.gates),
        *_checks("## Controls", manifest.controls),
        "## Arms in detail",
        _table(
            ["arm", "rule", "parameters of the rule", "ops per run: G/A/P/F", "rollbacks"], _details(manifest, summary)
        ),
        *_policies(manifest),
        "## Protocol",
        PROTOCOL,
        "## Notes and deviations",
        "\n".join(f"- {note}" for note in _notes(manifest, summary, rows)) or "None.",
        "## Figures",
        figures,
        "## Made by",
        "\n".join(f"- `{' '.join(session.argv)}`, {_when(session)}" for session in manifest.sessions),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(manifest: Manifest, rows: Sequence[RunResult]) -> Iterator[str]:
    budget = "no parameter budget" if manifest.budget is None else f"at most {manifest.budget:,} parameters"
    hours = sum(row.run_s for row in rows) / 3600
    openings = "an unknown number of times" if manifest.test_openings is None else f"{manifest.test_openings} times"
    yield (
        f"{manifest.horizon} epochs, {budget}, host of {manifest.host_params:,} parameters, run seeds "
        f"{manifest.run_seeds[0]} to {manifest.run_seeds[-1]} ({len(manifest.run_seeds)} pairs)."
    )
    yield (
        f"Data: {manifest.data}, sha256 `{manifest.data_sha256[:16]}`; {manifest.num_test:,} test rows, sha256 "
        f"`{manifest.test_sha256[:16]}`, opened {openings} on this machine up to now. Intervals are about run seeds; "
        "the test rows are these."
    )
    packages = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    places = ", ".join(f"{name} {value}" for name, value in manifest.machine.items())
    yield f"Code {manifest.code}; {packages}; {places}. All runs together took {hours:.2f} hours of one thread."


def _reading(manifest: Manifest) -> str:
    words = "Mean ± standard deviation over runs. Seconds: one thread, per run."
    if len(manifest.run_seeds) >= MIN_PAIRS:
        return (
            f"{words} Brackets: {LEVEL:.0%} interval of the mean difference, studentised bootstrap with {RESAMPLES:,} "
            "resamples. p: sign-flip test, Holm-adjusted over the column. W/T/L: pairs won, tied, lost."
        )
    return f"{words} With fewer than {MIN_PAIRS} pairs no interval is given. W/T/L: pairs won, tied, lost."


def _checks(title: str, checks: Sequence[Check]) -> Iterator[str]:
    if not checks:
        return
    words = {True: "passed", False: "FAILED", None: "not checked"}
    yield title
    yield _table(["check", "result", "found", "limit"], [[c.name, words[c.passed], c.found, c.limit] for c in checks])


def _details(manifest: Manifest, summary: Summary) -> list[list[str]]:
    return [
        [
            arm.arm,
            ARMS[arm.arm].description,
            _plain(manifest.settings.get(arm.arm, {})),
            "/".join(f"{arm.figures[f'num_{op}'].mean:.1f}" for op in ("germinate", "advance", "prune", "fossilize")),
            f"{arm.figures['num_rollbacks'].mean:.2f}",
        ]
        for arm in summary.arms
    ]


def _plain(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "defaults"


def _policies(manifest: Manifest) -> Iterator[str]:
    if manifest.policies:
        yield "## Policies and what they cost"
        names = list(dict.fromkeys(name for policy in manifest.policies for name in policy))
        yield _table(names, [[_cell(policy.get(name)) for name in names] for policy in manifest.policies])


def _cell(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _notes(manifest: Manifest, summary: Summary, rows: Sequence[RunResult]) -> Iterator[str]:
    yield from manifest.notes
    if manifest.tuning is None:
        yield "Fixed arms ran with their defaults; nothing was tuned."
    else:
        yield f"Fixed arms were tuned on controller-validation: {_plain(manifest.tuning)}."
    yield from _unmatched(manifest, summary)
    if summary.missing:
        yield f"{len(summary.missing)} runs are missing; their arms are in no comparison."
    for row in rows:
        if row.failed:
            yield f"{row.arm}, run seed {row.run_seed}: {row.status}."


def _unmatched(manifest: Manifest, summary: Summary) -> Iterator[str]:
    """Where chance did not act as often as the policy that it is matched to."""
    chance, policy = summary.arm("random"), summary.arm(SAMPLED)
    if not manifest.policies or chance is None or policy is None:
        return
    for op in ("germinate", "advance", "prune", "fossilize"):
        found, wanted = (arm.figures[f"num_{op}"].mean for arm in (chance, policy))
        if abs(found - wanted) > MAX_RATE_GAP * wanted:
            yield f"random has {found:.2f} {op} per run, ppo_sampled {wanted:.2f}: more than {MAX_RATE_GAP:.0%} apart."


def _when(session: Session) -> str:
    end = "interrupted" if session.ended is None else f"to {session.ended}"
    return f"from {session.started} {end}" + ("" if session.opened_test else ", test split not opened")


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "|".join(["---"] * len(names)) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)])


def is_invalid(verdicts: Sequence[Verdict]) -> bool:
    """True if the evidence must not be used."""
    return any(verdict.outcome is Outcome.INVALID for verdict in verdicts)
