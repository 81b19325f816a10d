"""From rows to figures: every arm for itself, and pairs of arms on the same run seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd

from esper.evidence.arms import BASELINE, FRONTIER, get_arm, static_arm
from esper.evidence.manifest import EvaluationManifest
from esper.evidence.results import KEY, OK, RESULT_COLUMNS, RunKey
from esper.evidence.statistics import PairedDifference, difference_of_policies, holm
from esper.leyline import record

NOT_FIGURES = ("run_seed", "host_params")
FIGURES = [name for name, kind in RESULT_COLUMNS.items() if kind != "str" and name not in NOT_FIGURES]
"""Columns that are averaged over the runs of an arm."""


@record
class ArmPair:
    """Two arms on the same run seeds. The difference is first minus second, in points or nats; positive is better."""

    first: str
    second: str
    difference: PairedDifference
    holm_p: float | None = None
    """Adjusted over all pairs with the same first or the same second arm; None where there is no p-value."""


@record
class Summary:
    """What the rows say."""

    means: pd.DataFrame
    """Of every figure (column) over the runs of every arm (row), best arm first."""
    sds: pd.DataFrame
    """Standard deviations likewise; NaN for a single run."""
    num_runs: pd.Series
    """By arm."""
    num_failed: pd.Series
    against_baseline: tuple[ArmPair, ...]
    """Every arm minus wait_only."""
    subject_against: tuple[ArmPair, ...]
    """The subject minus every other arm."""
    against_static: tuple[ArmPair, ...]
    """Every arm that grows minus the best plain network within the budget; nothing if that was not run."""
    missing: tuple[RunKey, ...]
    """Runs that should be there and are not. Arms they belong to are in no pair."""

    def mean(self, arm: str, figure: str) -> float | None:
        """The mean of one figure over the runs of an arm; None if it was not run."""
        return float(self.means.loc[arm, figure]) if arm in self.means.index else None

    def minus_static(self, arm: str) -> PairedDifference | None:
        """An arm's difference to the best plain network within the budget, if both are complete."""
        return next((pair.difference for pair in self.against_static if pair.first == arm), None)

    def subject_minus(self, arm: str) -> PairedDifference | None:
        """The subject's difference to an arm, if both are complete."""
        return next((pair.difference for pair in self.subject_against if pair.second == arm), None)


def expected_runs(manifest: EvaluationManifest) -> list[RunKey]:
    """The keys of all runs that make the evaluation whole, arm by arm."""
    return [
        (name, policy_id, run_seed)
        for name in manifest.arms
        for policy_id in policy_ids(manifest, name)
        for run_seed in manifest.run_seeds
    ]


def policy_ids(manifest: EvaluationManifest, arm: str) -> tuple[str, ...]:
    """The policies under which an arm has runs of its own; ("",) for an arm that depends on none."""
    row = get_arm(arm)
    own = row.learned or row.replays or row.needs_sampled or (row.rebuilds and get_arm(manifest.subject).learned)
    return manifest.policy_ids if own and manifest.policies else ("",)


def bar_of(manifest: EvaluationManifest) -> str:
    """The arm that growing must reach: the best plain network within the budget."""
    return FRONTIER if manifest.budget is None else static_arm(manifest.budget).name


def metric_column(manifest: EvaluationManifest) -> str:
    """The column of a results file by which the task is measured."""
    return "test_accuracy_pct" if manifest.metric == "accuracy" else "test_loss"


def summarise(manifest: EvaluationManifest, rows: pd.DataFrame) -> Summary:
    """Describes every arm and compares those that are complete."""
    found = set(rows[KEY].itertuples(index=False, name=None))
    missing = tuple(key for key in expected_runs(manifest) if key not in found)
    complete = set(manifest.arms) - {arm for arm, _, _ in missing}
    by_arm = rows.groupby("arm")
    order = [name for name in manifest.arms if name in by_arm.groups]
    column = metric_column(manifest)
    scores = {name: _scores(manifest, rows, name) for name in complete}
    means = by_arm[FIGURES].agg(exact_mean).loc[order]
    means = means.sort_values(column, ascending=manifest.metric != "accuracy", kind="stable")

    @cache
    def difference(first: str, second: str) -> PairedDifference:
        return difference_of_policies((scores[first] - scores[second]).tolist())

    def pairs(names: Sequence[tuple[str, str]]) -> tuple[ArmPair, ...]:
        comparable = [(first, second) for first, second in names if first != second and {first, second} <= complete]
        return _adjusted(ArmPair(first=a, second=b, difference=difference(a, b)) for a, b in comparable)

    return Summary(
        means=means,
        sds=by_arm[FIGURES].agg(exact_sd).loc[means.index],
        num_runs=by_arm.size(),
        num_failed=(rows["status"] != OK).groupby(rows["arm"]).sum(),
        against_baseline=pairs([(name, BASELINE) for name in manifest.arms]),
        subject_against=pairs([(manifest.subject, name) for name in manifest.arms]),
        against_static=pairs([(name, bar_of(manifest)) for name in manifest.arms if not get_arm(name).static]),
        missing=missing,
    )


def exact_mean(values: pd.Series) -> float:
    """The mean, rounded once: it does not depend on the order of rows, as pandas' own does."""
    return statistics.fmean(values.tolist())


def exact_sd(values: pd.Series) -> float:
    """The sample standard deviation, likewise; NaN for a single value."""
    return statistics.stdev(map(float, values)) if len(values) > 1 else math.nan


def _scores(manifest: EvaluationManifest, rows: pd.DataFrame, arm: str) -> Any:
    """By policy and run seed, larger is better; one row for an arm that depends on no policy."""
    table = rows[rows["arm"] == arm].pivot(index="policy_id", columns="run_seed", values=metric_column(manifest))
    scores = table.loc[list(policy_ids(manifest, arm)), list(manifest.run_seeds)].to_numpy()
    return scores if manifest.metric == "accuracy" else -scores


def _adjusted(pairs: Iterable[ArmPair]) -> tuple[ArmPair, ...]:
    made = list(pairs)
    adjusted = holm({f"{p.first} {p.second}": p.difference.p for p in made if p.difference.p is not None})
    return tuple(replace(pair, holm_p=adjusted.get(f"{pair.first} {pair.second}")) for pair in made)
