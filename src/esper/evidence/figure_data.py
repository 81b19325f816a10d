"""What the figures show, as rows of numbers, and as CSV files beside them. Needs no plot library."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from esper.evidence.manifest import Manifest
from esper.evidence.report import is_about_subject
from esper.evidence.results import CurvePoint, RunResult, Topology
from esper.evidence.statistics import MIN_PAIRS, compare
from esper.evidence.summary import Summary
from esper.leyline import record


@record
class FrontierPoint:
    """An arm among size and score: the mean over its runs, with its interval where there are enough."""

    arm: str
    params: float
    score: float
    low: float | None
    high: float | None
    num_runs: int


@record
class PairPoint:
    """One paired difference."""

    label: str
    mean: float
    low: float | None
    high: float | None
    num_pairs: int


@record
class CurveMean:
    """An arm's committed network at one epoch, on validation data."""

    arm: str
    epoch: int
    mean: float
    sd: float
    num_runs: int


@record
class GrowthLine:
    """One seed's life. Epochs count from 1; None: it did not come to that."""

    arm: str
    policy_id: str
    run_seed: int
    slot: str
    blueprint: str
    params: int
    planted: int
    blended: int | None
    kept: int | None
    pruned: int | None


@record
class FigureData:
    """Everything the four figures show."""

    frontier: tuple[FrontierPoint, ...]
    paired: tuple[PairPoint, ...]
    curves: tuple[CurveMean, ...]
    growth: tuple[GrowthLine, ...]


def figure_data(
    manifest: Manifest,
    summary: Summary,
    rows: Sequence[RunResult],
    curves: Sequence[CurvePoint],
    topologies: Sequence[Topology],
) -> FigureData:
    """Gathers what is to be drawn."""
    return FigureData(
        frontier=tuple(_frontier(manifest, arm.arm, rows) for arm in summary.arms),
        paired=_paired(manifest, summary),
        curves=_curves(manifest, curves),
        growth=_growth(manifest, topologies),
    )


def metric_of(manifest: Manifest, row: RunResult) -> float:
    """What is drawn upwards: test accuracy in percent, or the test loss."""
    return row.test_accuracy_pct if manifest.metric == "accuracy" else row.test_loss


def _frontier(manifest: Manifest, arm: str, rows: Sequence[RunResult]) -> FrontierPoint:
    own = [row for row in rows if row.arm == arm]
    values = [metric_of(manifest, row) for row in own]
    found = compare(values) if len(values) >= MIN_PAIRS else None
    return FrontierPoint(
        arm=arm,
        params=statistics.fmean(row.params for row in own),
        score=statistics.fmean(values),
        low=None if found is None else found.low,
        high=None if found is None else found.high,
        num_runs=len(own),
    )


def _paired(manifest: Manifest, summary: Summary) -> tuple[PairPoint, ...]:
    pairs = summary.subject_against if is_about_subject(manifest) else summary.against_baseline
    return tuple(
        PairPoint(
            label=f"{pair.first} - {pair.second}",
            mean=pair.comparison.mean,
            low=pair.comparison.low,
            high=pair.comparison.high,
            num_pairs=pair.comparison.num_pairs,
        )
        for pair in pairs
    )


def _curves(manifest: Manifest, curves: Sequence[CurvePoint]) -> tuple[CurveMean, ...]:
    values: dict[tuple[str, int], list[float]] = {}
    for point in curves:
        value = point.committed_accuracy_pct if manifest.metric == "accuracy" else point.committed_loss
        values.setdefault((point.arm, point.epoch), []).append(value)
    return tuple(
        CurveMean(
            arm=arm,
            epoch=epoch,
            mean=statistics.fmean(sorted(found)),
            sd=statistics.pstdev(sorted(found)),
            num_runs=len(found),
        )
        for arm in manifest.arms
        for epoch in range(1, manifest.horizon + 1)
        if (found := values.get((arm, epoch)))
    )


def _growth(manifest: Manifest, topologies: Sequence[Topology]) -> tuple[GrowthLine, ...]:
    order = {arm: position for position, arm in enumerate(manifest.arms)}
    ordered = sorted((t for t in topologies if t.arm in order), key=lambda t: (order[t.arm], t.policy_id, t.run_seed))
    return tuple(
        GrowthLine(
            arm=topology.arm,
            policy_id=topology.policy_id,
            run_seed=topology.run_seed,
            slot=life.slot,
            blueprint=life.blueprint,
            params=life.params,
            planted=life.planted,
            blended=life.blended,
            kept=life.kept,
            pruned=life.pruned,
        )
        for topology in ordered
        for life in topology.lives
    )


def write_figure_csvs(folder: Path, found: FigureData) -> tuple[str, ...]:
    """One CSV per figure; returns their names."""
    tables: list[tuple[str, type[Any], Sequence[Any]]] = [
        ("frontier.csv", FrontierPoint, found.frontier),
        ("paired.csv", PairPoint, found.paired),
        ("mean_curves.csv", CurveMean, found.curves),
        ("growth.csv", GrowthLine, found.growth),
    ]
    for name, kind, rows in tables:
        names = [field.name for field in fields(kind)]
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(["" if (v := getattr(row, n)) is None else v for n in names] for row in rows)
    return tuple(name for name, _, _ in tables)
