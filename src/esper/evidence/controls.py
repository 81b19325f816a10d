"""Controls: what must come out right before anything else is believed.

A/A: the same arm on the same run seed gives the same bits. Frozen: playing leaves the policy as it was. Planted optimum
and inert seeds: the agent, trained from nothing in two small worlds, finds what is there and leaves alone what is not;
the command trains it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from esper.evidence.manifest import Check
from esper.evidence.policies import Policy
from esper.evidence.results import RunResult

CONTROL_WORLDS: Mapping[str, str] = {"positive control (planted optimum)": "decoy", "negative control (inert)": "inert"}
TIMES = ("run_s", "controller_s", "wall_s")


def same_again(first: RunResult, again: RunResult) -> Check:
    """A/A: every figure of a repeated run is the same, but for times."""
    names = [field.name for field in fields(RunResult) if field.name not in TIMES]
    other = [name for name in names if getattr(first, name) != getattr(again, name)]
    what = f"{first.arm}, run seed {first.run_seed}"
    found = f"{what}: identical" if not other else f"{what}: {', '.join(other)} differ"
    return Check(name="A/A", passed=not other, found=found, limit="every figure identical")


def still_frozen(before: Mapping[str, str], policies: Mapping[str, Policy]) -> Check:
    """Weights, normalisers and counters of every policy are what they were."""
    moved = [policy_id for policy_id, policy in policies.items() if policy.digest() != before[policy_id]]
    found = "equal" if not moved else f"changed: {', '.join(moved)}"
    return Check(name="policy frozen", passed=not moved, found=found, limit="equal hashes before and after")
