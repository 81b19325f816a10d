"""What paired differences say: an interval, a p-value, wins and losses. Knows numbers only, no arms and no files.

The interval is the studentised bootstrap (bootstrap-t): at twenty pairs, percentile intervals cover too little. Every
draw comes from one fixed generator, so the same numbers always give the same interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from esper.evidence import limits
from esper.leyline import derive_seed, record

RESAMPLES = 10_000
SIGN_FLIPS = 10_000
LEVEL = 0.95
# Accuracies are shares of a few hundred rows: what differs by less than this is a rounding of the same number.
TIE = 1e-9


@record
class PairedDifference:
    """One arm minus another, over paired run seeds. Positive says that the first is better."""

    num_pairs: int
    mean: float
    sd: float | None
    """None for a single pair."""
    low: float | None
    """Bounds of the 95 % interval; None below ten pairs, or if too few differences differ to make one."""
    high: float | None
    p: float | None
    """Two-sided sign-flip p-value; None below ten pairs."""
    wins: int
    ties: int
    losses: int


def paired_difference(differences: Sequence[float]) -> PairedDifference:
    """Describes paired differences. Their order does not matter."""
    if not differences:
        raise ValueError("no pairs to compare")
    ordered = sorted(differences)
    low, high = _interval(ordered)
    return _comparison(ordered, low, high, sign_flip_p(ordered) if len(ordered) >= limits.MIN_PAIRS else None)


def difference_of_policies(differences: Sequence[Sequence[float]]) -> PairedDifference:
    """Describes differences of several policies (rows) on the same run seeds (columns).

    The interval is about the method: it resamples policies first, then run seeds. Fewer than five policies give none.
    The p-value flips the signs of whole policies, which are the independent units.
    """
    if len({len(row) for row in differences}) != 1:
        raise ValueError("every policy needs the same run seeds")
    if len(differences) == 1:
        return paired_difference(differences[0])
    enough = len(differences) >= limits.MIN_POLICIES and len(differences[0]) >= limits.MIN_PAIRS
    low, high = _two_level_interval(differences) if enough else (None, None)
    p = sign_flip_p(sorted(statistics.fmean(row) for row in differences)) if enough else None
    return _comparison(sorted(value for row in differences for value in row), low, high, p)


def _comparison(values: Sequence[float], low: float | None, high: float | None, p: float | None) -> PairedDifference:
    return PairedDifference(
        num_pairs=len(values),
        mean=math.fsum(values) / len(values),
        sd=statistics.stdev(values) if len(values) > 1 else None,
        low=low,
        high=high,
        p=p,
        wins=sum(value > TIE for value in values),
        ties=sum(abs(value) <= TIE for value in values),
        losses=sum(value < -TIE for value in values),
    )


# ---- one level: run seeds


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Bootstrap-t interval of the mean; (None, None) where there is none."""
    if len(values) < limits.MIN_PAIRS:
        return None, None
    if max(values) - min(values) <= TIE:
        return values[0], values[0]  # nothing varies, so nothing is uncertain
    from arch.bootstrap import IIDBootstrap

    sample = np.asarray(values)

    def mean(rows: Any) -> Any:
        return np.atleast_1d(rows.mean())

    def standard_error(_: Any, rows: Any) -> Any:
        # A resample of equal values has no spread of its own; the tiny floor keeps its t large and defined.
        return np.atleast_1d(max(rows.std(ddof=1), TIE * sample.std()) / math.sqrt(len(rows)))

    drawn = IIDBootstrap(sample, seed=_generator("interval"))
    bounds = drawn.conf_int(mean, reps=RESAMPLES, method="studentized", size=LEVEL, std_err_func=standard_error)
    return _sensible(values, float(bounds[0, 0]), float(bounds[1, 0]))


def _sensible(values: Sequence[float], low: float, high: float) -> tuple[float | None, float | None]:
    """Bounds that resamples of equal values have blown up beyond all that was seen are no bounds."""
    reach = 1_000.0 * (max(values) - min(values))
    return (None, None) if max(abs(low), abs(high)) > reach + max(map(abs, values)) else (low, high)


