"""Learning gates: has the policy learned at all? Read from the event log of its training run, each with its limit.

A gate that cannot be read is not passed. That the policy is above chance is a comparison of its own, with the arm
`random`; that the agent's code learns where learning is possible is a control.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from esper.leyline import HEAD_NAMES, TelemetryEventType
from esper.scripts.evidence.manifest import Check
from esper.scripts.evidence.policies import Policy
from esper.scripts.evidence.statistics import MIN_PAIRS, compare_samples
from esper.scripts.evidence.training_log import TrainingLog, read_training_log

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

Update = Mapping[str, Any]


def learning_gates(policy: Policy) -> list[Check]:
    """All gates of one policy's training run."""
    log = read_training_log(policy.run_dir)
    if isinstance(log, str):
        checks = [Check(name=UNREADABLE, passed=None, found=log, limit="all passed")]
    else:
        checks = check_log(log)
    return [replace(check, name=f"{policy.policy_id}: {check.name}") for check in checks]


def check_log(log: TrainingLog) -> list[Check]:
    """All gates over one log."""
    episodes = log.of(TelemetryEventType.EPISODE_COMPLETED)
    updates = log.of(TelemetryEventType.PPO_UPDATE_COMPLETED)
    if not episodes or not updates:
        found = f"{len(episodes)} episodes and {len(updates)} updates in the log"
        return [Check(name=UNREADABLE, passed=None, found=found, limit="all passed")]
    performed = [update for update in updates if update["performed"]]
    (started, *_) = log.of(TelemetryEventType.RUN_STARTED) or [{"slot_ids": ()}]
    # Where there is one slot, there is nothing to learn about where.
    heads = [head for head in HEAD_NAMES if head != "slot" or len(started["slot_ids"]) != 1]
    return [
        _returns_rise([float(episode["return_raw"]) for episode in episodes]),
        _critic_fits(performed),
        *(_head_learns(performed, head) for head in heads),
        *(_head_explores(performed, head) for head in heads),
        _steps_are_sound(performed),
        _few_rollbacks(episodes),
        _few_skipped(updates),
        _nothing_dropped(log),
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


def _critic_fits(updates: Sequence[Update]) -> Check:
    last = updates[-max(1, len(updates) // 5) :]
    explained = [_number(update["critic"]["explained_variance"]) for update in last]
    known = [value for value in explained if value is not None]
    if known:
        median = statistics.median(known)
        passed, found = median >= MIN_EXPLAINED_VARIANCE, f"{median:.2f}"
        return Check(name="explained variance, median of the last fifth", passed=passed, found=found, limit=">= 0.2")
    # Where returns hardly vary, the share of their variance that is explained says nothing.
    found_corr = [_number(update["critic"]["return_corr"]) for update in last]
    corr = [value for value in found_corr if value is not None]
    name, limit = "correlation of values and returns", f">= {MIN_RETURN_CORR}"
    if not corr:
        return Check(name=name, passed=False, found="not measured", limit=limit)
    median = statistics.median(corr)
    return Check(name=name, passed=median >= MIN_RETURN_CORR, found=f"{median:.2f}", limit=limit)


def _head_learns(updates: Sequence[Update], head: str) -> Check:
    usable = [update["heads"][head] for update in updates if update["heads"].get(head, {}).get("num_usable", 0) > 0]
    name, limit = f"gradient of head {head}", f">= {MIN_GRADIENT_SHARE:.0%} of updates"
    if not usable:
        return Check(name=name, passed=False, found="no usable step in any update", limit=limit)
    share = sum((_number(row["grad_norm"]) or 0.0) > 0.0 for row in usable) / len(usable)
    return Check(name=name, passed=share >= MIN_GRADIENT_SHARE, found=f"{share:.0%}", limit=limit)


def _head_explores(updates: Sequence[Update], head: str) -> Check:
    half = updates[: max(1, len(updates) // 2)]
    found = [_number(update["heads"].get(head, {}).get("entropy_share")) for update in half]
    known = [value for value in found if value is not None]
    name, limit = f"entropy of head {head}, lowest of the first half", f">= {MIN_ENTROPY_SHARE}"
    if not known:
        return Check(name=name, passed=False, found="not measured", limit=limit)
    return Check(name=name, passed=min(known) >= MIN_ENTROPY_SHARE, found=f"{min(known):.2f}", limit=limit)


def _steps_are_sound(updates: Sequence[Update]) -> Check:
    inside = 0
    for update in updates:
        kl = _number(update["joint"]["approx_kl"])
        inside += kl is not None and KL_LOW <= kl <= KL_HIGH * float(update["target_kl"])
    share = inside / len(updates) if updates else 0.0
    limit = f">= {MIN_KL_SHARE:.0%} of updates in {KL_LOW} to {KL_HIGH:.0f}x target"
    return Check(name="approximate KL", passed=share >= MIN_KL_SHARE, found=f"{share:.0%}", limit=limit)


def _few_rollbacks(episodes: Sequence[Mapping[str, Any]]) -> Check:
    rate = 100 * sum(episode["end"] == "rolled_back" for episode in episodes) / len(episodes)
    passed = rate <= MAX_ROLLBACKS_PER_100
    return Check(name="rollbacks per 100 episodes", passed=passed, found=f"{rate:.1f}", limit="<= 2")


def _few_skipped(updates: Sequence[Update]) -> Check:
    share = sum(not update["performed"] for update in updates) / len(updates)
    passed = share <= MAX_SKIPPED_SHARE
    return Check(name="skipped updates", passed=passed, found=f"{share:.1%}", limit=f"<= {MAX_SKIPPED_SHARE:.0%}")


def _nothing_dropped(log: TrainingLog) -> Check:
    told = sum(sum(data["counts"].values()) for data in log.of(TelemetryEventType.EVENTS_DROPPED))
    lost = max(told, log.num_missing)
    return Check(name="events missing in the log", passed=lost == 0, found=str(lost), limit="0")


def _number(value: Any) -> float | None:
    """A measured, finite number; the log writes None for both others."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
