"""The state of a run as its events so far describe it: enough for every screen. No files, no clocks, no limits.

Resuming a run rewrites part of its past, so a reader that meets a new attempt starts again with an empty view; the
replay sees to it that only the events that count arrive here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from esper.karn.replay import BadLine, LogItem, PassedOver
from esper.leyline import (
    ActionTaken,
    AnomalyDetected,
    BatchSummary,
    CheckpointRecorded,
    EpochCompleted,
    EventsDropped,
    GovernorStateChanged,
    LoggedEvent,
    PPOUpdateCompleted,
    ProfileMeasured,
    RewardHackingSuspected,
    RunEnded,
    RunStarted,
    SeedEnded,
    SeedGerminated,
    Severity,
    TelemetryEventType,
    TrendDetected,
    WorkerStateChanged,
)
from esper.leyline.thresholds import RECENT_ROUNDS

NUM_WARNINGS = 8
"""Warnings that a view keeps, the newest ones."""
ATTENTION = frozenset({Severity.WARNING, Severity.ERROR, Severity.CRITICAL})
"""Severities that a person should see."""

Payload = TypeVar("Payload")


class Cited(NamedTuple, Generic[Payload]):
    """An event with its payload's type, so that a claim about it can be looked up in the log."""

    event: LoggedEvent
    data: Payload


@dataclass(slots=True, kw_only=True)
class BlueprintYield:
    """What became of the seeds of one blueprint."""

    num_germinated: int = 0
    num_fossilized: int = 0
    num_pruned: int = 0
    contributions_pp: list[float] = field(default_factory=list)
    """Of the fossils whose contribution was measured."""

    @property
    def mean_contribution_pp(self) -> float | None:
        return sum(self.contributions_pp) / len(self.contributions_pp) if self.contributions_pp else None


