"""Small worlds and loops that several tests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from esper.leyline import (
    BLENDS,
    DEFAULT_LIFECYCLE,
    OPS,
    ActionExecutionResult,
    ActionMasks,
    ActionOutcome,
    ActionSpec,
    EpisodeSeed,
    EpochReport,
    HostLayout,
    LifecycleConfig,
    LifecycleOp,
    PolicyProtocol,
    wait,
)
from esper.tamiyo.masks import observe
from esper.tamiyo.simulation import SimulatedBlueprint, SimulatedWorker, SimulationSpec

ANYTHING_GOES: LifecycleConfig = replace(DEFAULT_LIFECYCLE, min_contribution=-100.0)
"""A lifecycle in which bad seeds can be kept too, so that a reward has something to punish."""


def world(num_slots: int = 3, **changes: object) -> SimulationSpec:
    """A small world: one good, one bad, one inert blueprint and a parasite, three slots, ten epochs."""

    def blueprint(name: str, gains: Sequence[float], dependence_pp: float) -> SimulatedBlueprint:
        gain_pp = tuple(gains[i % len(gains)] for i in range(num_slots))
        return SimulatedBlueprint(name=name, gain_pp=gain_pp, dependence_pp=dependence_pp)

    spec = SimulationSpec(
        blueprints=(
            blueprint("good", (10.0, 6.0, 3.0), 4.0),
            blueprint("bad", (-6.0,), 2.0),
            blueprint("inert", (0.0,), 0.0),
            blueprint("parasite", (-0.5,), 15.0),
        ),
        slot_ids=tuple(f"r0c{i}" for i in range(num_slots)),
        horizon=10,
        lifecycle=ANYTHING_GOES,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def seeds(count: int, episode: int = 0, run_seed: int = 0) -> list[EpisodeSeed]:
    return [EpisodeSeed(env_id=i, episode=episode, run_seed=run_seed) for i in range(count)]


def germinate(slot: str, blueprint: str, blend: str = "linear_fast", env_id: int = 0) -> ActionSpec:
    return ActionSpec(env_id=env_id, op=LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, blend=blend)


def act_on(op: LifecycleOp, slot: str, env_id: int = 0) -> ActionSpec:
    return ActionSpec(env_id=env_id, op=op, slot=slot)


def legal_specs(masks: ActionMasks, layout: HostLayout, env_id: int = 0) -> list[ActionSpec]:
    """Every spec the masks allow, written independently of any controller."""
    specs = [wait(env_id)]
    for op in OPS[1:]:
        for i, slot in enumerate(layout.slot_ids):
            if not (masks.op[op] and masks.slot_by_op[op][i]):
                continue
            if op is not LifecycleOp.GERMINATE:
                specs.append(act_on(op, slot, env_id))
                continue
            for j, blueprint in enumerate(layout.blueprints):
                for k, blend in enumerate(BLENDS):
                    if masks.blueprint_by_slot[i][j] and masks.blend[k]:
                        specs.append(germinate(slot, blueprint, blend, env_id))
    return specs


@dataclass(frozen=True, slots=True)
class Step:
    """One transition of one env."""

    before: EpochReport
    outcome: ActionOutcome
    after: EpochReport
    masks: ActionMasks


Chooser = Callable[[ActionExecutionResult, HostLayout], ActionSpec]


def random_chooser(rng: random.Random, op_weights: Sequence[float] = (2, 3, 4, 1, 3)) -> Chooser:
    """Plays legal ops, leaning towards those that make seeds live long enough to matter."""

    def choose(state: ActionExecutionResult, layout: HostLayout) -> ActionSpec:
        options = legal_specs(state.post_action_masks[0], layout, state.reports[0].env_id)
        ops = sorted({spec.op for spec in options})
        op = rng.choices(ops, [op_weights[o] for o in ops])[0]
        return rng.choice([spec for spec in options if spec.op is op])

    return choose


def script_chooser(entries: Sequence[tuple[int, ActionSpec]]) -> Chooser:
    """Plays the given spec at the given epoch and waits otherwise."""
    plan = dict(entries)
    assert len(plan) == len(entries), "one op per epoch"

    def choose(state: ActionExecutionResult, layout: HostLayout) -> ActionSpec:
        return plan.get(state.reports[0].epochs_done, wait(state.reports[0].env_id))

    return choose


def play(spec: SimulationSpec, choose: Chooser, seed: EpisodeSeed | None = None) -> list[Step]:
    """One episode of one env, up to its end."""
    worker = SimulatedWorker(spec)
    layout = spec.layout
    state = observe(worker.reset([seed or seeds(1)[0]]))
    steps = []
    while not state.reports[0].terminal:
        after = observe(worker.step([choose(state, layout)]))
        steps.append(
            Step(
                before=state.reports[0],
                outcome=after.outcomes[0],
                after=after.reports[0],
                masks=state.post_action_masks[0],
            )
        )
        state = after
    return steps


def run_policy(spec: SimulationSpec, policy: PolicyProtocol, starts: Sequence[EpisodeSeed]) -> list[list[Step]]:
    """One episode of every env under a controller; the transitions by env, up to each env's end."""
    worker = SimulatedWorker(spec)
    state = observe(worker.reset(starts))
    policy.begin(state)
    episodes: list[list[Step]] = [[] for _ in starts]
    for _ in range(spec.horizon):
        after = observe(worker.step(policy.act(state)))
        policy.store(state, after)
        for i, outcome in enumerate(after.outcomes):
            if outcome.applied:
                step = Step(
                    before=state.reports[i], outcome=outcome, after=after.reports[i], masks=state.post_action_masks[i]
                )
                episodes[i].append(step)
        state = after
    return episodes
