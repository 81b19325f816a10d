"""Who is credited with what: the only memory behind the rewards.

A seed is credited with points by which the network beats the best it ever was without that seed. All credits together
never exceed the gain all seeds made together, gains must be shown three epochs running, and losses count at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from esper.leyline import ActionOutcome, EpochReport, LifecycleOp, SlotReport, contribution, full_coalition, record
from esper.simic.rewards.types import Ledger, RewardConfig, SlotLedger, coalition_points

MARKS = 3
"""Epochs a gain must be shown before it is credited."""


def open_ledger(reset: EpochReport, config: RewardConfig) -> Ledger:
    """The memory of an episode that has just begun."""
    return Ledger(slots={}, best_bare=coalition_points(reset.coalitions, config).get(0))


def advance_ledger(ledger: Ledger, outcome: ActionOutcome, after: EpochReport, config: RewardConfig) -> Ledger:
    """The memory after one more epoch. A rollback ends the episode, so nothing is marked for it."""
    if not outcome.applied or after.rollback_reason is not None:
        return ledger
    measured = _measure(ledger, after, config)
    entries = {slot.slot_id: _entry(ledger, slot, outcome, after, measured) for slot in _seeded(after)}
    shares = _shares(entries, measured)
    marked = {slot_id: _mark(entry, shares.get(slot_id), after.epoch) for slot_id, entry in entries.items()}
    return Ledger(slots=marked, best_bare=measured.best_bare)


def common_gain(full: float | None, best_bare: float | None, reference: float | None) -> float | None:
    """Points all seeds together brought over the best bare host and, if known, over a host that only waited."""
    if full is None or best_bare is None:
        return None
    return full - (best_bare if reference is None else max(best_bare, reference))


@record
class _Measured:
    """One epoch's table, read once. None means not measured."""

    full: float | None
    without: Mapping[str, float]
    """Points without each seed, for those measured; a seed at alpha 0 is absent from every coalition."""
    contribution: Mapping[str, float]
    best_bare: float | None
    common_gain: float | None


def _measure(ledger: Ledger, after: EpochReport, config: RewardConfig) -> _Measured:
    points = coalition_points(after.coalitions, config)
    players = after.coalitions.slot_ids
    full = points.get(full_coalition(len(players)))
    without, gains = {}, {}
    for slot in _seeded(after):
        if slot.slot_id not in players:
            if full is not None:
                without[slot.slot_id] = full
            continue
        gain = contribution(points, len(players), players.index(slot.slot_id))
        if gain is not None and full is not None:
            gains[slot.slot_id] = gain
            without[slot.slot_id] = points[full_coalition(len(players)) & ~(1 << players.index(slot.slot_id))]
    best_bare = _best(ledger.best_bare if _seeded(after) else None, points.get(0))
    return _Measured(
        full=full,
        without=without,
        contribution=gains,
        best_bare=best_bare,
        common_gain=common_gain(full, best_bare, config.reference_points(after.epochs_done)),
    )


def _entry(
    ledger: Ledger, slot: SlotReport, outcome: ActionOutcome, after: EpochReport, measured: _Measured
) -> SlotLedger:
    """The seed's old entry with its bar raised; a new seed starts without a past."""
    assert slot.seed_id is not None
    old = ledger.slots.get(slot.slot_id)
    known = old if old is not None and old.seed_id == slot.seed_id else None
    commits = outcome.op is LifecycleOp.FOSSILIZE and outcome.slot == slot.slot_id
    return SlotLedger(
        seed_id=slot.seed_id,
        best_without=_best(known.best_without if known else None, measured.without.get(slot.slot_id)),
        recent=known.recent if known else (),
        credit=known.credit if known else 0.0,
        marked_epoch=known.marked_epoch if known else None,
        commit_epoch=after.epoch if commits else (known.commit_epoch if known else None),
    )


def _shares(entries: Mapping[str, SlotLedger], measured: _Measured) -> dict[str, float]:
    """This epoch's mark of every measured seed, with gains cut down to what all made together."""
    common = measured.common_gain
    if common is None or measured.full is None:
        return {}
    gains = {}
    for slot_id, gain in measured.contribution.items():
        bar = entries[slot_id].best_without
        assert bar is not None, "a measured seed has a bar"
        # The bar can take credit away but never make a debt: only a harmful seed is marked below zero.
        gains[slot_id] = max(measured.full - bar, min(0.0, gain))
    claimed = math.fsum(gain for gain in gains.values() if gain > 0.0)
    scale = min(1.0, max(0.0, common) / claimed) if claimed > 0.0 else 1.0
    return {slot_id: gain * scale if gain > 0.0 else gain for slot_id, gain in gains.items()}


def _mark(entry: SlotLedger, share: float | None, epoch: int | None) -> SlotLedger:
    if share is None:
        return entry
    recent = (*entry.recent, share)[-MARKS:]
    credit = min(recent) if len(recent) == MARKS else min(0.0, *recent)
    return replace(entry, recent=recent, credit=credit, marked_epoch=epoch)


def _seeded(report: EpochReport) -> list[SlotReport]:
    return [slot for slot in report.slots if slot.stage.has_seed]


def _best(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return old if new is None else new
    return max(old, new)
