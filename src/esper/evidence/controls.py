"""Controls: what must come out right before anything else is believed.

A/A: the same arm on the same run seed gives the same bits. Frozen: playing leaves the policy as it was. Planted optimum
and inert seeds: the agent, trained from nothing in two small worlds, finds what is there and leaves alone what is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from esper.evidence.manifest import CheckResult
from esper.evidence.policies import agent_digest
from esper.evidence.results import RunResult
from esper.evidence.sandbox_training import run_sandbox
from esper.evidence.sandboxes import SANDBOXES
from esper.simic.run.run_state import LoadedPolicy

CONTROL_WORLDS: Mapping[str, str] = {"positive control (planted optimum)": "decoy", "negative control (inert)": "inert"}
TIMES = ("run_s", "controller_s", "wall_s")


def same_again(first: RunResult, again: RunResult) -> CheckResult:
    """A/A: every figure of a repeated run is the same, but for times."""
    names = [field.name for field in fields(RunResult) if field.name not in TIMES]
    other = [name for name in names if getattr(first, name) != getattr(again, name)]
    what = f"{first.arm}, run seed {first.run_seed}"
    found = f"{what}: identical" if not other else f"{what}: {', '.join(other)} differ"
    return CheckResult(name="A/A", passed=not other, found=found, limit="every figure identical")


def still_frozen(before: Mapping[str, str], policies: Mapping[str, LoadedPolicy]) -> CheckResult:
    """Weights, normalisers and counters of every policy are what they were."""
    moved = [policy_id for policy_id, policy in policies.items() if agent_digest(policy.agent) != before[policy_id]]
    found = "equal" if not moved else f"changed: {', '.join(moved)}"
    return CheckResult(name="policy frozen", passed=not moved, found=found, limit="equal hashes before and after")


def world_controls() -> list[CheckResult]:
    """Trains the agent in the two worlds. Takes a minute or two."""
    checks = []
    for name, world in CONTROL_WORLDS.items():
        (sandbox,) = (sandbox for sandbox in SANDBOXES if sandbox.name == world)
        result = run_sandbox(sandbox, run_seed=0)
        reached = "not measured" if result.reached is None else f"{result.reached:.3f}"
        limit = f"{'>=' if sandbox.higher_is_better else '<='} {sandbox.limit(result.optimum):.3f}"
        found = f"{sandbox.measured} {reached}"
        checks.append(CheckResult(name=name, passed=result.passed, found=found, limit=limit))
    return checks
