"""Controls notice what they are there to notice."""

import pytest

from esper.evidence.evaluation import CONTROL_WORLDS, agent_digest, still_frozen, world_controls
from esper.evidence.sandboxes import SANDBOXES
from tests.evidence.made_up import untrained


def test_a_policy_that_moved_is_noticed() -> None:
    played = untrained("abc")
    before = {"abc": agent_digest(played.agent)}
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
