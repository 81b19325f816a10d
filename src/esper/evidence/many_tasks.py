"""What results on many tasks say together: scores per task, interquartile means with intervals, profiles, break-even.

Knows tables of numbers, no hosts and no files. A table has one row per run with the columns of `COLUMNS`. Points are
accuracy in percent, or how far the loss has fallen from that of a guess. Every draw comes from one fixed generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from esper.evidence.statistics import LEVEL
from esper.leyline import derive_seed, record

FloatArray: TypeAlias = npt.NDArray[np.float64]

COLUMNS: tuple[str, ...] = (
    "task",
    "kind",
    "arm",
    "policy_id",
    "run_seed",
    "points",
    "params_ratio",
    "episodes",
    "kept",
)
"""`kind` is the stratum that tasks are resampled in; `episodes` were played on the task itself to find a schedule;
`kept` are the blueprints of the seeds in the final network, with spaces between."""
BASELINE = "wait_only"
SATURATED_PP = 1.0
"""Where the best known network gains less than this over waiting, only what an arm loses counts."""
TRIM = 0.25
RESAMPLES = 2_000
WAITS_PP = 0.3
"""Points that a controller with restraint may lose where there is nothing to gain."""
WAITS_RATIO = 1.05
"""And most parameters, in units of the host."""
WORTH_EPISODES = 32
"""Episodes of a search that a controller is claimed to be worth."""


@record
class Estimate:
    """A figure and its interval, policies resampled first, then tasks within their kinds, then run seeds."""

    value: float
    low: float
    high: float


def score_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Adds `waiting`, `best`, `saturated` and `score` to every run.

    A score is the share of the best known gain over waiting on the same run seed, cut off at -1 and 1. Where there is
    nothing to gain, it is what was lost against waiting, in points and at most 1.

    Raises:
        ValueError: A run has no waiting host with the same run seed beside it.
    """
    waiting = rows[rows.arm == BASELINE].set_index(["task", "run_seed"]).points
    keys = pd.MultiIndex.from_frame(rows[["task", "run_seed"]])
    if missing := sorted(set(keys) - set(waiting.index)):
        raise ValueError(f"no {BASELINE} run for {missing[0]}; every run seed needs one")
    scored = rows.assign(waiting=waiting.reindex(keys).to_numpy())
    means = scored.groupby(["task", "arm", "policy_id", "episodes"]).points.mean().groupby("task").max()
    waits = scored[scored.arm == BASELINE].groupby("task").points.mean()
    gains = (means - waits).reindex(scored.task).to_numpy()
    lead = (scored.points - scored.waiting).to_numpy()
    saturated = gains < SATURATED_PP
    shares = np.where(saturated, np.clip(lead, -1.0, 0.0), lead / np.where(saturated, 1.0, gains))
    return scored.assign(best=gains + scored.waiting, saturated=saturated, score=np.clip(shares, -1.0, 1.0))


def estimate(scored: pd.DataFrame, arm: str, than: str | None = None) -> Estimate:
    """Interquartile mean over tasks of one arm's scores, or its lead over another arm on the same tasks."""
    tasks = sorted(scored[scored.arm == arm].task.unique())
    kinds = scored.drop_duplicates("task").set_index("task").kind.reindex(tasks).to_numpy()
    rng = np.random.default_rng(derive_seed(0, None, None, None, f"many tasks:{arm}:{than}"))
    places = [np.flatnonzero(kinds == kind) for kind in sorted(set(kinds))]
    tasks_RT = np.concatenate([rng.choice(place, (RESAMPLES, len(place))) for place in places], axis=1)
    tables = [_scores(scored, name, tasks) for name in (arm, than) if name is not None]
    values = [float(_middle(table.mean(axis=2).ravel())) for table in tables]
    drawn = [_resampled(table, tasks_RT, rng) for table in tables]
    low, high = np.percentile(drawn[0] - (drawn[1] if than else 0.0), [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2])
    return Estimate(value=values[0] - (values[1] if than else 0.0), low=float(low), high=float(high))


def _scores(scored: pd.DataFrame, arm: str, tasks: Sequence[str]) -> FloatArray:
    """`[policy, task, run seed]`.

    Raises:
        ValueError: A run is missing.
    """
    rows = scored[scored.arm == arm]
    if rows.empty:
        raise ValueError(f"there are no runs of {arm!r}. Arms: {', '.join(sorted(scored.arm.unique()))}")
    table = rows.pivot_table(index=["policy_id", "task"], columns="run_seed", values="score")
    table = table.reindex(pd.MultiIndex.from_product([table.index.levels[0], tasks]))
    if table.isna().to_numpy().any():
        policy, task = table.index[table.isna().any(axis=1)][0]
        raise ValueError(f"runs of {arm} {policy} are missing on {task}; run the study again, it goes on there")
    return np.asarray(table.to_numpy(dtype=float).reshape(-1, len(tasks), table.shape[1]))


