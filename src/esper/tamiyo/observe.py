"""Turns a worker's answer into all that a controller may know. Runs no host and decides nothing."""

from __future__ import annotations

from esper.leyline import ActionExecutionResult, HostLayout, LifecycleConfig, StepResult
from esper.tamiyo.masks import masks


def observe(result: StepResult, layout: HostLayout, config: LifecycleConfig) -> ActionExecutionResult:
    """Orders a worker's reports by env and adds the masks that follow from them."""
    env_ids = sorted(result.reports)
    reports = tuple(result.reports[env_id] for env_id in env_ids)
    return ActionExecutionResult(
        outcomes=tuple(result.outcomes[env_id] for env_id in env_ids) if result.outcomes else (),
        reports=reports,
        post_action_signals=tuple(report.signals for report in reports),
        post_action_slot_reports=tuple(report.slots for report in reports),
        post_action_masks=tuple(masks(report, layout, config) for report in reports),
        truncated_bootstrap_targets={},
    )
