"""What the governor's verdicts look like in the log. Lifecycle moves have their callback in env_factory."""

from __future__ import annotations

from dataclasses import fields

from esper.leyline import (
    GovernorState,
    GovernorStateChanged,
    LossCheck,
    Severity,
    TelemetryEvent,
    TelemetryEventType,
)
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tolaria.governor import Verdict

_SEVERITY = {
    GovernorState.HEALTHY: Severity.INFO,
    GovernorState.SUSPECT: Severity.WARNING,
    GovernorState.PANIC: Severity.CRITICAL,
}


def governor_event(env: ParallelEnvState, verdict: Verdict, restored_epoch: int | None) -> list[TelemetryEvent]:
    """The event of a change of mind or of a rollback; nothing if the governor thinks what it thought before."""
    rolled_back = verdict.state is GovernorState.PANIC
    state = env.reported_state(verdict)
    if state is env.state and not rolled_back:
        return []
    payload = GovernorStateChanged(
        from_state=env.state.value,
        to_state=state.value,
        reason=None if verdict.reason is None else verdict.reason.value,
        **{entry.name: getattr(verdict, entry.name) for entry in fields(LossCheck)},
        op=None if env.action is None else env.action.op.name,
        slot_id=None if env.action is None else env.action.slot,
        restored_epoch=restored_epoch,
        rolled_back=rolled_back,
        seeds_removed=env.seeds_removed if rolled_back else (),
    )
    return [
        TelemetryEvent(
            type=TelemetryEventType.GOVERNOR_STATE_CHANGED,
            severity=_SEVERITY[state],
            round=None,
            episode=env.episode,
            env=env.env_id,
            epoch=env.epoch,
            data=payload,
        )
    ]
