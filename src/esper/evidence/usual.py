"""What a policy usually does, as one schedule for every host: played without looking, it says what looking is worth.

Names of slots and blueprints differ from host to host. So a usual seed is told by when it is planted, how far into the
host, and how large it is among those that fit; everything after planting happens as soon as it may.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from esper.evidence.draws import DrawnHosts
from esper.leyline import ActionExecutionResult, ActionSpec, LifecycleOp, PolicyProtocol, record
from esper.tamiyo.controller import Setting, Situation, life_epochs, own_situations
from esper.tamiyo.schedule import ScheduleEntry


@record
class UsualSeed:
    """One planting, in terms that fit any host."""

    planted: float
    """Share of the episode that has passed."""
    place: float
    """Share of the way from the first slot to the last."""
    size_rank: int
    """Larger blueprints that would have fitted too."""
    blend: str


class _Watched:
    """A policy whose plantings are noted, by env."""

    def __init__(self, policy: PolicyProtocol) -> None:
        self._policy = policy
        self.plantings: dict[int, list[UsualSeed]] = {}

    def begin(self, state: ActionExecutionResult) -> None:
        self.plantings = {report.env_id: [] for report in state.reports}
        self._policy.begin(state)

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        specs = self._policy.act(state)
        for spec, situation in zip(specs, own_situations(state), strict=True):
            if spec.op is LifecycleOp.GERMINATE and not situation.report.terminal:
                self.plantings[spec.env_id].append(_described(situation, spec))
        return specs

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        self._policy.store(before, after)


def _described(situation: Situation, spec: ActionSpec) -> UsualSeed:
    assert spec.slot is not None
    assert spec.blueprint is not None
    assert spec.blend is not None
    layout, report = situation.setting.layout, situation.report
    own = layout.card(spec.slot, spec.blueprint).params
    larger = [name for name in situation.legal_blueprints(spec.slot) if layout.card(spec.slot, name).params > own]
    return UsualSeed(
        planted=report.epochs_done / report.signals.horizon,
        place=layout.slot_position(spec.slot) / max(len(layout.slot_ids) - 1, 1),
        size_rank=len(larger),
        blend=spec.blend,
    )


def usual_seeds(policy: PolicyProtocol, hosts: DrawnHosts) -> tuple[UsualSeed, ...]:
    """As many seeds as the median host gets, each at the median time and place, with the commonest size and blend."""
    watched = _Watched(policy)
    hosts.run(watched)
    planted = list(watched.plantings.values())
    count = round(statistics.median(len(seeds) for seeds in planted))
    found = []
    for number in range(count):
        seeds = [seeds[number] for seeds in planted if len(seeds) > number]
        found.append(
            UsualSeed(
                planted=statistics.median(seed.planted for seed in seeds),
                place=statistics.median(seed.place for seed in seeds),
                size_rank=statistics.mode(sorted(seed.size_rank for seed in seeds)),
                blend=statistics.mode(sorted(seed.blend for seed in seeds)),
            )
        )
    return tuple(found)


def usual_schedule(seeds: Sequence[UsualSeed], setting: Setting, horizon: int) -> tuple[ScheduleEntry, ...]:
    """The same seeds on one host. Those for which it has no slot or no room left are left out."""
    free, room = list(setting.layout.slot_ids), setting.room
    ops: list[ScheduleEntry] = []
    for seed in seeds:
        wanted = seed.place * (len(setting.layout.slot_ids) - 1)
        for slot in sorted(free, key=lambda slot: abs(setting.layout.slot_position(slot) - wanted)):
            cards = {name: setting.layout.card(slot, name) for name in setting.layout.blueprints}
            fitting = sorted(
                (name for name, card in cards.items() if card.fits and card.params <= room),
                key=lambda name: -cards[name].params,
            )
            if fitting:
                blueprint = fitting[min(seed.size_rank, len(fitting) - 1)]
                free.remove(slot)
                room -= cards[blueprint].params
                ops += _life(round(seed.planted * horizon), slot, blueprint, seed.blend, setting)
                break
    return _one_by_one(ops, horizon)


def _life(epoch: int, slot: str, blueprint: str, blend: str, setting: Setting) -> list[ScheduleEntry]:
    blended, kept = epoch + setting.lifecycle.min_training, epoch + life_epochs(setting.lifecycle, blend)
    return [
        ScheduleEntry(epoch=epoch, op=LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, blend=blend),
        ScheduleEntry(epoch=blended, op=LifecycleOp.ADVANCE, slot=slot),
        ScheduleEntry(epoch=kept, op=LifecycleOp.FOSSILIZE, slot=slot),
    ]


def _one_by_one(ops: Sequence[ScheduleEntry], horizon: int) -> tuple[ScheduleEntry, ...]:
    """An epoch takes one op: of those that fall on the same one, the later are put off."""
    entries: list[ScheduleEntry] = []
    for op in sorted(ops, key=lambda op: op.epoch):
        earliest = entries[-1].epoch + 1 if entries else 0
        entries.append(replace(op, epoch=max(op.epoch, earliest)))
    return tuple(entry for entry in entries if entry.epoch < horizon)
