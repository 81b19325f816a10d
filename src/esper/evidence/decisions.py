"""Which decision a policy owes its gain to: one at a time is left to the rule `largest`, and the policy has the rest.

What to plant, where, and when: the policy finds nothing else legal than what the rule would choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from esper.evidence.draws import DrawnHosts, judge, rule_on_all
from esper.leyline import ActionExecutionResult, ActionMasks, ActionSpec, LifecycleOp, PolicyProtocol
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy
from esper.simic.training.config import IMITATED_RULE
from esper.tamiyo.controller import Situation, own_situations


def _what(situation: Situation, rule: ActionSpec) -> ActionMasks:
    layout, masks = situation.setting.layout, situation.masks
    largest = [situation.largest(slot, situation.legal_blueprints(slot)) for slot in layout.slot_ids]
    rows = tuple(tuple(name == chosen for name in layout.blueprints) for chosen in largest)
    return replace(masks, blueprint_by_slot=rows)


def _where(situation: Situation, rule: ActionSpec) -> ActionMasks:
    layout, masks = situation.setting.layout, situation.masks
    choices = [
        (slot, name)
        for slot in situation.legal_slots(LifecycleOp.GERMINATE)
        for name in situation.legal_blueprints(slot)
    ]
    if not choices:
        return masks
    chosen, _ = max(choices, key=lambda choice: layout.card(*choice).params)
    rows = list(masks.slot_by_op)
    rows[LifecycleOp.GERMINATE] = tuple(slot == chosen for slot in layout.slot_ids)
    return replace(masks, slot_by_op=tuple(rows))


def _when(situation: Situation, rule: ActionSpec) -> ActionMasks:
    return replace(situation.masks, op=tuple(op is rule.op for op in LifecycleOp))


LEFT_TO_THE_RULE: Mapping[str, Callable[[Situation, ActionSpec], ActionMasks]] = {
    "what": _what,
    "where": _where,
    "when": _when,
}


class OneDecisionLess:
    """A policy that decides all but one thing."""

    def __init__(self, policy: PolicyProtocol, decision: str) -> None:
        self._policy, self._rule = policy, rule_on_all(IMITATED_RULE, {})
        self._narrow = LEFT_TO_THE_RULE[decision]

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts both."""
        self._rule.begin(state)
        self._policy.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        """Asks the rule, then the policy about what the rule leaves open."""
        specs = self._rule.act(state)
        masks = [self._narrow(own, spec) for own, spec in zip(own_situations(state), specs, strict=True)]
        return self._policy.act(replace(state, post_action_masks=tuple(masks)))

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Tells both what became of it."""
        self._rule.store(before, after)
        self._policy.store(before, after)


def worth_of_decisions(agent: PPOAgent, hosts: DrawnHosts, log: Callable[[str], None]) -> dict[str, float]:
    """Points over waiting of the policy, and of the same policy with one decision left to the rule, by decision."""
    policy = FrozenPolicy(agent, run_seed=0, greedy=True)
    arms: dict[str, PolicyProtocol] = {"none": policy}
    arms |= {decision: OneDecisionLess(policy, decision) for decision in LEFT_TO_THE_RULE}
    return judge(
        hosts, {**arms, "all": rule_on_all(IMITATED_RULE, {})}, lambda line: log(f"left to {IMITATED_RULE}: {line}")
    )