def sign_flip_p(values: Sequence[float]) -> float:
    """Two-sided p-value of "differences are as likely to be negative as positive", by flipping signs."""
    if all(abs(value) <= TIE for value in values):
        return 1.0
    from scipy.stats import permutation_test

    def mean(rows: Any, axis: int) -> Any:
        return rows.mean(axis=axis)

    found = permutation_test(
        (np.asarray(values),),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=SIGN_FLIPS,
        rng=_generator("sign flips"),
    )
    return float(found.pvalue)


def compare_samples(before: Sequence[float], after: Sequence[float]) -> tuple[float | None, float | None]:
    """Bootstrap-t interval of mean(after) - mean(before), two independent samples; Nones where nothing varies."""
    if (
        len(before) < limits.MIN_PAIRS
        or len(after) < limits.MIN_PAIRS
        or max(*before, *after) - min(*before, *after) <= TIE
    ):
        return None, None
    from arch.bootstrap import IndependentSamplesBootstrap

    first, second = np.asarray(before), np.asarray(after)
    floor = TIE * np.concatenate([first, second]).std()

    def rise(earlier: Any, later: Any) -> Any:
        return np.atleast_1d(later.mean() - earlier.mean())

    def standard_error(_: Any, earlier: Any, later: Any) -> Any:
        variance = earlier.var(ddof=1) / len(earlier) + later.var(ddof=1) / len(later)
        return np.atleast_1d(max(math.sqrt(variance), floor))

    drawn = IndependentSamplesBootstrap(first, second, seed=_generator("samples"))
    bounds = drawn.conf_int(rise, reps=RESAMPLES, method="studentized", size=LEVEL, std_err_func=standard_error)
    return _sensible([*before, *after], float(bounds[0, 0]), float(bounds[1, 0]))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjustment over a family of tests, by name."""
    if not p_values:
        return {}
    from statsmodels.stats.multitest import multipletests

    adjusted = multipletests(list(p_values.values()), method="holm")[1]
    return dict(zip(p_values, map(float, adjusted), strict=True))


# ---- two levels: policies, then run seeds


def _two_level_interval(differences: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    table = np.asarray([list(row) for row in differences], dtype=float)
    table = table[np.lexsort(table.T)]  # the order of policies must not matter
    if table.max() - table.min() <= TIE:
        return float(table[0, 0]), float(table[0, 0])
    generator = _generator("two levels")
    num_policies, num_seeds = table.shape
    rows = generator.integers(num_policies, size=(RESAMPLES, num_policies))
    columns = generator.integers(num_seeds, size=(RESAMPLES, num_seeds))
    centre, spread = table.mean(), _two_level_error(table[None])[0]
    drawn = table[rows[:, :, None], columns[:, None, :]]
    errors = np.maximum(_two_level_error(drawn), TIE * spread)
    scores = (drawn.mean(axis=(1, 2)) - centre) / errors
    tail = 100 * (1 - LEVEL) / 2
    low_score, high_score = np.percentile(scores, [tail, 100 - tail])
    bounds = float(centre - spread * high_score), float(centre - spread * low_score)
    return _sensible(table.ravel().tolist(), *bounds)


def _two_level_error(tables: Any) -> Any:
    """Standard error of the mean of each policies x seeds table, both being samples."""
    by_policy = tables.mean(axis=2).var(axis=1, ddof=1) / tables.shape[1]
    by_seed = tables.mean(axis=1).var(axis=1, ddof=1) / tables.shape[2]
    return np.sqrt(by_policy + by_seed)


def _generator(purpose: str) -> Any:
    return np.random.default_rng(derive_seed(0, None, None, None, purpose))


def require_libraries() -> None:
    """Says what is missing before anything long has run.

    Raises:
        ImportError: The `evidence` extra is not installed.
    """
    missing = [name for name in ("arch", "pandas", "scipy", "statsmodels") if find_spec(name) is None]
    if missing:
        raise ImportError(f"evaluations need {', '.join(missing)}: pip install 'esper-growth[evidence]'")
