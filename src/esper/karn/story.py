"""A run told in full, for reports: every round, update, episode, seed and warning, from one pass over the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from esper.karn.fold import ATTENTION, fold
from esper.karn.replay import BadLine, LogItem
from esper.karn.view import EMPTY, RunView
from esper.leyline import (
    BatchSummary,
    EpisodeCompleted,
    LoggedEvent,
    PPOUpdateCompleted,
    RunStarted,
    SeedEnded,
    SeedGerminated,
    SeedStage,
    SeedStageChanged,
    TelemetryEventType,
    record,
)


@record
class Stay:
    """A seed in one stage, from the end of one epoch to the end of another; epochs count inside the episode."""

    stage: str
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class SeedLife:
    """What became of one seed. Grows while the log is read."""

    env: int
    episode: int
    slot_id: str
    seed_id: str
    blueprint: str
    params: int
    fate: str
    contribution_pp: float | None
    stays: list[Stay]


@dataclass(slots=True, kw_only=True)
class Story:
    """Everything a report shows. Filled by `tell`."""

    view: RunView = EMPTY
    starts: list[RunStarted] = field(default_factory=list)
    rounds: list[tuple[int, BatchSummary]] = field(default_factory=list)
    updates: list[tuple[int, PPOUpdateCompleted]] = field(default_factory=list)
    episodes: list[tuple[int, EpisodeCompleted]] = field(default_factory=list)
    """With their rounds."""
    seeds: list[SeedLife] = field(default_factory=list)
    warnings: list[LoggedEvent] = field(default_factory=list)

    @property
    def epochs_per_episode(self) -> int | None:
        """None if the log has no beginning."""
        return self.starts[-1].epochs_per_episode if self.starts else None


def tell(items: Iterable[LogItem]) -> Story:
    """Reads a run from its first event to its last."""
    story = Story()
    alive: dict[tuple[int, str], SeedLife] = {}
    for item in items:
        story.view = fold(story.view, item)
        if isinstance(item, BadLine):
            continue
        if item.severity in ATTENTION:
            story.warnings.append(item)
        _add(story, alive, item)
    _end_log(story.view, alive.values())
    return story


def _add(story: Story, alive: dict[tuple[int, str], SeedLife], event: LoggedEvent) -> None:
    match event.data:
        case RunStarted() as data:
            story.starts.append(data)
        case BatchSummary() as data:
            story.rounds.append((_known(event.round), data))
        case PPOUpdateCompleted() as data:
            story.updates.append((_known(event.round), data))
        case EpisodeCompleted() as data:
            story.episodes.append((_known(event.round), data))
            _end_episode(alive, event, data)
        case SeedGerminated() as data:
            life = _born(event, data)
            story.seeds.append(life)
            alive[life.env, life.slot_id] = life
        case SeedStageChanged() as data:
            _move(alive, event, data.slot_id, data.to_stage)
        case SeedEnded() as data:
            _end(alive, event, data)


def _born(event: LoggedEvent, data: SeedGerminated) -> SeedLife:
    epoch = _known(event.epoch)
    return SeedLife(
        env=_known(event.env),
        episode=_known(event.episode),
        slot_id=data.slot_id,
        seed_id=data.seed_id,
        blueprint=data.blueprint,
        params=data.params,
        fate="alive",
        contribution_pp=None,
        stays=[Stay(stage=SeedStage.GERMINATED.name, start=epoch, stop=epoch)],
    )


def _move(alive: dict[tuple[int, str], SeedLife], event: LoggedEvent, slot_id: str, stage: str) -> SeedLife | None:
    """Ends the current stay and begins the next. Moves of an empty slot, as out of an embargo, have no seed."""
    life = alive.get((_known(event.env), slot_id))
    if life is not None:
        _close(life, _known(event.epoch))
        life.stays.append(Stay(stage=stage, start=_known(event.epoch), stop=_known(event.epoch)))
    return life


def _end(alive: dict[tuple[int, str], SeedLife], event: LoggedEvent, data: SeedEnded) -> None:
    fossil = event.type is TelemetryEventType.SEED_FOSSILIZED
    stage = SeedStage.FOSSILIZED if fossil else SeedStage.PRUNED
    life = _move(alive, event, data.slot_id, stage.name)
    if life is None:
        return
    life.fate, life.contribution_pp = stage.name.lower(), data.contribution_pp
    if not fossil:
        del alive[life.env, life.slot_id]


def _end_episode(alive: dict[tuple[int, str], SeedLife], event: LoggedEvent, data: EpisodeCompleted) -> None:
    """Fossils and living seeds stay in the network until the episode is over."""
    for key in [key for key in alive if key[0] == event.env]:
        _close(alive.pop(key), data.num_epochs)


def _end_log(view: RunView, alive: Iterable[SeedLife]) -> None:
    """An episode that is still going, or that a crash cut off: its seeds are where the newest epoch has them."""
    for life in alive:
        now = view.growth.envs.get(life.env)
        if now is not None and now.episode == life.episode:
            _close(life, _known(now.epoch) + 1)


def _close(life: SeedLife, epoch: int) -> None:
    last = life.stays[-1]
    life.stays[-1] = Stay(stage=last.stage, start=last.start, stop=max(epoch, last.start))


def _known(number: int | None) -> int:
    assert number is not None, "the event's scope promises this id"
    return number