@dataclass(slots=True, kw_only=True)
class RunView:
    """Everything the operator's screens show about a run. `add` takes the items of its log in order."""

    run: str | None = None
    group: str | None = None
    attempt: int | None = None
    first_wall: float | None = None
    last_wall: float | None = None
    last_seq: int | None = None
    num_events: int = 0
    num_passed_over: int = 0
    """Of these, events about single steps of a long past, which were counted and not looked at."""
    num_missing: int = 0
    """Sequence numbers that no line has."""
    num_dropped: int = 0
    """Of these, the ones that the log itself reports as dropped."""
    first_bad: BadLine | None = None
    num_bad: int = 0
    write_failure: Cited[EventsDropped] | None = None

    started: RunStarted | None = None
    ended: Cited[RunEnded] | None = None
    round: int | None = None
    last_round: Cited[BatchSummary] | None = None
    trend: Cited[TrendDetected] | None = None
    accuracies_pct: list[float] = field(default_factory=list)
    """Mean over the envs, by completed round."""
    returns: list[float] = field(default_factory=list)
    """The same of the return."""

    epochs: dict[int, Cited[EpochCompleted]] = field(default_factory=dict)
    """The newest epoch of every env."""
    actions: dict[int, ActionTaken] = field(default_factory=dict)
    """The newest action in every env."""
    blueprints: dict[str, BlueprintYield] = field(default_factory=dict)

    num_updates: int = 0
    """Policy updates that took at least one step."""
    num_skipped_updates: int = 0
    """Updates skipped in a row, up to now."""
    last_update: Cited[PPOUpdateCompleted] | None = None

    alarms: dict[tuple[str, int | None], Cited[AnomalyDetected]] = field(default_factory=dict)
    """Open alarms by metric and env; None stands for the policy."""
    num_rollbacks: int = 0
    rollbacks: list[Cited[GovernorStateChanged]] = field(default_factory=list)
    """Of the recent rounds, newest last."""
    suspicions: dict[tuple[int, int], Cited[RewardHackingSuspected]] = field(default_factory=dict)
    """The worst of each suspected episode of the recent rounds, by round and env."""
    workers: dict[int, Cited[WorkerStateChanged]] = field(default_factory=dict)
    """The newest state of every worker that ever changed it."""
    warnings: deque[LoggedEvent] = field(default_factory=lambda: deque(maxlen=NUM_WARNINGS))
    """Of warning level or above, newest last; what a person should act on is in the verdict."""

    profile: Cited[ProfileMeasured] | None = None
    saved: Cited[CheckpointRecorded] | None = None
    save_failure: Cited[CheckpointRecorded] | None = None
    """The newest failed save, until one succeeds again."""

    def add(self, item: LogItem | PassedOver) -> None:
        if isinstance(item, BadLine):
            self.num_bad += 1
            self.first_bad = self.first_bad or item
            return
        self.num_missing += max(item.seq - (0 if self.last_seq is None else self.last_seq + 1), 0)
        if isinstance(item, PassedOver):
            self.num_events += item.last_seq + 1 - item.seq
            self.num_passed_over += item.last_seq + 1 - item.seq
            self.last_seq = item.last_seq
            return
        self.num_events += 1
        self.last_seq = item.seq
        self.run, self.group, self.attempt = item.run, item.group, item.attempt
        self.first_wall = item.wall if self.first_wall is None else self.first_wall
        self.last_wall = item.wall
        if item.severity in ATTENTION:
            self.warnings.append(item)
        self._apply(item)

    def _apply(self, event: LoggedEvent) -> None:
        match event.data:
            case EpochCompleted() as data:
                self.epochs[known(event.env)] = Cited(event, data)
                self.round = event.round
            case ActionTaken() as data:
                self.actions[known(event.env)] = data
            case SeedGerminated() as data:
                self.blueprints.setdefault(data.blueprint, BlueprintYield()).num_germinated += 1
            case SeedEnded() as data:
                self._end_seed(data, fossil=event.type is TelemetryEventType.SEED_FOSSILIZED)
            case BatchSummary() as data:
                self.round, self.last_round = event.round, Cited(event, data)
                self.accuracies_pct.append(data.accuracy_mean_pct)
                self.returns.append(data.return_mean)
            case PPOUpdateCompleted() as data:
                performed = data.metrics["performed"]
                self.num_updates += performed
                self.num_skipped_updates = 0 if performed else self.num_skipped_updates + 1
                self.last_update = Cited(event, data)
            case TrendDetected() as data:
                self.trend = Cited(event, data)
            case ProfileMeasured() as data:
                self.profile = Cited(event, data)
            case AnomalyDetected() as data:
                self.alarms.pop((data.metric, event.env), None)
                if data.state != "cleared":
                    self.alarms[data.metric, event.env] = Cited(event, data)
            case RewardHackingSuspected() as data:
                self._suspect(Cited(event, data))
            case GovernorStateChanged(rolled_back=True) as data:
                self.num_rollbacks += 1
                newest = known(event.round)
                self.rollbacks = [old for old in self.rollbacks if newest - known(old.event.round) < RECENT_ROUNDS]
                self.rollbacks.append(Cited(event, data))
            case WorkerStateChanged() as data:
                self.workers[data.worker_id] = Cited(event, data)
            case CheckpointRecorded(action="saved") as data:
                self.saved, self.save_failure = Cited(event, data), None
            case CheckpointRecorded(action="save_failed") as data:
                self.save_failure = Cited(event, data)
            case EventsDropped() as data:
                self.num_dropped += sum(data.counts.values())
                if data.reason == "write_failed":
                    self.write_failure = Cited(event, data)
            case RunStarted() as data:  # a resumed run is running again, with new workers
                self.started, self.ended, self.workers = data, None, {}
            case RunEnded() as data:
                self.ended = Cited(event, data)

    def _end_seed(self, data: SeedEnded, *, fossil: bool) -> None:
        grown = self.blueprints.setdefault(data.blueprint, BlueprintYield())
        if not fossil:
            grown.num_pruned += 1
            return
        grown.num_fossilized += 1
        if data.contribution_pp is not None:
            grown.contributions_pp.append(data.contribution_pp)

    def _suspect(self, cited: Cited[RewardHackingSuspected]) -> None:
        newest = known(cited.event.round)
        self.suspicions = {at: old for at, old in self.suspicions.items() if newest - at[0] < RECENT_ROUNDS}
        key = (newest, known(cited.event.env))
        before = self.suspicions.get(key)
        if (
            before is None
            or cited.event.severity is Severity.CRITICAL
            or before.event.severity is not Severity.CRITICAL
        ):
            self.suspicions[key] = cited


def known(number: int | None) -> int:
    """An id of an event that the event's scope promises."""
    assert number is not None, "the event's scope promises this id"
    return number
