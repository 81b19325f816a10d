"""Makes everything that is derived: summary.json, report.md, figures and their CSVs, from the files of a folder."""

from __future__ import annotations

from pathlib import Path

from esper.evidence.claims import Verdict, judge
from esper.evidence.figure_data import figure_data, write_figure_csvs
from esper.evidence.figures import FIGURES, draw_figures
from esper.evidence.manifest import Manifest, read_manifest
from esper.evidence.report import report_md, summary_json
from esper.evidence.results import (
    CURVES,
    RESULTS,
    TOPOLOGIES,
    RunResult,
    read_curves,
    read_results,
    read_topologies,
)
from esper.evidence.summary import Summary, expected_runs, summarise
from esper.leyline import record


@record
class Published:
    """What was made of a folder."""

    manifest: Manifest
    summary: Summary
    verdicts: tuple[Verdict, ...]
    drawn: bool
    """False if the plot library is missing."""


def publish(source: Path, out: Path) -> Published:
    """Reads the results in one folder and writes all that follows from them into another, or the same.

    Raises:
        ValueError: There are no results, or rows of different setups.
    """
    manifest = read_manifest(source)
    rows = _rows(source / RESULTS, manifest)
    keys = {row.key for row in rows}
    summary = summarise(manifest, rows)
    verdicts = tuple(judge(manifest, summary))
    curves = read_curves(source / CURVES, keys)
    topologies = [found for found in read_topologies(source / TOPOLOGIES) if found.key in keys]
    found = figure_data(manifest, summary, rows, curves, topologies)
    out.mkdir(parents=True, exist_ok=True)
    tables = write_figure_csvs(out, found)
    drawn = draw_figures(out, manifest, rows, found)
    figures = f"{', '.join(FIGURES)}; " if drawn else "Not drawn: pip install 'esper-growth[plots]'. "
    words = f"{figures}what they show is also in {', '.join(tables)}."
    (out / "summary.json").write_text(summary_json(manifest, summary, verdicts), encoding="utf-8")
    (out / "report.md").write_text(report_md(manifest, summary, verdicts, rows, words), encoding="utf-8")
    return Published(manifest=manifest, summary=summary, verdicts=verdicts, drawn=drawn)


def _rows(path: Path, manifest: Manifest) -> list[RunResult]:
    """The rows of this evaluation in its own order, whatever the order of the file."""
    by_key = {row.key: row for row in read_results(path)}
    if not by_key:
        raise ValueError(f"{path}: no results")
    if other := {row.setup for row in by_key.values()} - {manifest.setup}:
        raise ValueError(f"{path} has rows of other setups ({', '.join(sorted(other))}); they cannot be compared")
    return [by_key[key] for key in expected_runs(manifest) if key in by_key]
