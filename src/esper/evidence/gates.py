"""Learning gates: has the policy learned at all? Read from the event log of its training run, each with its limit.

A gate that cannot be read is not passed. That the policy is above chance is a comparison of its own, with the arm
`random`; that the agent's code learns where learning is possible is a control.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esper.evidence.manifest import Check
from esper.evidence.policies import Policy
from esper.evidence.statistics import MIN_PAIRS, compare_samples
from esper.karn.integrity import Integrity, check_run
from esper.karn.replay import is_run
from esper.leyline import HEAD_NAMES, EpisodeCompleted, HeadUpdate, LoggedEvent, PPOUpdateCompleted, RunStarted

MIN_EXPLAINED_VARIANCE = 0.2
MIN_RETURN_CORR = 0.3
MIN_GRADIENT_SHARE = 0.9
MIN_ENTROPY_SHARE = 0.05
KL_LOW, KL_HIGH = 1e-4, 3.0
"""In nats; as a multiple of the target."""
MIN_KL_SHARE = 0.8
MAX_ROLLBACKS_PER_100 = 2.0
MAX_SKIPPED_SHARE = 0.01
UNREADABLE = "learning gates"

Updates = Sequence[PPOUpdateCompleted]


def learning_gates(policy: Policy) -> list[Check]:
    """All gates of one policy's training run."""
    return [replace(check, name=f"{policy.policy_id}: {check.name}") for check in check_training(policy.run_dir)]


def check_training(run_dir: Path) -> list[Check]:
    """All gates over the log of one run directory."""
    if not is_run(run_dir):
        return [Check(name=UNREADABLE, passed=None, found="no log", limit="all passed")]
    episodes: list[EpisodeCompleted] = []
    updates: list[PPOUpdateCompleted] = []
    slot_ids: tuple[str, ...] = ()

    def sort(event: LoggedEvent, line: bytes) -> None:
        nonlocal slot_ids
        if isinstance(event.data, EpisodeCompleted):
            episodes.append(event.data)
        elif isinstance(event.data, PPOUpdateCompleted):
            updates.append(event.data)
        elif isinstance(event.data, RunStarted):
            slot_ids = event.data.slot_ids

    integrity = check_run(run_dir, sort)
    performed = [update for update in updates if update.performed]
    if not episodes or not performed:
        found = f"{len(episodes)} episodes and {len(performed)} updates in the log"
        return [Check(name=UNREADABLE, passed=None, found=found, limit="all passed")]
    # Where there is one slot, there is nothing to learn about where.
    heads = [head for head in HEAD_NAMES if head != "slot" or len(slot_ids) != 1]
    return [
        _returns_rise([episode.return_raw for episode in episodes]),
        _critic_fits(performed),
        *(_head_learns(performed, head) for head in heads),
        *(_head_explores(performed, head) for head in heads),
        _steps_are_sound(performed),
        _few_rollbacks(episodes),
        _few_skipped(updates),
        _log_is_whole(integrity),
    ]


def _returns_rise(returns: Sequence[float]) -> Check:
    tenth = len(returns) // 10
    name, limit = "return of the last tenth above the first", "interval above 0"
    if tenth < MIN_PAIRS:
        return Check(name=name, passed=None, found=f"{len(returns)} episodes, {10 * MIN_PAIRS} needed", limit=limit)
    low, high = compare_samples(returns[:tenth], returns[-tenth:])
    if low is None or high is None:
        return Check(name=name, passed=False, found="returns hardly vary", limit=limit)
    return Check(name=name, passed=low > 0.0, found=f"[{low:+.3f}, {high:+.3f}]", limit=limit)


def _critic_fits(updates: Updates) -> Check:
    last = updates[-max(1, len(updates) // 5) :]
    explained = [_number(update.critic.explained_variance) for update in last]
    known = [value for value in explained if value is not None]
    if known:
        median = statistics.median(known)
        passed, found = median >= MIN_EXPLAINED_VARIANCE, f"{median:.2f}"
        return Check(name="explained variance, median of the last fifth", passed=passed, found=found, limit=">= 0.2")
    # Where returns hardly vary, the share of their variance that is explained says nothing.
    found_corr = [_number(update.critic.return_corr) for update in last]
    corr = [value for value in found_corr if value is not None]
    name, limit = "correlation of values and returns", f">= {MIN_RETURN_CORR}"
    if not corr:
        return Check(name=name, passed=False, found="not measured", limit=limit)
    median = statistics.median(corr)
    return Check(name=name, passed=median >= MIN_RETURN_CORR, found=f"{median:.2f}", limit=limit)


def _head_learns(updates: Updates, head: str) -> Check:
    usable = [row for row in _rows(updates, head) if row.num_usable > 0]
    name, limit = f"gradient of head {head}", f">= {MIN_GRADIENT_SHARE:.0%} of updates"
    if not usable:
        return Check(name=name, passed=False, found="no usable step in any update", limit=limit)
    share = sum((_number(row.grad_norm) or 0.0) > 0.0 for row in usable) / len(usable)
    return Check(name=name, passed=share >= MIN_GRADIENT_SHARE, found=f"{share:.0%}", limit=limit)


def _head_explores(updates: Updates, head: str) -> Check:
    found = [_number(row.entropy_share) for row in _rows(updates[: max(1, len(updates) // 2)], head)]
    known = [value for value in found if value is not None]
    name, limit = f"entropy of head {head}, lowest of the first half", f">= {MIN_ENTROPY_SHARE}"
    if not known:
        return Check(name=name, passed=False, found="not measured", limit=limit)
    return Check(name=name, passed=min(known) >= MIN_ENTROPY_SHARE, found=f"{min(known):.2f}", limit=limit)


def _rows(updates: Updates, head: str) -> list[HeadUpdate]:
    return [update.heads[head] for update in updates if head in update.heads]


def _steps_are_sound(updates: Updates) -> Check:
    inside = 0
    for update in updates:
        kl = _number(update.joint.approx_kl)
        inside += kl is not None and KL_LOW <= kl <= KL_HIGH * update.target_kl
    share = inside / len(updates)
    limit = f">= {MIN_KL_SHARE:.0%} of updates in {KL_LOW} to {KL_HIGH:.0f}x target"
    return Check(name="approximate KL", passed=share >= MIN_KL_SHARE, found=f"{share:.0%}", limit=limit)


def _few_rollbacks(episodes: Sequence[EpisodeCompleted]) -> Check:
    rate = 100 * sum(episode.end == "rolled_back" for episode in episodes) / len(episodes)
    passed = rate <= MAX_ROLLBACKS_PER_100
    return Check(name="rollbacks per 100 episodes", passed=passed, found=f"{rate:.1f}", limit="<= 2")


def _few_skipped(updates: Updates) -> Check:
    share = sum(not update.performed for update in updates) / len(updates)
    passed = share <= MAX_SKIPPED_SHARE
    return Check(name="skipped updates", passed=passed, found=f"{share:.1%}", limit=f"<= {MAX_SKIPPED_SHARE:.0%}")


def _log_is_whole(integrity: Integrity) -> Check:
    problems = [*integrity.problems]
    if integrity.num_dropped:
        problems.append(f"{integrity.num_dropped} events were dropped")
    found = "; ".join(problems[:3]) or "whole"
    return Check(name="event log", passed=not problems, found=found, limit="whole, no event dropped")


def _number(value: float | None) -> float | None:
    """A measured, finite number."""
    return value if value is not None and math.isfinite(value) else None
