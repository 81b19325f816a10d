"""The evaluation in words: a table for the terminal, and two reports and summary.json made from the files alone.

Equal files give equal bytes: nothing here looks at the clock, the machine or the test split.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from rich import box
from rich.table import Table

from esper.evidence import limits
from esper.evidence.arms import SAMPLED, get_arm
from esper.evidence.claims import ClaimOutcome, ClaimVerdict, judge_claims
from esper.evidence.figures import draw_figures, figure_tables
from esper.evidence.manifest import EVALUATION_FORMAT, CheckResult, EvaluationManifest
from esper.evidence.results import CURVES, KEY, OK, RESULTS, TOPOLOGIES, read_curves, read_results, read_topologies
from esper.evidence.statistics import LEVEL, RESAMPLES, PairedDifference
from esper.evidence.summary import FIGURES, ArmPair, Summary, bar_of, expected_runs, summarise
from esper.evidence.tuning import words_of
from esper.karn.page import render_page
from esper.leyline import record
from esper.leyline.files import read_regular, write_atomic
from esper.leyline.rundir import EVALUATION_PICTURES, MAX_PICTURE_BYTES, REPORT_FILE

GROWTH_OPS = ("germinate", "advance", "prune", "fossilize")
CAPTIONS = {
    "frontier.png": "Size and score of every run after the last epoch, and the mean of every arm; the line is the best "
    "plain network of each size.",
    "compute.png": "Score and all that it cost: the run itself, and before it tuning, search or the policy's training.",
    "paired.png": "Differences over pairs: mean and interval.",
    "curves.png": "The committed network at every epoch, on validation data.",
    "growth.png": "What grew where and when, run by run.",
}
"""What each figure shows."""


@record
class Published:
    """What was made of a folder."""

    manifest: EvaluationManifest
    summary: Summary
    verdicts: tuple[ClaimVerdict, ...]
    drawn: bool
    """False if the plot library is missing."""


def publish(source: Path, out: Path) -> Published:
    """Reads the results in one folder and writes all that follows from them into another, or the same.

    Raises:
        ValueError: There are no results, or rows of different setups.
    """
    manifest, rows = load_rows(source)
    keys = set(rows[KEY].itertuples(index=False, name=None))
    summary = summarise(manifest, rows)
    verdicts = tuple(judge_claims(manifest, summary))
    curves, topologies = read_curves(source / CURVES, keys), read_topologies(source / TOPOLOGIES, keys)
    tables = figure_tables(manifest, summary, rows, curves, topologies)
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        content = table.to_csv(index=False, lineterminator="\n")
        write_atomic(out / f"{name}.csv", content.encode(), durable=False)
    drawn = draw_figures(out, manifest, rows, tables)
    write_atomic(out / "summary.json", summary_json(manifest, summary, verdicts).encode(), durable=False)
    values = _values(manifest, summary, rows, verdicts)
    listed = _list_report(
        values, pictures=EVALUATION_PICTURES if drawn else (), tables=[f"{name}.csv" for name in tables]
    )
    write_atomic(out / "report.md", listed.encode(), durable=False)
    write_atomic(out / REPORT_FILE, _page(values, out if drawn else None).encode(), durable=False)
    return Published(manifest=manifest, summary=summary, verdicts=verdicts, drawn=drawn)


def load_rows(folder: Path) -> tuple[EvaluationManifest, pd.DataFrame]:
    """An evaluation and its rows in its own order, whatever the order of the file.

    Raises:
        ValueError: There are none, or rows of different setups.
    """
    manifest, path = EvaluationManifest.load(folder), folder / RESULTS
    rows = read_results(path)
    if rows.empty:
        raise ValueError(f"{path}: no results")
    if other := set(rows["setup"]) - {manifest.setup}:
        raise ValueError(f"{path} has rows of other setups ({', '.join(sorted(other))}); they cannot be compared")
    for name in (*manifest.arms, manifest.subject):
        get_arm(name)
    if not all(map(math.isfinite, rows[list(FIGURES)].astype(float).to_numpy().flat)):
        raise ValueError(f"{path} has a figure that is not finite, which no run leaves there; remove that row")
    by_key = rows.set_index(KEY, drop=False)
    known = [key for key in expected_runs(manifest) if key in by_key.index]
    return manifest, by_key.loc[known].reset_index(drop=True)


# ---- the main table


def header(manifest: EvaluationManifest) -> list[str]:
    """The columns of the main table."""
    unit = "points" if manifest.metric == "accuracy" else "nats"
    pair = f"{manifest.subject} - arm" if get_arm(manifest.subject).learned else "gain over wait_only"
    return [
        *("arm", "accuracy (%)", "loss (nats)", "parameters", "peak", "parameter-epochs"),
        *("training GMACs", "seconds", "kept"),
        *(f"{pair} ({unit})", "p (Holm)", "W/T/L", f"arm - {bar_of(manifest)} ({unit})", "failed"),
    ]


def cells(manifest: EvaluationManifest, summary: Summary) -> list[list[str]]:
    """One row per arm, best first."""
    if get_arm(manifest.subject).learned:
        pairs = {pair.second: pair for pair in summary.subject_against}
    else:
        pairs = {pair.first: pair for pair in summary.against_baseline}
    digits = 2 if manifest.metric == "accuracy" else 3
    rows = []
    for arm, mean in summary.means.iterrows():
        pair, sd, static = pairs.get(arm), summary.sds.loc[arm], summary.minus_static(arm)
        rows.append(
            [
                arm,
                _with_sd(mean["test_accuracy_pct"], sd["test_accuracy_pct"], ".2f"),
                _with_sd(mean["test_loss"], sd["test_loss"], ".3f"),
                *(f"{mean[name]:,.0f}" for name in ("params", "peak_params", "param_epochs")),
                f"{mean['training_macs'] / 1e9:,.3g}",
                f"{mean['run_s']:.1f}",
                f"{mean['num_kept']:.1f}",
                *(("", "", "") if pair is None else _pair_cells(pair, digits)),
                "" if static is None else difference_words(static, f"+.{digits}f"),
                f"{summary.num_failed[arm]}/{summary.num_runs[arm]}",
            ]
        )
    return rows


def _pair_cells(pair: ArmPair, digits: int) -> tuple[str, str, str]:
    found, p = pair.difference, "" if pair.holm_p is None else f"{pair.holm_p:.4f}"
    return difference_words(found, f"+.{digits}f"), p, f"{found.wins}/{found.ties}/{found.losses}"


def difference_words(found: PairedDifference, form: str) -> str:
    """Mean and interval; the standard deviation where there is no interval."""
    if found.low is not None and found.high is not None:
        return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"
    return f"{found.mean:{form}}" + ("" if found.sd is None else f" ± {found.sd:{form[1:]}}")


def _with_sd(mean: float, sd: float, form: str) -> str:
    return f"{mean:{form}}" + ("" if math.isnan(sd) else f" ± {sd:{form}}")


def terminal_table(manifest: EvaluationManifest, summary: Summary) -> Table:
    """The main table, without the columns that only a file has room for."""
    hidden = {"peak", "parameter-epochs", "kept", "p (Holm)", "seconds"}
    if summary.against_static and not get_arm(manifest.subject).learned:
        # The bar says more than the difference to waiting, and there is room for one. A policy is paired with all arms.
        hidden |= {name for name in header(manifest) if name.startswith("gain over")} | {"W/T/L"}
    else:
        hidden.add(header(manifest)[-2])
    hidden.add("loss (nats)" if manifest.metric == "accuracy" else "accuracy (%)")
    if not summary.num_failed.any():
        hidden.add("failed")
    title = f"{manifest.task}: test split, {manifest.horizon} epochs, {len(manifest.run_seeds)} paired run seeds"
    # Headings may wrap, figures may not: all columns have to fit into 80 characters.
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    columns = zip(header(manifest), *cells(manifest, summary), strict=True)
    shown = [column for column in columns if column[0] not in hidden]
    for name, *column in shown:
        heading = "params" if name == "parameters" else name
        table.add_column(heading, justify="left" if name == "arm" else "right", min_width=max(map(len, column)))
    for row in list(zip(*shown, strict=True))[1:]:
        table.add_row(*row)
    return table


def verdict_line(verdict: ClaimVerdict) -> str:
    """A claim and what became of it, in one line."""
    return f"{verdict.letter}. {verdict.words}: {verdict.outcome.value}: {'; '.join(verdict.reasons)}"


# ---- files


def summary_json(manifest: EvaluationManifest, summary: Summary, verdicts: Sequence[ClaimVerdict]) -> str:
    """summary.json."""
    content: dict[str, Any] = {
        "schema_version": EVALUATION_FORMAT,
        "setup": manifest.setup,
        "task": manifest.task,
        "metric": manifest.metric,
        "subject": manifest.subject,
        "num_seeds": len(manifest.run_seeds),
        "num_policies": len(manifest.policies),
        "arms": {arm: _arm_json(summary, arm) for arm in summary.means.index},
        "against_baseline": [_pair_json(pair) for pair in summary.against_baseline],
        "subject_against": [_pair_json(pair) for pair in summary.subject_against],
        "against_static": [_pair_json(pair) for pair in summary.against_static],
        "missing": [list(key) for key in summary.missing],
        "learning_checks": [asdict(check) for check in manifest.learning_checks],
        "controls": [asdict(check) for check in manifest.controls],
        "verdicts": [{**asdict(verdict), "outcome": verdict.outcome.value} for verdict in verdicts],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _arm_json(summary: Summary, arm: str) -> dict[str, Any]:
    means, sds = summary.means.loc[arm], summary.sds.loc[arm]
    return {
        "arm": arm,
        "num_runs": int(summary.num_runs[arm]),
        "num_failed": int(summary.num_failed[arm]),
        "figures": {
            name: {"mean": means[name], "sd": None if math.isnan(sds[name]) else sds[name]} for name in FIGURES
        },
    }


def _pair_json(pair: ArmPair) -> dict[str, Any]:
    return {"first": pair.first, "second": pair.second, **asdict(pair.difference), "holm_p": pair.holm_p}


def report_page(folder: Path) -> str:
    """One HTML file about an evaluation, from the files in its folder: the figures are inside.

    Raises:
        ValueError: There are no results, or rows of different setups.
    """
    manifest, rows = load_rows(folder)
    summary = summarise(manifest, rows)
    return _page(_values(manifest, summary, rows, tuple(judge_claims(manifest, summary))), folder)


def _values(
    manifest: EvaluationManifest, summary: Summary, rows: pd.DataFrame, verdicts: Sequence[ClaimVerdict]
) -> dict[str, object]:
    """What both reports tell."""
    names = list(dict.fromkeys(name for policy in manifest.policies for name in policy))
    return {
        "manifest": manifest,
        "summary": summary,
        "verdicts": verdicts,
        "limits": limits,
        "level": f"{LEVEL:.0%}",
        "resamples": f"{RESAMPLES:,}",
        "hours": sum(rows["run_s"].tolist()) / 3600,
        "header": header(manifest),
        "cells": cells(manifest, summary),
        "details": [_detail(manifest, arm, mean) for arm, mean in summary.means.iterrows()],
        "policy_facts": names,
        "policies": [[_cell(policy.get(name)) for name in names] for policy in manifest.policies],
        "unmatched_rates": list(_unmatched_rates(summary)) if manifest.policies else (),
        "failed": list(rows[rows["status"] != OK].itertuples()),
    }


def _list_report(values: Mapping[str, object], **others: object) -> str:
    """report.md: its words are in the template."""
    page = Path(__file__).with_name("report.md.j2").read_text(encoding="utf-8")
    world = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    world.filters |= {"plain": _plain, "line": verdict_line, "result": _result}
    return world.from_string(page).render(values, **others)


def _page(values: Mapping[str, object], figures: Path | None) -> str:
    """report.html, with the figures that lie in a folder."""
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        {"plain": _plain, "result": _result, "severity": _severity},
        captions=CAPTIONS,
        pictures={}
        if figures is None
        else {name: content for name in EVALUATION_PICTURES if (content := _read(figures / name))},
        **values,
    )


def _read(picture: Path) -> bytes | None:
    try:
        return read_regular(picture, MAX_PICTURE_BYTES)
    except OSError:
        return None


def _severity(verdict: ClaimVerdict) -> str:
    """The colour of a verdict on a page."""
    good, bad = (ClaimOutcome.BETTER,), (ClaimOutcome.INVALID, ClaimOutcome.WORSE, ClaimOutcome.CONTROL_FAILED)
    return "info" if verdict.outcome in good else "error" if verdict.outcome in bad else "warning"


def _result(check: CheckResult) -> list[str]:
    words = {True: "passed", False: "FAILED", None: "not checked"}
    return [check.name, words[check.passed], check.found, check.limit]


def _detail(manifest: EvaluationManifest, arm: str, mean: pd.Series) -> list[str]:
    ops = "/".join(f"{mean[f'num_{op}']:.1f}" for op in GROWTH_OPS)
    settings = words_of(manifest.settings.get(arm, {})) or "defaults"
    return [arm, get_arm(arm).description, settings, ops, f"{mean['num_rollbacks']:.2f}"]


def _plain(settings: Mapping[str, Any]) -> str:
    words = {name: f"({_plain(value)})" if isinstance(value, Mapping) else value for name, value in settings.items()}
    return ", ".join(f"{name} {value}" for name, value in words.items())


def _cell(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _unmatched_rates(summary: Summary) -> Iterator[str]:
    """Where `random` did not act as often as the policy that it is matched to."""
    for op in GROWTH_OPS:
        found, wanted = (summary.mean(arm, f"num_{op}") for arm in ("random", SAMPLED))
        if found is not None and wanted is not None and abs(found - wanted) > limits.MAX_RATE_GAP * wanted:
            gap = f"more than {limits.MAX_RATE_GAP:.0%} apart"
            yield f"random has {found:.2f} {op} per run, ppo_sampled {wanted:.2f}: {gap}."
