"""A declared list of ops, played as written: the plainest baseline, and the script of experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.leyline import TRANSITIONS, Action, ActionSpec, HostLayout, LifecycleOp, SeedStage, record
from esper.tamiyo.controller import Controller, Setting, Situation, check_names


@record
class ScheduleEntry(Action):
    """One op at one epoch. Waiting needs no entry."""

    epoch: int
    slot: str


@dataclass(slots=True)
class ScheduleProgress:
    """How far one env's episode followed the schedule."""

    pending: list[int] = field(default_factory=list)
    """Positions of entries not played yet, in order. What is left at the end was skipped."""
    delays: dict[int, int] = field(default_factory=dict)
    """Position -> epochs by which an entry was late, for every entry played."""


class ScheduleController(Controller[ScheduleProgress]):
    """Plays each entry at its epoch. One whose gate is closed is tried again every epoch, and its delay is noted.

    Args:
        setting: The hosts.
        entries: The ops to play, in order of epochs.
    """

    memory_type = ScheduleProgress

    def __init__(self, setting: Setting, entries: Sequence[ScheduleEntry]) -> None:
        super().__init__(setting)
        check_schedule(entries, setting.layout)
        self.entries = tuple(entries)

    def start(self, situation: Situation) -> ScheduleProgress:
        """Every env plays the whole list."""
        horizon = situation.report.signals.horizon
        for entry in self.entries:
            if entry.epoch >= horizon:
                raise ValueError(f"schedule entry at epoch {entry.epoch} lies beyond the horizon of {horizon} epochs")
        return ScheduleProgress(pending=list(range(len(self.entries))))

    def load_memory(self, saved: dict[str, Any]) -> ScheduleProgress:
        """JSON has turned positions into text; they become numbers again."""
        delays = {int(position): delay for position, delay in saved["delays"].items()}
        return ScheduleProgress(pending=saved["pending"], delays=delays)

    def decide(self, situation: Situation) -> ActionSpec:
        """The first due entry that is legal. In each slot the written order holds, also when entries are late."""
        progress = self.memory[situation.report.env_id]
        epoch = situation.report.epochs_done
        blocked: set[str] = set()
        for position in progress.pending:
            entry = self.entries[position]
            if entry.epoch > epoch:
                break
            if entry.slot not in blocked and (spec := _legal_spec(situation, entry)) is not None:
                progress.pending.remove(position)
                progress.delays[position] = epoch - entry.epoch
                return spec
            blocked.add(entry.slot)
        return situation.wait()


def _legal_spec(situation: Situation, entry: ScheduleEntry) -> ActionSpec | None:
    if entry.slot not in situation.legal_slots(entry.op):
        return None
    if entry.op is not LifecycleOp.GERMINATE:
        return situation.on(entry.op, entry.slot)
    assert entry.blueprint is not None
    assert entry.blend is not None
    if entry.blueprint not in situation.legal_blueprints(entry.slot) or entry.blend not in situation.legal_blends():
        return None
    return situation.germinate(entry.slot, entry.blueprint, entry.blend)


def schedule_json(entries: Sequence[ScheduleEntry]) -> list[dict[str, Any]]:
    """A schedule as plain JSON."""
    return [{**asdict(entry), "op": entry.op.name} for entry in entries]


def read_schedule(saved: Sequence[Mapping[str, Any]]) -> tuple[ScheduleEntry, ...]:
    """What `schedule_json` made.

    Raises:
        ValueError: It is something else.
    """
    try:
        return tuple(ScheduleEntry(**{**entry, "op": LifecycleOp[entry["op"]]}) for entry in saved)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a schedule: expected a list of entries with epoch, op and slot: {error}") from error


def check_schedule(entries: Sequence[ScheduleEntry], layout: HostLayout) -> None:
    """Refuses what can be known to be illegal before an episode starts.

    Raises:
        ValueError: Epochs out of order, unknown names, a blueprint that does not fit its slot, or an op that no life
            of the seed in its slot can reach.
    """
    stages: dict[str, SeedStage] = {}
    for position, entry in enumerate(entries):
        where = f"schedule entry {position} ({entry.op.name} in {entry.slot} at epoch {entry.epoch})"
        if entry.epoch < 0 or (position and entry.epoch <= entries[position - 1].epoch):
            raise ValueError(f"{where}: epochs start at 0 and rise, because each epoch takes one op")
        _check_names(entry, layout, where)
        stage = stages.get(entry.slot, SeedStage.DORMANT)
        reached = _stage_after(stage, entry.op)
        if reached is None:
            raise ValueError(f"{where}: the slot can only have reached {stage.name} by then, which does not allow it")
        stages[entry.slot] = reached


def _check_names(entry: ScheduleEntry, layout: HostLayout, where: str) -> None:
    layout.slot_position(entry.slot)
    if entry.blueprint is not None and entry.blend is not None:
        check_names(layout, entry.blueprint, entry.blend)
        if not layout.card(entry.slot, entry.blueprint).fits:
            raise ValueError(f"{where}: blueprint {entry.blueprint!r} does not fit this slot")


def _stage_after(stage: SeedStage, op: LifecycleOp) -> SeedStage | None:
    """Where an op leads from the furthest stage a slot can have reached; None if it leads nowhere from there."""
    for move in TRANSITIONS.values():
        if move.source is stage and move.op is op:
            return _settled(move.target)
    return None


def _settled(stage: SeedStage) -> SeedStage:
    """The stage a slot ends up in by itself, given time."""
    onward = {
        SeedStage.GERMINATED: SeedStage.TRAINING,
        SeedStage.BLENDING: SeedStage.HOLDING,
        SeedStage.PRUNED: SeedStage.DORMANT,
    }
    return onward.get(stage, stage)
