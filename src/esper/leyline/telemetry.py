"""Events: their names, what a producer says, and the one event of each lifecycle move. No encoding, no transport.

What each type carries is in the `*_payloads` modules, what is promised about it in `catalogue`.
"""

from __future__ import annotations

from enum import Enum

from esper.leyline.env_payloads import SeedEnded, SeedGerminated, SeedStageChanged
from esper.leyline.record import record
from esper.leyline.stages import SeedStage, SlotTransition


class TelemetryEventType(str, Enum):
    """Every kind of event a run can log."""

    RUN_STARTED = "RUN_STARTED"
    RUN_ENDED = "RUN_ENDED"
    ROUND_COMPLETED = "ROUND_COMPLETED"
    EPISODE_COMPLETED = "EPISODE_COMPLETED"
    EPOCH_COMPLETED = "EPOCH_COMPLETED"
    ACTION_TAKEN = "ACTION_TAKEN"
    SEED_GERMINATED = "SEED_GERMINATED"
    SEED_STAGE_CHANGED = "SEED_STAGE_CHANGED"
    GATE_EVALUATED = "GATE_EVALUATED"
    SEED_FOSSILIZED = "SEED_FOSSILIZED"
    SEED_PRUNED = "SEED_PRUNED"
    COALITION_MEASURED = "COALITION_MEASURED"
    GOVERNOR_STATE_CHANGED = "GOVERNOR_STATE_CHANGED"
    PPO_UPDATE_COMPLETED = "PPO_UPDATE_COMPLETED"
    ANOMALY_DETECTED = "ANOMALY_DETECTED"
    REWARD_HACKING_SUSPECTED = "REWARD_HACKING_SUSPECTED"
    TREND_DETECTED = "TREND_DETECTED"
    PROFILE_MEASURED = "PROFILE_MEASURED"
    CHOICE_STATS = "CHOICE_STATS"
    CHECKPOINT_RECORDED = "CHECKPOINT_RECORDED"
    WORKER_STATE_CHANGED = "WORKER_STATE_CHANGED"
    EVENTS_DROPPED = "EVENTS_DROPPED"


class Severity(str, Enum):
    """How urgently a person should look."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@record
class TelemetryEvent:
    """What a producer knows about an event. The hub adds run, attempt, sequence number and times."""

    type: TelemetryEventType
    severity: Severity
    round: int | None
    episode: int | None
    env: int | None
    epoch: int | None
    data: object
    """The payload: one frozen record per event type."""


def transition_event(
    move: SlotTransition, *, episode: int | None, env: int | None, epoch: int | None
) -> TelemetryEvent:
    """Turns one lifecycle move into its one event."""
    kind, payload = _payload(move)
    return TelemetryEvent(
        type=kind, severity=Severity.INFO, round=None, episode=episode, env=env, epoch=epoch, data=payload
    )


def _payload(move: SlotTransition) -> tuple[TelemetryEventType, SeedGerminated | SeedStageChanged | SeedEnded]:
    if move.target is SeedStage.GERMINATED:
        assert move.blueprint is not None
        assert move.blend is not None
        return TelemetryEventType.SEED_GERMINATED, SeedGerminated(
            seed_id=move.seed_id,
            slot_id=move.slot_id,
            blueprint=move.blueprint,
            blend=move.blend,
            params=move.params,
            initiator=move.cause,
        )
    if move.target in (SeedStage.FOSSILIZED, SeedStage.PRUNED):
        assert move.blueprint is not None
        fossil = move.target is SeedStage.FOSSILIZED
        kind = TelemetryEventType.SEED_FOSSILIZED if fossil else TelemetryEventType.SEED_PRUNED
        return kind, SeedEnded(
            seed_id=move.seed_id,
            slot_id=move.slot_id,
            blueprint=move.blueprint,
            params=move.params,
            from_stage=move.source.name,
            epochs_total=move.age_epochs,
            contribution_pp=move.contribution_pp,
            initiator=move.cause,
        )
    return TelemetryEventType.SEED_STAGE_CHANGED, SeedStageChanged(
        seed_id=move.seed_id,
        slot_id=move.slot_id,
        from_stage=move.source.name,
        to_stage=move.target.name,
        alpha_share=move.alpha,
        epochs_in_stage=move.epochs_in_stage,
        cause=move.cause,
    )
