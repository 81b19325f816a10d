"""Trained policies as evaluation sees them: frozen, named by their hash, with what their training cost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import HostLayout, LifecycleConfig, PolicyProtocol
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy
from esper.simic.run.run_state import load_policy
from esper.tamiyo.features import FeatureContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One trained policy."""

    policy_id: str
    """Start of its sha256."""
    run_dir: Path
    """Of its training; its event log says whether it has learned."""
    agent: PPOAgent
    task: str
    """What it was trained on."""
    episode_length: int | None
    """Epochs of its episodes; None: the task's own horizon."""
    param_budget: int | None
    """None: the task's own."""
    trained_seeds: frozenset[int]
    """Run seeds it has trained on."""
    facts: Mapping[str, Any]
    """For the report: where it comes from and what its training cost."""

    def controller(
        self, layout: HostLayout, lifecycle: LifecycleConfig, num_classes: int, *, run_seed: int, greedy: bool
    ) -> PolicyProtocol:
        """The policy as a controller of one run."""
        context = FeatureContext(layout=layout, lifecycle=lifecycle, num_classes=num_classes)
        return FrozenPolicy(self.agent, context, run_seed=run_seed, greedy=greedy)

    def digest(self) -> str:
        """Sha256 over weights, normalisers and all other state. Playing must not change it."""
        return agent_digest(self.agent)


def agent_digest(agent: PPOAgent) -> str:
    """Sha256 over everything an agent is made of."""
    total = hashlib.sha256()
    for name, content in sorted(agent.to_files().items()):
        total.update(name.encode() + hashlib.sha256(content).digest())
    return total.hexdigest()


def load_policies(sources: Sequence[Path]) -> tuple[Policy, ...]:
    """Reads trained policies from run directories or checkpoints.

    Raises:
        ValueError: The same policy was named twice.
        CheckpointError: A place holds no policy.
    """
    policies = tuple(load_policy_at(source) for source in sources)
    if len({policy.policy_id for policy in policies}) != len(policies):
        raise ValueError("--policy names the same policy twice; independent policies come from different run seeds")
    return policies


def load_policy_at(source: Path) -> Policy:
    """Reads one trained policy, and what is known of its training."""
    loaded = load_policy(source)
    config = loaded.config
    facts = {
        "run": loaded.run_id,
        "checkpoint": loaded.checkpoint.name,
        "sha256": loaded.policy_sha256,
        "task": config.task,
        "seed": config.seed,
        "rounds": loaded.rounds,
        "host epochs": loaded.host_epochs,
        "training hours": loaded.training_s / 3600,
    }
    return Policy(
        policy_id=loaded.policy_sha256[:12],
        run_dir=loaded.checkpoint.parent.parent,
        agent=loaded.agent,
        task=config.task,
        episode_length=config.episode_length,
        param_budget=config.param_budget,
        trained_seeds=loaded.trained_run_seeds,
        facts=facts,
    )


def check_apart(policies: Sequence[Policy], run_seeds: Sequence[int]) -> None:
    """Refuses run seeds that a policy has trained on.

    Raises:
        ValueError: There are such seeds.
    """
    for policy in policies:
        shared = sorted(policy.trained_seeds & set(run_seeds))
        if shared:
            raise ValueError(
                f"policy {policy.policy_id} has trained on run seeds {shared[:5]}, which are to judge it; "
                "train with seeds below 10,000"
            )
