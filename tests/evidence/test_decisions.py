"""A policy with one decision left to a rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from esper.evidence.decisions import OneDecisionLess
from esper.evidence.draws import DrawnHosts, rule_on_all
from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline import ActionExecutionResult, ActionSpec, LifecycleOp, PolicyProtocol
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy, network_shape


class Heard:
    """Notes what a policy decides."""

    def __init__(self, policy: PolicyProtocol) -> None:
        self.policy = policy
        self.first: list[ActionSpec] = []

    def begin(self, state: ActionExecutionResult) -> None:
        self.policy.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        specs = self.policy.act(state)
        self.first = self.first or list(specs)
        return specs

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        self.policy.store(before, after)


def first_steps(policy: PolicyProtocol) -> list[ActionSpec]:
    heard = Heard(policy)
    with DrawnHosts(range(1_000_000, 1_000_004), seeds=1, workers=1) as hosts:
        hosts.run(heard)
    return heard.first


@pytest.mark.parametrize(("decision", "head"), [("what", "blueprint"), ("where", "slot"), ("when", "op")])
def test_the_rule_has_one_decision_and_the_policy_the_rest(decision: str, head: str) -> None:
    eager = (0.0, 9.0, 0.0, 0.0, 0.0)
    agent = PPOAgent(network_shape(tuple(BLUEPRINTS)), PPOConfig(width=16, op_prior=eager), run_seed=1)
    rule = first_steps(rule_on_all("largest", {}))
    alone = first_steps(FrozenPolicy(agent, run_seed=0, greedy=True))
    less = first_steps(OneDecisionLess(FrozenPolicy(agent, run_seed=0, greedy=True), decision))
    assert all(spec.op is LifecycleOp.GERMINATE for spec in alone), "it plants everywhere at once"
    if decision == "what":  # the largest of the slot that the policy chose
        assert [spec.slot for spec in less] == [spec.slot for spec in alone]
        same = [(a, b) for a, b in zip(less, rule, strict=True) if a.slot == b.slot]
        assert all(a.blueprint == b.blueprint for a, b in same)
    else:
        assert [getattr(spec, head) for spec in less] == [getattr(spec, head) for spec in rule]
    assert less != rule
