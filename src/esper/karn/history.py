"""A run in full, for reports: every round, update, episode, seed and warning, from one pass over the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from esper.karn.replay import BadLine, LogItem, PassedOver
from esper.karn.view import ATTENTION, RunView, known
from esper.leyline import (
    BatchSummary,
    EpisodeCompleted,
    EpochCompleted,
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
    birth: SeedGerminated
    spans: list[StageSpan] = field(default_factory=list)
    contribution_pp: float | None = None
    """As measured last, by the log of epochs or where it ended; None if it never was."""

    def enter(self, stage: str, epoch: int) -> None:
        self.extend(epoch)
        self.spans.append(StageSpan(stage=stage, start=epoch, stop=epoch))

    def extend(self, epoch: int) -> None:
        """The seed is still in its last stage at this epoch."""
        if self.spans:
            self.spans[-1].stop = max(epoch, self.spans[-1].start)


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """Everything a report shows; `add` takes the items of a log in order.

    Rounds, updates and episodes come with their round's index.
    """

    view: RunView = field(default_factory=RunView)
    starts: list[RunStarted] = field(default_factory=list)
    rounds: list[tuple[int, BatchSummary]] = field(default_factory=list)
    updates: list[tuple[int, PPOUpdateMetrics]] = field(default_factory=list)
    episodes: list[tuple[int, EpisodeCompleted]] = field(default_factory=list)
    seeds: list[SeedTimeline] = field(default_factory=list)
    warnings: list[LoggedEvent] = field(default_factory=list)
    planted: dict[int, dict[str, SeedTimeline]] = field(default_factory=dict)
    """The seeds that are in a network now, fossils among them, by env and slot."""

    def add(self, item: LogItem | PassedOver) -> None:
        self.view.add(item)
        if isinstance(item, PassedOver):  # moves of the seeds so far may be among these
            self.seeds.clear()
            self.planted.clear()
        if isinstance(item, BadLine | PassedOver):
            return
        if item.severity in ATTENTION:
            self.warnings.append(item)
        match item.data:
            case EpochCompleted() as data:
                self._note_epoch(item, data)
            case RunStarted() as data:
                self.starts.append(data)
            case BatchSummary() as data:
                self.rounds.append((known(item.round), data))
            case PPOUpdateCompleted() as data:
                self.updates.append((known(item.round), data.metrics))
            case EpisodeCompleted() as data:
                self.episodes.append((known(item.round), data))
                for seed in self.planted.pop(known(item.env), {}).values():
                    seed.extend(data.num_epochs)
            case SeedGerminated() as data:
                self._plant(item, data)
            case SeedStageChanged() as data:
                self._move(item, data.slot_id, data.to_stage)
            case SeedEnded() as data:
                self._end(item, data)

    def _note_epoch(self, event: LoggedEvent, data: EpochCompleted) -> None:
        for slot_id, seed in self.planted.get(known(event.env), {}).items():
            if seed.episode == event.episode:
                seed.extend(known(event.epoch) + 1)
            if slot_id in data.slots and data.slots[slot_id].contribution_pp is not None:
                seed.contribution_pp = data.slots[slot_id].contribution_pp

    def _plant(self, event: LoggedEvent, data: SeedGerminated) -> None:
        born = SeedTimeline(env=known(event.env), episode=known(event.episode), birth=data)
        born.enter(SeedStage.GERMINATED.name, known(event.epoch))
        self.seeds.append(born)
        self.planted.setdefault(born.env, {})[data.slot_id] = born

    def _move(self, event: LoggedEvent, slot_id: str, stage: str) -> SeedTimeline | None:
        """The seed of a slot enters a stage; a slot that leaves an embargo has none."""
        seed = self.planted.get(known(event.env), {}).get(slot_id)
        if seed is not None:
            seed.enter(stage, known(event.epoch))
        return seed

    def _end(self, event: LoggedEvent, data: SeedEnded) -> None:
        fossil = event.type is TelemetryEventType.SEED_FOSSILIZED
        seed = self._move(event, data.slot_id, (SeedStage.FOSSILIZED if fossil else SeedStage.PRUNED).name)
        if seed is None:
            return
        if data.contribution_pp is not None:
            seed.contribution_pp = data.contribution_pp
        if not fossil:
            del self.planted[seed.env][data.slot_id]


def read_history(items: Iterable[LogItem]) -> RunHistory:
    """Reads a run from its first event to its last."""
    history = RunHistory()
    for item in items:
        history.add(item)
    return history
