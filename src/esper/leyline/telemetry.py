"""Events: their types, what each carries, which ids it needs, and whether it may be lost. No encoding, no transport.

What a payload consists of is in the `*_payloads` modules. The version covers all types: renaming or removing a field or
changing a meaning raises it, a new optional field does not. Readers ignore unknown fields and refuse another version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum, IntEnum
from typing import Any

from esper.leyline.env_payloads import (
    ActionTaken,
    CoalitionMeasured,
    EpisodeCompleted,
    EpochCompleted,
    GateEvaluated,
    GovernorStateChanged,
    RewardHackingSuspected,
    SeedEnded,
    SeedGerminated,
    SeedMoved,
    SeedStageChanged,
)
from esper.leyline.policy_payloads import AnomalyDetected, PPOUpdateCompleted
from esper.leyline.record import record
from esper.leyline.run_payloads import (
    BatchSummary,
    CheckpointRecorded,
    ChoiceStats,
    EventsDropped,
    ProfileMeasured,
    RunEnded,
    RunStarted,
    TrendDetected,
    WorkerStateChanged,
)
from esper.leyline.stages import SeedStage, SlotTransition

SCHEMA_VERSION = 2


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
class EventHead:
    """What an event is about."""

    type: TelemetryEventType
    severity: Severity
    round: int | None
    episode: int | None
    env: int | None
    epoch: int | None


@record
class TelemetryEvent(EventHead):
    """What a producer knows about an event. The hub adds run, attempt, sequence number and times."""

    data: object
    """The payload: one frozen record per event type."""


class TelemetryLevel(IntEnum):
    """How much a run logs. It never reaches training."""

    OFF = 0
    MINIMAL = 1
    NORMAL = 2
    DEBUG = 3


class Scope(str, Enum):
    """Which ids an event must carry; the others must be absent."""

    RUN = "run"
    ROUND = "round"
    ENV = "env"
    """round, episode, env and epoch."""
    ROUND_OR_ENV = "round/env"
    """All four, or the round alone."""


@record
class EventSpec:
    """What is promised about one type."""

    payload: type
    scope: Scope
    must: bool
    """Never dropped. Types that can carry severity error or critical are."""
    training_fact: bool
    """Equal in equal runs, whatever the machine, the workers or the restarts; timing fields apart."""
    level: TelemetryLevel
    """The lowest level that logs it."""


def _spec(
    payload: type, scope: Scope, *, must: bool = True, fact: bool = True, level: TelemetryLevel = TelemetryLevel.MINIMAL
) -> EventSpec:
    return EventSpec(payload=payload, scope=scope, must=must, training_fact=fact, level=level)


_T = TelemetryEventType
_NORMAL = TelemetryLevel.NORMAL

EVENTS: dict[TelemetryEventType, EventSpec] = {
    _T.RUN_STARTED: _spec(RunStarted, Scope.RUN, fact=False),
    _T.RUN_ENDED: _spec(RunEnded, Scope.RUN, fact=False),
    _T.ROUND_COMPLETED: _spec(BatchSummary, Scope.ROUND),
    _T.EPISODE_COMPLETED: _spec(EpisodeCompleted, Scope.ENV),
    _T.EPOCH_COMPLETED: _spec(EpochCompleted, Scope.ENV, must=False, level=_NORMAL),
    _T.ACTION_TAKEN: _spec(ActionTaken, Scope.ENV, must=False, level=_NORMAL),
    _T.SEED_GERMINATED: _spec(SeedGerminated, Scope.ENV),
    _T.SEED_STAGE_CHANGED: _spec(SeedStageChanged, Scope.ENV),
    _T.GATE_EVALUATED: _spec(GateEvaluated, Scope.ENV, must=False, level=_NORMAL),
    _T.SEED_FOSSILIZED: _spec(SeedEnded, Scope.ENV),
    _T.SEED_PRUNED: _spec(SeedEnded, Scope.ENV),
    _T.COALITION_MEASURED: _spec(CoalitionMeasured, Scope.ENV, must=False, level=_NORMAL),
    _T.GOVERNOR_STATE_CHANGED: _spec(GovernorStateChanged, Scope.ENV),
    _T.PPO_UPDATE_COMPLETED: _spec(PPOUpdateCompleted, Scope.ROUND),
    _T.ANOMALY_DETECTED: _spec(AnomalyDetected, Scope.ROUND_OR_ENV),
    _T.REWARD_HACKING_SUSPECTED: _spec(RewardHackingSuspected, Scope.ENV),
    _T.TREND_DETECTED: _spec(TrendDetected, Scope.ROUND, must=False),
    _T.PROFILE_MEASURED: _spec(ProfileMeasured, Scope.ROUND, must=False, fact=False),
    _T.CHOICE_STATS: _spec(ChoiceStats, Scope.ROUND, must=False),
    _T.CHECKPOINT_RECORDED: _spec(CheckpointRecorded, Scope.RUN, fact=False),
    _T.WORKER_STATE_CHANGED: _spec(WorkerStateChanged, Scope.RUN, fact=False),
    _T.EVENTS_DROPPED: _spec(EventsDropped, Scope.RUN, fact=False),
}

TIMING_SUFFIXES: tuple[str, ...] = ("_ms", "_s")
"""Payload fields with these endings are times of the machine, no training facts."""

_IDS: tuple[str, ...] = ("round", "episode", "env", "epoch")
_NONE, _ROUND, _ALL = (False,) * 4, (True, False, False, False), (True,) * 4
SCOPE_IDS: dict[Scope, tuple[tuple[bool, ...], ...]] = {
    Scope.RUN: (_NONE,),
    Scope.ROUND: (_ROUND,),
    Scope.ENV: (_ALL,),
    Scope.ROUND_OR_ENV: (_ALL, _ROUND),
}
"""Which of round, episode, env and epoch an event of a scope has."""


@record
class LoggedEvent(EventHead):
    """One line of the log: an event with everything the hub adds. Field order is the order of keys in the file."""

    v: int
    run: str
    attempt: int
    """Which start of the run wrote the line: 0 first, +1 per resume."""
    seq: int
    """Position in the run, +1 per accepted or dropped event, so a missing number is a lost event."""
    wall: float
    """Unix seconds when the event was accepted. For people and joins across runs, never for durations."""
    mono: float
    """Seconds since this attempt began. Comparable only within one attempt."""
    group: str
    """The cohort of the run. One run directory holds one group."""
    data: object


def make_event(
    kind: TelemetryEventType,
    data: object,
    severity: Severity = Severity.INFO,
    *,
    round: int | None = None,
    episode: int | None = None,
    env: int | None = None,
    epoch: int | None = None,
) -> TelemetryEvent:
    """An event with the ids that are given."""
    return TelemetryEvent(type=kind, severity=severity, round=round, episode=episode, env=env, epoch=epoch, data=data)


def check_event(event: TelemetryEvent) -> None:
    """Holds an event against the catalogue.

    Raises:
        ValueError: The payload is of another type, or an id is missing or out of place.
    """
    spec = EVENTS[event.type]
    if type(event.data) is not spec.payload:
        raise ValueError(f"{event.type.value} carries a {spec.payload.__name__}, got a {type(event.data).__name__}")
    given = (event.round is not None, event.episode is not None, event.env is not None, event.epoch is not None)
    if given not in SCOPE_IDS[spec.scope]:
        wanted = " or ".join(_names(ids) for ids in SCOPE_IDS[spec.scope])
        raise ValueError(f"{event.type.value} needs {wanted}; got {_names(given)}")


def _names(ids: tuple[bool, ...]) -> str:
    return ", ".join(name for name, there in zip(_IDS, ids, strict=True) if there) or "no ids"


def fill_ids(event: TelemetryEvent, *, round: int, episode: int, env: int, epoch: int) -> TelemetryEvent:
    """The event with its ids filled in.

    Raises:
        ValueError: An id is already set to another value.
    """
    wanted = {"round": round, "episode": episode, "env": env, "epoch": epoch}
    for name, value in wanted.items():
        have = getattr(event, name)
        if have is not None and have != value:
            raise ValueError(f"{event.type.value} already has {name} {have}, which is not {value}")
    return replace(event, round=round, episode=episode, env=env, epoch=epoch)


def transition_event(
    move: SlotTransition, *, episode: int | None, env: int | None, epoch: int | None
) -> TelemetryEvent:
    """Turns one lifecycle move into its one event."""
    payload: type[SeedMoved]
    renamed: dict[str, Any]
    if move.target is SeedStage.GERMINATED:
        kind, payload, renamed = _T.SEED_GERMINATED, SeedGerminated, {}
    elif move.target in (SeedStage.FOSSILIZED, SeedStage.PRUNED):
        kind, payload = TelemetryEventType[f"SEED_{move.target.name}"], SeedEnded
        renamed = {"from_stage": move.source.name, "epochs_total": move.age_epochs}
    else:
        kind, payload = _T.SEED_STAGE_CHANGED, SeedStageChanged
        renamed = {"from_stage": move.source.name, "to_stage": move.target.name, "alpha_share": move.alpha}
    same = {entry.name: getattr(move, entry.name) for entry in fields(payload) if entry.name not in renamed}
    return make_event(kind, payload(**same, **renamed), episode=episode, env=env, epoch=epoch)


def join_path(parts: Sequence[str | int]) -> str:
    """Writes a path into a payload as a JSON Pointer (RFC 6901): ("heads", "op", "kl") becomes "/heads/op/kl"."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def split_path(path: str) -> tuple[str, ...]:
    """Reads a path that `join_path` wrote. List positions come back as digits."""
    assert path.startswith("/"), f"not a path: {path!r}"
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/"))
