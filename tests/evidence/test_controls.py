"""Controls notice what they are there to notice."""

from pathlib import Path

import pytest

from esper.evidence.controls import CONTROL_WORLDS, still_frozen
from esper.evidence.policies import Policy
from esper.evidence.sandboxes import SANDBOXES
from esper.scripts.evaluate import world_controls
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import network_shape


def policy() -> Policy:
    return Policy(
        policy_id="abc",
        run_dir=Path(),
        agent=PPOAgent(network_shape(("a", "b")), PPOConfig(), run_seed=0),
        task="digits_blind",
        episode_length=None,
        param_budget=None,
        trained_seeds=frozenset(),
        facts={},
    )


def test_a_policy_that_moved_is_noticed() -> None:
    played = policy()
    before = {"abc": played.digest()}
    assert still_frozen(before, {"abc": played}).passed is True
    played.agent.network.obs_norm.stats.count += 1
    check = still_frozen(before, {"abc": played})
    assert check.passed is False
    assert check.found == "changed: abc"


def test_the_control_worlds_exist() -> None:
    assert set(CONTROL_WORLDS.values()) <= {sandbox.name for sandbox in SANDBOXES}


@pytest.mark.slow
def test_the_agent_passes_the_control_worlds() -> None:
    assert [check.passed for check in world_controls()] == [True, True]
