"""Events: their names, their envelope, and the facts a growing model reports. No encoding, no transport."""

from __future__ import annotations

from enum import Enum

from esper.leyline.record import record
from esper.leyline.stages import Cause, SeedStage, SlotTransition


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


@record
class SeedGerminated:
    """A seed was planted."""

    seed_id: str
    slot_id: str
    blueprint: str
    blend: str
    params: int
    initiator: Cause


@record
class SeedStageChanged:
    """A seed moved; births, fossils and prunes have events of their own."""

    seed_id: str
    slot_id: str
    from_stage: SeedStage
    to_stage: SeedStage
    alpha_share: float
    epochs_in_stage: int
    cause: Cause


@record
class SeedEnded:
    """A seed was kept for good or removed: the payload of SEED_FOSSILIZED and SEED_PRUNED."""

    seed_id: str
    slot_id: str
    blueprint: str
    params: int
    epochs_total: int
    contribution_pp: float | None
    initiator: Cause


@record
class GovernorStateChanged:
    """The governor changed its mind about a host, or set it back."""

    from_state: str
    to_state: str
    """A GovernorState value."""
    reason: str | None
    """A RollbackReason value; None on the way back to healthy."""
    value: float
    """The validation loss that was judged. After a rollback this event is the only place that has it."""
    limit: float | None
    median: float | None
    spread: float | None
    num_consecutive: int
    first_epoch: int | None
    """Where the trouble began: the first suspect epoch of the streak."""
    restored_epoch: int | None
    """Epoch whose end the host was set back to; None if it was not set back or went back to the untrained host."""
    rolled_back: bool


@record
class WorkerStateChanged:
    """A worker was lost, came back by replay, or was given up for the round."""

    worker_id: int
    kind: str
    state: str
    """"lost", "recovered" or "abandoned"."""
    env_ids: tuple[int, ...]
    exit_code: int | None
    error: str
    num_epochs_replayed: int
    downtime_ms: float


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
            epochs_total=move.age_epochs,
            contribution_pp=move.contribution_pp,
            initiator=move.cause,
        )
    return TelemetryEventType.SEED_STAGE_CHANGED, SeedStageChanged(
        seed_id=move.seed_id,
        slot_id=move.slot_id,
        from_stage=move.source,
        to_stage=move.target,
        alpha_share=move.alpha,
        epochs_in_stage=move.epochs_in_stage,
        cause=move.cause,
    )
