"""What a controller may know and do now: the only home of legality. Stage table, gates and budget in, masks out.

Knows no rewards and no network. A worker that receives anything these masks forbid has met a defect and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from esper.leyline import (
    BLENDS,
    OPERATORS,
    OPS,
    TRANSITIONS,
    ActionExecutionResult,
    ActionMasks,
    EpochReport,
    GateResult,
    GovernorState,
    HostLayout,
    LifecycleConfig,
    LifecycleOp,
    SeedStage,
    SlotReport,
    StepResult,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_prune,
)

SEED_GATES: Mapping[LifecycleOp, Callable[[SlotReport, LifecycleConfig], GateResult]] = {
    LifecycleOp.ADVANCE: gate_blend,
    LifecycleOp.PRUNE: gate_prune,
    LifecycleOp.FOSSILIZE: gate_fossilize,
}
"""The gate behind each op on a seed. GERMINATE asks G0 per blueprint instead, WAIT asks nothing."""

OPS_BY_STAGE: Mapping[SeedStage, frozenset[LifecycleOp]] = {
    stage: frozenset(move.op for move in TRANSITIONS.values() if move.source is stage and move.op is not None)
    for stage in SeedStage
}


def masks(report: EpochReport, layout: HostLayout, config: LifecycleConfig) -> ActionMasks:
    """The legal choices of one env, from the same report its observation is made of.

    A row is all False only where the op is masked or takes no slot (WAIT), so a legal op can always be completed.
    """
    assert tuple(slot.slot_id for slot in report.slots) == layout.slot_ids, "reports list slots in execution order"
    if report.terminal or report.governor_state is GovernorState.PANIC:
        return wait_only_masks(layout)
    blueprint_by_slot = tuple(_blueprints(report, slot, layout, config, "add") for slot in report.slots)
    # A gate costs parameters of its own, and the blend is chosen last: it is offered where any seed could have one.
    gated = tuple(_blueprints(report, slot, layout, config, "gate") for slot in report.slots)
    may_blend = {operator: operator != "gate" or gated == blueprint_by_slot for operator in OPERATORS}
    slot_by_op = tuple(_slots(op, report, blueprint_by_slot, config) for op in OPS)
    can_germinate = any(slot_by_op[LifecycleOp.GERMINATE])
    return ActionMasks(
        op=tuple(op is LifecycleOp.WAIT or any(slot_by_op[op]) for op in OPS),
        slot_by_op=slot_by_op,
        blueprint_by_slot=blueprint_by_slot,
        blend=tuple(can_germinate and may_blend[blend.operator] for blend in BLENDS.values()),
    )


def wait_only_masks(layout: HostLayout) -> ActionMasks:
    """Nothing but waiting is legal."""
    no_slot = (False,) * len(layout.slots)
    return ActionMasks(
        op=tuple(op is LifecycleOp.WAIT for op in OPS),
        slot_by_op=(no_slot,) * len(OPS),
        blueprint_by_slot=((False,) * len(layout.blueprints),) * len(layout.slots),
        blend=(False,) * len(BLENDS),
    )


def _blueprints(
    report: EpochReport, slot: SlotReport, layout: HostLayout, config: LifecycleConfig, operator: str
) -> tuple[bool, ...]:
    if LifecycleOp.GERMINATE not in OPS_BY_STAGE[slot.stage]:
        return (False,) * len(layout.blueprints)
    live, params = report.num_live, report.total_params
    cards = layout.cards[layout.slot_position(slot.slot_id)]
    # Most cards are of other topologies; asking the gate about them would be most of the work of a step here.
    return tuple(
        card.fits and gate_germinate(slot.stage, card, operator, live, params, config).passed for card in cards
    )


def _slots(
    op: LifecycleOp,
    report: EpochReport,
    blueprint_by_slot: tuple[tuple[bool, ...], ...],
    config: LifecycleConfig,
) -> tuple[bool, ...]:
    if op is LifecycleOp.WAIT:
        return (False,) * len(report.slots)
    if op is LifecycleOp.GERMINATE:
        return tuple(any(row) for row in blueprint_by_slot)
    gate = SEED_GATES[op]
    return tuple(op in OPS_BY_STAGE[slot.stage] and gate(slot, config).passed for slot in report.slots)


def observe(result: StepResult) -> ActionExecutionResult:
    """Orders a worker's reports by env and adds the masks that follow from them."""
    env_ids = sorted(result.reports)
    reports = tuple(result.reports[env_id] for env_id in env_ids)
    contexts = tuple(result.contexts[env_id] for env_id in env_ids)
    return ActionExecutionResult(
        outcomes=tuple(result.outcomes[env_id] for env_id in env_ids) if result.outcomes else (),
        reports=reports,
        contexts=contexts,
        post_action_masks=tuple(
            masks(report, context.layout, context.lifecycle) for report, context in zip(reports, contexts, strict=True)
        ),
        truncated_bootstrap_targets={},
    )
