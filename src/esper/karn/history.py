"""A run in full, for reports: every round, update, episode, seed and warning, from one pass over the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from esper.karn.replay import BadLine, LogItem
from esper.karn.view import ATTENTION, RunView, known
from esper.leyline import (
    BatchSummary,
    EpisodeCompleted,
    LoggedEvent,
    PPOUpdateCompleted,
    PPOUpdateMetrics,
    RunStarted,
    SeedEnded,
    SeedGerminated,
    SeedStage,
    SeedStageChanged,
    TelemetryEventType,
)


@dataclass(slots=True, kw_only=True)
class StageSpan:
    """A seed in one stage, from the end of one epoch to the end of another; epochs count inside the episode."""

    stage: str
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class SeedTimeline:
    """What became of one seed. Grows while the log is read."""

    env: int
    episode: int
    slot_id: str
    spans: list[StageSpan] = field(default_factory=list)

    def enter(self, stage: str, epoch: int) -> None:
        self.extend(epoch)
        self.spans.append(StageSpan(stage=stage, start=epoch, stop=epoch))

    def extend(self, epoch: int) -> None:
        """The seed is still in its last stage at this epoch."""
        if self.spans:
            self.spans[-1].stop = max(epoch, self.spans[-1].start)


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """Everything a report shows, read by `read_history`. Rounds, updates and episodes come with their round's index."""

    view: RunView = field(default_factory=RunView)
    starts: list[RunStarted] = field(default_factory=list)
    rounds: list[tuple[int, BatchSummary]] = field(default_factory=list)
    updates: list[tuple[int, PPOUpdateMetrics]] = field(default_factory=list)
    episodes: list[tuple[int, EpisodeCompleted]] = field(default_factory=list)
    seeds: list[SeedTimeline] = field(default_factory=list)
    warnings: list[LoggedEvent] = field(default_factory=list)


def read_history(items: Iterable[LogItem]) -> RunHistory:
    """Reads a run from its first event to its last."""
    history = RunHistory()
    planted: dict[tuple[int, str], SeedTimeline] = {}
    for item in items:
        history.view.add(item)
        if isinstance(item, BadLine):
            continue
        if item.severity in ATTENTION:
            history.warnings.append(item)
        _add(history, planted, item)
    for seed in planted.values():  # of an episode that is going on, or was cut off: they are at its newest epoch
        now = history.view.epochs.get(seed.env)
        if now is not None and now.event.episode == seed.episode:
            seed.extend(known(now.event.epoch) + 1)
    return history


def _add(history: RunHistory, planted: dict[tuple[int, str], SeedTimeline], event: LoggedEvent) -> None:
    """Takes one event. `planted` are the seeds in a network, fossils among them, by env and slot."""
    match event.data:
        case RunStarted() as data:
            history.starts.append(data)
        case BatchSummary() as data:
            history.rounds.append((known(event.round), data))
        case PPOUpdateCompleted() as data:
            history.updates.append((known(event.round), data.metrics))
        case EpisodeCompleted() as data:
            history.episodes.append((known(event.round), data))
            for key in [key for key in planted if key[0] == event.env]:
                planted.pop(key).extend(data.num_epochs)
        case SeedGerminated() as data:
            born = SeedTimeline(env=known(event.env), episode=known(event.episode), slot_id=data.slot_id)
            born.enter(SeedStage.GERMINATED.name, known(event.epoch))
            history.seeds.append(born)
            planted[born.env, born.slot_id] = born
        case SeedStageChanged() as data:
            seed = planted.get((known(event.env), data.slot_id))
            if seed is not None:  # a slot that leaves an embargo has none
                seed.enter(data.to_stage, known(event.epoch))
        case SeedEnded() as data:
            fossil = event.type is TelemetryEventType.SEED_FOSSILIZED
            key = (known(event.env), data.slot_id)
            seed = planted.get(key) if fossil else planted.pop(key, None)
            if seed is not None:
                seed.enter((SeedStage.FOSSILIZED if fossil else SeedStage.PRUNED).name, known(event.epoch))
