"""Trained policies as evaluation sees them: frozen, named by their hash, with what their training cost."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.evidence.learning_checks import check_training
from esper.evidence.manifest import CheckResult
from esper.simic.agent.ppo import PPOAgent
from esper.simic.run.run_state import LoadedPolicy, load_policy


def policy_id(policy: LoadedPolicy) -> str:
    """The start of its sha256."""
    return policy.policy_sha256[:12]


def load_policies(sources: Sequence[Path]) -> tuple[LoadedPolicy, ...]:
    """Reads trained policies from run directories or checkpoints.

    Raises:
        ValueError: The same policy was named twice.
        CheckpointError: A place holds no policy.
    """
    policies = tuple(load_policy(source) for source in sources)
    if len({policy_id(policy) for policy in policies}) != len(policies):
        raise ValueError("--policy names the same policy twice; independent policies come from different run seeds")
    return policies


def policy_facts(policy: LoadedPolicy) -> dict[str, Any]:
    """For manifest and report: where it comes from and what its training cost."""
    return {
        "policy_id": policy_id(policy),
        "run": policy.run_id,
        "checkpoint": policy.checkpoint.name,
        "sha256": policy.policy_sha256,
        "task": policy.config.task,
        "seed": policy.config.seed,
        "rounds": policy.rounds,
        "host epochs": policy.host_epochs,
        "training hours": policy.training_s / 3600,
    }


def learning_checks(policy: LoadedPolicy) -> list[CheckResult]:
    """Whether its training run says that it has learned."""
    checks = check_training(policy.checkpoint.parent.parent)
    return [replace(check, name=f"{policy_id(policy)}: {check.name}") for check in checks]


def agent_digest(agent: PPOAgent) -> str:
    """Sha256 over weights, normalisers and all other state. Playing must not change it."""
    total = hashlib.sha256()
    for name, content in sorted(agent.to_files().items()):
        total.update(name.encode() + hashlib.sha256(content).digest())
    return total.hexdigest()


def check_unseen(policies: Sequence[LoadedPolicy], run_seeds: Sequence[int]) -> None:
    """Refuses run seeds that a policy has trained on.

    Raises:
        ValueError: There are such seeds.
    """
    for policy in policies:
        shared = sorted(policy.trained_run_seeds & set(run_seeds))
        if shared:
            raise ValueError(
                f"policy {policy_id(policy)} has trained on run seeds {shared[:5]}, which are to judge it; "
                "train with seeds below 10,000"
            )
