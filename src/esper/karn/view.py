"""A run as six small records, enough for every operator's screen. No files, no clocks, no limits, no drawing.

`fold` makes them from events, `verdict` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from esper.karn.replay import BadLine
from esper.leyline import (
    ActionTaken,
    AnomalyDetected,
    BatchSummary,
    CheckpointRecorded,
    ChoiceStats,
    EpochCompleted,
    EventsDropped,
    GovernorStateChanged,
    LoggedEvent,
    PPOUpdateCompleted,
    ProfileMeasured,
    RewardHackingSuspected,
    RunEnded,
    RunStarted,
    Severity,
    TrendDetected,
    WorkerStateChanged,
)

MAX_POINTS = 512
"""Points of a history; beyond this length every second one is dropped."""

P = TypeVar("P")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen record that is cheap to copy with changes: a fold makes several of them per event."""


class History(Part, Generic[P], frozen=True, kw_only=True):
    """A curve of any length in bounded memory: every `stride`-th point of those seen."""

    points: tuple[P, ...]
    stride: int
    num_seen: int

    def add(self, point: P) -> History[P]:
        """The history with one more point, thinned if it is full."""
        points, stride = self.points, self.stride
        if self.num_seen % stride == 0:
            points = (*points, point)
            if len(points) > MAX_POINTS:
                points, stride = points[::2], stride * 2
        return History(points=points, stride=stride, num_seen=self.num_seen + 1)


class Cited(Part, Generic[P], frozen=True, kw_only=True):
    """A payload with its place in the log, so that a claim about it can be looked up."""

    seq: int
    round: int | None
    env: int | None
    epoch: int | None
    severity: Severity
    data: P


class Log(Part, frozen=True, kw_only=True):
    """How much of the run's record is there."""

    run: str | None
    group: str | None
    attempt: int | None
    first_wall: float | None
    last_wall: float | None
    last_seq: int | None
    num_events: int
    num_missing: int
    """Sequence numbers that no line has."""
    num_dropped: int
    """Of these, the ones that the log itself reports as dropped."""
    first_bad: BadLine | None
    num_bad: int
    write_failure: Cited[EventsDropped] | None
    problems: tuple[str, ...]
    """What a check of the files found damaged; empty where nothing was found, or no check was made."""


class Progress(Part, frozen=True, kw_only=True):
    """How far the run is."""

    started: RunStarted | None
    ended: Cited[RunEnded] | None
    round: int | None
    epoch: int | None
    last_round: Cited[BatchSummary] | None
    trend: Cited[TrendDetected] | None
    rounds: History[tuple[int, BatchSummary]]


class BlueprintYield(Part, frozen=True, kw_only=True):
    """What became of the seeds of one blueprint."""

    num_germinated: int
    num_fossilized: int
    num_pruned: int
    sum_contribution_pp: float
    """Over the fossils whose contribution was measured."""
    num_measured: int


class EnvNow(Part, frozen=True, kw_only=True):
    """One env at its newest epoch."""

    seq: int
    episode: int | None
    epoch: int | None
    state: EpochCompleted
    last_action: ActionTaken | None


class Growth(Part, frozen=True, kw_only=True):
    """What grows where, and what came of it."""

    envs: Mapping[int, EnvNow]
    blueprints: Mapping[str, BlueprintYield]


class Policy(Part, frozen=True, kw_only=True):
    """The learner."""

    num_updates: int
    """Updates that took at least one step."""
    num_skipped: int
    """Updates skipped in a row, up to now."""
    last: Cited[PPOUpdateCompleted] | None
    updates: History[tuple[int, PPOUpdateCompleted]]
    choices: Mapping[str, ChoiceStats]
    """The newest counts, by head."""


class Safety(Part, frozen=True, kw_only=True):
    """What went wrong, and what is still wrong."""

    alarms: Mapping[tuple[str, int | None], Cited[AnomalyDetected]]
    """Open alarms by metric and env; None stands for the policy."""
    num_rollbacks: int
    last_rollback: Cited[GovernorStateChanged] | None
    suspicions: Mapping[tuple[int, int], Cited[RewardHackingSuspected]]
    """The worst of each suspected episode of the recent rounds, by round and env."""
    workers: Mapping[int, Cited[WorkerStateChanged]]
    """The newest state of every worker that ever changed it."""
    notes: tuple[LoggedEvent, ...]
    """Everything a person should have seen, newest last."""


class Machine(Part, frozen=True, kw_only=True):
    """Checkpoints, time and memory."""

    profile: Cited[ProfileMeasured] | None
    saved: Cited[CheckpointRecorded] | None
    save_failure: Cited[CheckpointRecorded] | None
    """The newest failed save, until one succeeds again."""


class RunView(Part, frozen=True, kw_only=True):
    """Everything the operator's screens show about a run."""

    log: Log
    progress: Progress
    growth: Growth
    policy: Policy
    safety: Safety
    machine: Machine


EMPTY = RunView(
    log=Log(
        run=None,
        group=None,
        attempt=None,
        first_wall=None,
        last_wall=None,
        last_seq=None,
        num_events=0,
        num_missing=0,
        num_dropped=0,
        first_bad=None,
        num_bad=0,
        write_failure=None,
        problems=(),
    ),
    progress=Progress(
        started=None,
        ended=None,
        round=None,
        epoch=None,
        last_round=None,
        trend=None,
        rounds=History(points=(), stride=1, num_seen=0),
    ),
    growth=Growth(envs={}, blueprints={}),
    policy=Policy(
        num_updates=0, num_skipped=0, last=None, updates=History(points=(), stride=1, num_seen=0), choices={}
    ),
    safety=Safety(alarms={}, num_rollbacks=0, last_rollback=None, suspicions={}, workers={}, notes=()),
    machine=Machine(profile=None, saved=None, save_failure=None),
)
