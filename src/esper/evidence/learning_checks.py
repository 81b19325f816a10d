"""Has the policy learned at all? Checks over the event log of its training run, each with its limit.

A check that cannot be made is not passed. That the policy is above random is a comparison of its own, with the arm of
that name; that the agent's code learns where learning is possible is a control.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from esper.evidence import limits
from esper.evidence.manifest import CheckResult
from esper.evidence.statistics import compare_samples
from esper.karn.integrity import Integrity, check_run
from esper.karn.replay import is_run
from esper.leyline import (
    HEAD_NAMES,
    EpisodeCompleted,
    HeadName,
    LoggedEvent,
    PPOUpdateCompleted,
    PPOUpdateMetrics,
    RunStarted,
)

UNREADABLE = "learning checks"

Updates = Sequence[PPOUpdateMetrics]


def check_training(run_dir: Path) -> list[CheckResult]:
    """All checks over the log of one run directory."""
    if not is_run(run_dir):
        return [_check(UNREADABLE, None, "no log", "all passed")]
    episodes: list[EpisodeCompleted] = []
    updates: list[PPOUpdateMetrics] = []
    slot_ids: tuple[str, ...] = ()

    def sort(event: LoggedEvent, line: bytes) -> None:
        nonlocal slot_ids
        if isinstance(event.data, EpisodeCompleted):
            episodes.append(event.data)
        elif isinstance(event.data, PPOUpdateCompleted):
            updates.append(event.data.metrics)
        elif isinstance(event.data, RunStarted):
            slot_ids = event.data.slot_ids

    integrity = check_run(run_dir, sort)
    performed = [update for update in updates if update["performed"]]
    if not episodes or not performed:
        found = f"{len(episodes)} episodes and {len(performed)} updates in the log"
        return [_check(UNREADABLE, None, found, "all passed")]
    # Where there is one slot, there is nothing to learn about where.
    heads = [head for head in HEAD_NAMES if head != "slot" or len(slot_ids) != 1]
    return [
        _returns_rise([episode.return_raw for episode in episodes]),
        _critic_fits(performed),
        *(_head_learns(performed, head) for head in heads),
        *(_head_explores(performed, head) for head in heads),
        _kl_is_sound(performed),
        _few_rollbacks(episodes),
        _few_skipped(updates),
        _log_is_whole(integrity),
    ]


def _returns_rise(returns: Sequence[float]) -> CheckResult:
    tenth = len(returns) // 10
    name, limit = "return of the last tenth above the first", "interval above 0"
    if tenth < limits.MIN_PAIRS:
        return _check(name, None, f"{len(returns)} episodes, {10 * limits.MIN_PAIRS} needed", limit)
    low, high = compare_samples(returns[:tenth], returns[-tenth:])
    if low is None or high is None:
        return _check(name, False, "returns hardly vary", limit)
    return _check(name, low > 0.0, f"[{low:+.3f}, {high:+.3f}]", limit)


def _critic_fits(updates: Updates) -> CheckResult:
    last = updates[-max(1, len(updates) // 5) :]
    if explained := _finite(update["explained_variance"] for update in last):
        name, least = "explained variance, median of the last fifth", limits.MIN_EXPLAINED_VARIANCE
        return _at_least(name, least, statistics.median(explained), ".2f")
    # Where returns hardly vary, the share of their variance that is explained says nothing.
    corr = _finite(update["return_corr"] for update in last)
    median = statistics.median(corr) if corr else None
    return _at_least("correlation of values and returns", limits.MIN_RETURN_CORR, median, ".2f")


def _head_learns(updates: Updates, head: str) -> CheckResult:
    rows = (update["heads"][head] for update in updates if head in update["heads"])
    usable = [row for row in rows if row.num_usable > 0]
    name, limit = f"gradient of head {head}", f">= {limits.MIN_GRADIENT_SHARE:.0%} of updates"
    if not usable:
        return _check(name, False, "no usable step in any update", limit)
    share = sum(norm > 0.0 for norm in _finite(row.grad_norm for row in usable)) / len(usable)
    return _check(name, share >= limits.MIN_GRADIENT_SHARE, f"{share:.0%}", limit)


def _head_explores(updates: Updates, head: HeadName) -> CheckResult:
    known = _finite(update["head_entropies"][head] for update in updates[: max(1, len(updates) // 2)])
    name = f"entropy of head {head}, lowest of the first half"
    return _at_least(name, limits.MIN_ENTROPY_SHARE, min(known, default=None), ".2f")


def _kl_is_sound(updates: Updates) -> CheckResult:
    # Updates that imitate compare no ratios, and have no KL.
    kls = [(update["approx_kl"], limits.MAX_KL_OVER_TARGET * update["target_kl"]) for update in updates]
    sound = [limits.MIN_KL <= kl <= most for kl, most in kls if kl is not None]
    share = sum(sound) / max(1, len(sound))
    limit = f">= {limits.MIN_KL_SHARE:.0%} of updates in {limits.MIN_KL} to {limits.MAX_KL_OVER_TARGET:.0f}x target"
    return _check("approximate KL", share >= limits.MIN_KL_SHARE, f"{share:.0%}", limit)


def _few_rollbacks(episodes: Sequence[EpisodeCompleted]) -> CheckResult:
    rate = 100 * sum(episode.end == "rolled_back" for episode in episodes) / len(episodes)
    most = limits.MAX_ROLLBACKS_PER_100
    return _check("rollbacks per 100 episodes", rate <= most, f"{rate:.1f}", f"<= {most:.0f}")


def _few_skipped(updates: Updates) -> CheckResult:
    share, most = sum(not update["performed"] for update in updates) / len(updates), limits.MAX_SKIPPED_SHARE
    return _check("skipped updates", share <= most, f"{share:.1%}", f"<= {most:.0%}")


def _log_is_whole(integrity: Integrity) -> CheckResult:
    problems = [*integrity.problems]
    if integrity.num_dropped:
        problems.append(f"{integrity.num_dropped} events were dropped")
    return _check("event log", not problems, "; ".join(problems[:3]) or "whole", "whole, no event dropped")


def _at_least(name: str, least: float, found: float | None, form: str) -> CheckResult:
    if found is None:
        return _check(name, False, "not measured", f">= {least}")
    return _check(name, found >= least, f"{found:{form}}", f">= {least}")


def _check(name: str, passed: bool | None, found: str, limit: str) -> CheckResult:
    return CheckResult(name=name, passed=passed, found=found, limit=limit)


def _finite(values: Iterable[float | None]) -> list[float]:
    """Those that were measured and are numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]
