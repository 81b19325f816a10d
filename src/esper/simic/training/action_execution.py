"""From a choice to its consequences: naming it, having it carried out by workers, and carrying it out in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from esper.kasmina import apply_op, begin_epoch, resolve_target_slot
from esper.leyline import (
    BLENDS,
    HEAD_NAMES,
    OPS,
    ActionExecutionResult,
    ActionOutcome,
    ActionSpec,
    EpisodeSeed,
    FeatureContext,
    HostLayout,
    LifecycleOp,
    SlotConfig,
    StepResult,
    TelemetryEventType,
    heads_used_by,
    lr_factor,
)
from esper.simic.agent.types import ActionDict
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tamiyo.masks import observe


class EnvPool(Protocol):
    """Workers, as seen by whoever plays in their envs."""

    wanted: frozenset[TelemetryEventType]
    gradient_detail_envs: frozenset[int]
    """What steps are to report for the log: events, and envs whose gradients are described tensor by tensor."""

    @property
    def context(self) -> FeatureContext:
        """What all hosts look like, where there is one task; every state says it of each env."""

    @property
    def lost_envs(self) -> frozenset[int]:
        """Envs whose episode of this round was given up with their worker."""

    def reset(self, seeds: Sequence[EpisodeSeed]) -> StepResult:
        """Starts one episode per seed."""

    def step(self, specs: Sequence[ActionSpec]) -> StepResult:
        """One op and one epoch in every env."""


# ---- in the parent


def parse_sampled_action(env_id: int, action: ActionDict, layout: HostLayout) -> ActionSpec:
    """Names a sampled choice: one index per head becomes op, slot, blueprint and blend. Unused heads are dropped.

    Raises:
        ValueError: An index is outside its table.
    """
    op = OPS[_inside("op", action["op"], len(OPS))]
    used = heads_used_by(op)
    slot = blueprint = blend = None
    if "slot" in used:
        config = SlotConfig(slot_ids=layout.slot_ids)
        slot, _ = resolve_target_slot(action["slot"], enabled_slots=layout.slot_ids, slot_config=config)
    if "blueprint" in used:
        blueprint = layout.blueprints[_inside("blueprint", action["blueprint"], len(layout.blueprints))]
    if "blend" in used:
        blend = tuple(BLENDS)[_inside("blend", action["blend"], len(BLENDS))]
    return ActionSpec(env_id=env_id, op=op, slot=slot, blueprint=blueprint, blend=blend)


def action_indices(spec: ActionSpec, layout: HostLayout) -> list[int]:
    """The other way round: one index per head in storage order; 0 for heads that the op does not use."""
    tables: dict[str, Sequence[object]] = {
        "op": OPS,
        "slot": layout.slot_ids,
        "blueprint": layout.blueprints,
        "blend": tuple(BLENDS),
    }
    chosen = {head: getattr(spec, head) for head in HEAD_NAMES}
    return [0 if chosen[head] is None else tables[head].index(chosen[head]) for head in HEAD_NAMES]


def _inside(head: str, index: int, size: int) -> int:
    if not 0 <= index < size:
        raise ValueError(f"index of head {head!r} must be in 0..{size - 1}, got {index}")
    return index


def execute_actions(pool: EnvPool, specs: Sequence[ActionSpec]) -> ActionExecutionResult:
    """Carries out one op per env, trains an epoch, and returns all that a controller may know afterwards."""
    result = observe(pool.step(specs))
    return replace(result, truncated_bootstrap_targets=dict.fromkeys(sorted(pool.lost_envs)))


def observe_reset(pool: EnvPool, seeds: Sequence[EpisodeSeed]) -> ActionExecutionResult:
    """Starts one episode per seed and returns their first state."""
    return observe(pool.reset(seeds))


# ---- in a worker


def apply_action(env: ParallelEnvState, spec: ActionSpec) -> ActionOutcome:
    """Carries out one op and begins the epoch: new seeds start to train, ramps move on, the learning rate is set.

    Raises:
        IllegalOperation: A gate refuses; masks rule that out, so it is a defect.
    """
    assert env.epoch is not None
    env.rollback_reason = None
    move = apply_op(env.model, spec, env.seed.derive(env.epoch, f"seed:{spec.slot}"))
    if move is not None:
        env.note_move(move)
    automatic = begin_epoch(env.model)
    for started in automatic:
        env.note_move(started)
    if move is not None or automatic:
        assert env.optimizer.holds(env.model.parameters()), "the optimizer must hold exactly the model's parameters"
    if spec.op is LifecycleOp.FOSSILIZE:
        env.governor.note_fossilization()
    _set_learning_rates(env, env.epoch)
    return ActionOutcome(env_id=env.env_id, op=spec.op, slot=spec.slot, applied=True)


def _set_learning_rates(env: ParallelEnvState, epoch: int) -> None:
    """The rate of a seed falls from its birth on, and reaches the end of the schedule with the host's.

    A seed that comes late would otherwise learn at what is left of the host's rate.
    """
    task = env.recipe.task
    schedule, horizon = task.optimizer.schedule, task.horizon
    seeds = {
        slot.spec.slot_id: lr_factor(schedule, slot.age_epochs, horizon - (epoch - slot.age_epochs))
        for slot in env.model.all_slots()
        if slot.stage.has_seed
    }
    env.optimizer.set_lr_factor(lr_factor(schedule, epoch, horizon), seeds)