def _resampled(scores_PTS: FloatArray, tasks_RT: FloatArray, rng: np.random.Generator) -> FloatArray:
    policies, _, seeds = scores_PTS.shape
    policies_RP = rng.integers(policies, size=(RESAMPLES, policies))
    seeds_RPTS = rng.integers(seeds, size=(RESAMPLES, policies, tasks_RT.shape[1], seeds))
    drawn = scores_PTS[policies_RP[:, :, None, None], tasks_RT[:, None, :, None], seeds_RPTS]
    return _middle(drawn.mean(axis=3).reshape(RESAMPLES, -1))


def _middle(values: FloatArray) -> FloatArray:
    """Mean of the middle half along the last axis."""
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(values, TRIM, axis=-1))


def profile(scored: pd.DataFrame, arm: str, thresholds: Sequence[float]) -> list[float]:
    """Share of runs whose score is at least each threshold."""
    scores = scored[scored.arm == arm].score.to_numpy()
    return [float((scores >= threshold).mean()) for threshold in thresholds]


def break_even(scored: pd.DataFrame, arm: str, search: str) -> dict[str, float]:
    """By task: episodes that a search needs there to do as well as an arm that never met the task.

    Between the numbers of episodes that were tried, straight on a logarithmic scale; infinite if the most did not do.
    Tasks on which nothing can be gained are left out, and those on which no search had more episodes than the claim
    asks for: there nobody knows what more would have brought.
    """
    found = {}
    for task, rows in scored[~scored.saturated].groupby("task"):
        wanted = rows[rows.arm == arm].points.mean()
        tried = rows[rows.arm == search].groupby("episodes").points.mean().sort_index()
        if tried.empty or tried.index.max() <= WORTH_EPISODES or math.isnan(wanted):
            continue
        found[str(task)] = _crossing([(float(n), float(v)) for n, v in tried.items()], float(wanted))
    return found


def _crossing(curve: Sequence[tuple[float, float]], wanted: float) -> float:
    best, before = -math.inf, None
    for episodes, value in curve:
        if value > best:
            if value >= wanted:
                if before is None or best <= -math.inf:
                    return episodes
                share = (wanted - best) / (value - best)
                return float(2 ** (math.log2(before) + share * (math.log2(episodes) - math.log2(before))))
            best, before = value, episodes
        else:
            before = episodes  # a search can always keep what it had
    return math.inf


@record
class ManyTasksVerdict:
    """One claim and what was found."""

    claim: str
    holds: bool | None
    """None: the runs that would decide are missing."""
    found: str


def verdicts(
    scored: pd.DataFrame, policy: str, rules: Sequence[str], unseeing: Sequence[str]
) -> list[ManyTasksVerdict]:
    """Claims D1 to D4 about a policy arm.

    Args:
        scored: From `score_runs`.
        policy: The arm judged.
        rules: Fixed controllers among the arms.
        unseeing: Arms that see less than the policy: time and budget only, or nothing while they replay it.
    """
    arms = set(scored.arm)
    best = max((rule for rule in rules if rule in arms), key=lambda rule: estimate(scored, rule).value)
    lead = estimate(scored, policy, best)
    found = [
        ManyTasksVerdict(
            claim="D1: above every rule on held-out tasks",
            holds=lead.low > 0.0,
            found=f"{policy} minus {best}, the best rule: {_words(lead)}",
        )
    ]
    for search in ("search_random", "search_tpe"):
        needed = break_even(scored, policy, search)
        median = float(np.median(list(needed.values()))) if needed else None
        found.append(
            ManyTasksVerdict(
                claim=f"D2: worth at least {WORTH_EPISODES} episodes of {search} on the median task",
                holds=None if median is None else median >= WORTH_EPISODES,
                found="not measured" if median is None else f"{median:.0f} episodes over {len(needed)} tasks",
            )
        )
    found.append(_restraint(scored, policy))
    for other in unseeing:
        gap = estimate(scored, policy, other) if other in arms else None
        found.append(
            ManyTasksVerdict(
                claim=f"D4: above {other}",
                holds=None if gap is None else gap.low > 0.0,
                found="not measured" if gap is None else _words(gap),
            )
        )
    return found


def _restraint(scored: pd.DataFrame, policy: str) -> ManyTasksVerdict:
    rows = scored[scored.saturated & (scored.arm == policy)]
    claim = f"D3: where nothing can be gained, at most {WAITS_PP} points lost and {WAITS_RATIO}x parameters"
    if rows.empty:
        return ManyTasksVerdict(claim=claim, holds=None, found="not measured")
    lost, size = float((rows.waiting - rows.points).mean()), float(rows.params_ratio.mean())
    words = f"{lost:.2f} points lost, {size:.2f}x parameters on {rows.task.nunique()} tasks"
    return ManyTasksVerdict(claim=claim, holds=lost <= WAITS_PP and size <= WAITS_RATIO, found=words)


def _words(figure: Estimate) -> str:
    return f"{figure.value:+.3f} [{figure.low:+.3f}, {figure.high:+.3f}]"
