"""From rows to figures: every arm for itself, and pairs of arms on the same run seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from esper.evidence.arms import ARMS, BASELINE, depends_on_policy
from esper.evidence.manifest import Manifest
from esper.evidence.results import RunResult
from esper.evidence.statistics import Comparison, compare_policies, holm
from esper.leyline import record

FIGURES = (
    "test_accuracy_pct",
    "test_loss",
    "val_accuracy_pct",
    "val_loss",
    "params",
    "peak_params",
    "param_epochs",
    "host_epochs",
    "run_s",
    "controller_s",
    "wall_s",
    "num_wait",
    "num_germinate",
    "num_advance",
    "num_prune",
    "num_fossilize",
    "num_kept",
    "num_rollbacks",
)


@record
class Spread:
    """Mean and standard deviation of one figure over the runs of an arm."""

    mean: float
    sd: float | None


@record
class ArmSummary:
    """All runs of one arm."""

    arm: str
    num_runs: int
    num_failed: int
    figures: Mapping[str, Spread]


@record
class Pair:
    """Two arms on the same run seeds. The difference is first minus second, in points or nats; positive is better."""

    first: str
    second: str
    comparison: Comparison
    holm_p: float | None
    """Adjusted over all pairs with the same first or the same second arm; None where there is no p-value."""


@record
class Summary:
    """What the rows say."""

    arms: tuple[ArmSummary, ...]
    """Best first."""
    against_baseline: tuple[Pair, ...]
    """Every arm minus wait_only."""
    subject_against: tuple[Pair, ...]
    """The subject minus every other arm."""
    missing: tuple[tuple[str, str, int], ...]
    """Runs that should be there and are not. Arms they belong to are in no pair."""

    def arm(self, name: str) -> ArmSummary | None:
        """An arm by name, if it was run."""
        return next((arm for arm in self.arms if arm.arm == name), None)

    def subject_minus(self, name: str) -> Comparison | None:
        """The subject's pair with an arm, if both are complete."""
        return next((pair.comparison for pair in self.subject_against if pair.second == name), None)


def expected_runs(manifest: Manifest) -> list[tuple[str, str, int]]:
    """The keys of all runs that make the evaluation whole, arm by arm."""
    return [
        (name, policy_id, run_seed)
        for name in manifest.arms
        for policy_id in policy_ids(manifest, name)
        for run_seed in manifest.run_seeds
    ]


def policy_ids(manifest: Manifest, arm: str) -> tuple[str, ...]:
    """The policies under which an arm has runs of its own; ("",) for an arm that depends on none."""
    own = bool(manifest.policies) and depends_on_policy(ARMS[arm], manifest.subject)
    return manifest.policy_ids if own else ("",)


def score(row: RunResult, metric: str) -> float:
    """What counts, higher is better: accuracy in percent, or the loss with its sign turned."""
    return row.test_accuracy_pct if metric == "accuracy" else -row.test_loss


def summarise(manifest: Manifest, rows: Sequence[RunResult]) -> Summary:
    """Describes every arm and compares those that are complete."""
    by_key = {row.key: row for row in rows}
    missing = tuple(key for key in expected_runs(manifest) if key not in by_key)
    broken = {arm for arm, _, _ in missing}
    arms = [_arm(name, rows) for name in manifest.arms if any(row.arm == name for row in rows)]
    metric = "test_accuracy_pct" if manifest.metric == "accuracy" else "test_loss"
    sign = -1.0 if manifest.metric == "accuracy" else 1.0
    arms.sort(key=lambda arm: sign * arm.figures[metric].mean)
    whole = [name for name in manifest.arms if name not in broken]

    def pairs(all_pairs: Sequence[tuple[str, str]]) -> tuple[Pair, ...]:
        return _pairs([(a, b) for a, b in all_pairs if a != b and a in whole and b in whole], manifest, by_key)

    return Summary(
        arms=tuple(arms),
        against_baseline=pairs([(name, BASELINE) for name in manifest.arms]),
        subject_against=pairs([(manifest.subject, name) for name in manifest.arms]),
        missing=missing,
    )


def _arm(name: str, rows: Sequence[RunResult]) -> ArmSummary:
    own = sorted((row for row in rows if row.arm == name), key=lambda row: row.key)
    return ArmSummary(
        arm=name,
        num_runs=len(own),
        num_failed=sum(row.failed for row in own),
        figures={figure: _spread([float(getattr(row, figure)) for row in own]) for figure in FIGURES},
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        mean=math.fsum(values) / len(values), sd=statistics.stdev(sorted(values)) if len(values) > 1 else None
    )


def _pairs(
    names: Sequence[tuple[str, str]], manifest: Manifest, by_key: Mapping[tuple[str, str, int], RunResult]
) -> tuple[Pair, ...]:
    made = [
        Pair(
            first=first,
            second=second,
            comparison=compare_policies(differences(manifest, by_key, first, second)),
            holm_p=None,
        )
        for first, second in names
    ]
    p_values = {f"{p.first} {p.second}": p.comparison.p for p in made if p.comparison.p is not None}
    adjusted = holm(p_values)
    return tuple(replace(pair, holm_p=adjusted.get(f"{pair.first} {pair.second}")) for pair in made)


def differences(
    manifest: Manifest, by_key: Mapping[tuple[str, str, int], RunResult], first: str, second: str
) -> list[list[float]]:
    """First minus second by run seed, one row per policy; one row if neither depends on a policy."""
    own = [policy_ids(manifest, name) for name in (first, second)]
    policies = max(own, key=len)

    def value(name: str, ids: tuple[str, ...], policy_id: str, run_seed: int) -> float:
        return score(by_key[name, "" if ids == ("",) else policy_id, run_seed], manifest.metric)

    return [
        [value(first, own[0], p, seed) - value(second, own[1], p, seed) for seed in manifest.run_seeds]
        for p in policies
    ]
