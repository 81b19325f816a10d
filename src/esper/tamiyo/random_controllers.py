"""Random baselines: uniform over legal choices, or seeds at random times with given mean op counts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from esper.leyline import BLENDS, OPS, ActionSpec, LifecycleConfig, LifecycleOp
from esper.tamiyo.controller import Controller, Setting, Situation, StatelessController


class RandomController(StatelessController):
    """Uniform over legal ops, then slots, blueprints and blends."""

    def decide(self, situation: Situation) -> ActionSpec:
        """Draws from a generator of this decision alone."""
        rng = situation.rng("random")
        op = rng.choice([op for op in OPS if situation.masks.op[op]])
        if op is LifecycleOp.WAIT:
            return situation.wait()
        if op is LifecycleOp.GERMINATE:
            return _random_seed(situation, rng)
        return situation.on(op, rng.choice(situation.legal_slots(op)))


def _random_seed(situation: Situation, rng: random.Random) -> ActionSpec:
    slot_id = rng.choice(situation.legal_slots(LifecycleOp.GERMINATE))
    blueprint = rng.choice(situation.legal_blueprints(slot_id))
    return situation.germinate(slot_id, blueprint, rng.choice(situation.legal_blends()))


@dataclass(slots=True)
class SeedPlan:
    """What is to be done with one seed, and when at the earliest."""

    plant_at: int
    advance_at: int | None
    """None for a seed that is never blended."""
    end_at: int | None
    """None for a seed that is left alone."""
    keep: bool
    """How it ends: kept, or else pruned."""
    slot_id: str | None = None
    """Where it was planted; None before that."""
    advanced: bool = False
    ended: bool = False

    @property
    def passes(self) -> bool:
        """True for a seed that is to be pruned and so gives its slot back."""
        return self.end_at is not None and not self.keep

    def due(self, now: int) -> list[LifecycleOp]:
        """Ops on this seed whose time has come, most wanted first."""
        if self.slot_id is None:
            return [LifecycleOp.GERMINATE] if self.plant_at <= now else []
        ops = []
        if self.advance_at is not None and not self.advanced and self.advance_at <= now:
            ops.append(LifecycleOp.ADVANCE)
        if self.end_at is not None and not self.ended and self.end_at <= now:
            ops.append(LifecycleOp.FOSSILIZE if self.keep else LifecycleOp.PRUNE)
        return ops

    def note(self, spec: ActionSpec) -> None:
        """Remembers what was done with the seed."""
        self.slot_id = spec.slot
        self.advanced = self.advanced or spec.op is LifecycleOp.ADVANCE
        self.ended = self.ended or spec.op in (LifecycleOp.FOSSILIZE, LifecycleOp.PRUNE)


@dataclass(slots=True)
class EpisodePlan:
    """The seeds of one env's episode and how far each has got."""

    seeds: list[SeedPlan]


class RateMatchedController(Controller[EpisodePlan]):
    """Takes given mean numbers of ops per episode at random legal times, on random slots, with random blueprints.

    The counts of each episode are rounded so that their means are the given rates and every seed's fate is consistent:
    a kept seed was advanced before. An op whose gate is closed when due is tried again every epoch.

    Args:
        setting: The hosts.
        rates: Mean ops per episode to match, for GERMINATE, ADVANCE, PRUNE and FOSSILIZE.
    """

    memory_type = EpisodePlan

    def __init__(self, setting: Setting, rates: Mapping[str, float]) -> None:
        super().__init__(setting)
        check_rates(rates)
        self.rates = dict(rates)

    def start(self, situation: Situation) -> EpisodePlan:
        """Plans an env's episode."""
        horizon, rng = situation.report.signals.horizon, situation.rng("rate_matched:plan")
        return EpisodePlan(seeds=plan_seeds(self.rates, self.setting.lifecycle, horizon, rng))

    def load_memory(self, saved: dict[str, Any]) -> EpisodePlan:
        """The plan of one env from its JSON form."""
        return EpisodePlan(seeds=[SeedPlan(**seed) for seed in saved["seeds"]])

    def decide(self, situation: Situation) -> ActionSpec:
        """The first due op that is legal, seeds taken in random order."""
        rng = situation.rng("rate_matched")
        seeds = list(self.memory[situation.report.env_id].seeds)
        rng.shuffle(seeds)
        for seed in seeds:
            if seed.slot_id is None and not self._leaves_room(seed, seeds):
                continue
            for op in seed.due(situation.report.epochs_done):
                if (spec := _legal_spec(situation, op, seed, rng)) is not None:
                    seed.note(spec)
                    return spec
        return situation.wait()

    def _leaves_room(self, seed: SeedPlan, seeds: list[SeedPlan]) -> bool:
        """False for a seed that would stay in the last slot while others are still to come and go."""
        passing = any(other.passes and not other.ended for other in seeds)
        staying = sum(not other.passes and other.slot_id is not None for other in seeds)
        return seed.passes or not passing or staying + 1 < len(self.setting.layout.slots)


def _legal_spec(situation: Situation, op: LifecycleOp, seed: SeedPlan, rng: random.Random) -> ActionSpec | None:
    if op is LifecycleOp.GERMINATE:
        return _random_seed(situation, rng) if situation.masks.op[op] else None
    assert seed.slot_id is not None
    return situation.on(op, seed.slot_id) if seed.slot_id in situation.legal_slots(op) else None


RATED_OPS = tuple(op.name for op in OPS if op is not LifecycleOp.WAIT)


def check_rates(rates: Mapping[str, float]) -> None:
    """Refuses rates that no controller can have.

    Raises:
        ValueError: An op is missing or unknown, a rate is negative, or seeds would be kept that were never advanced,
            advanced that were never planted, or end twice.
    """
    if set(rates) != set(RATED_OPS):
        raise ValueError(f"rates need exactly the ops {', '.join(RATED_OPS)}, got {', '.join(rates) or 'none'}")
    if not all(math.isfinite(rate) and rate >= 0.0 for rate in rates.values()):
        raise ValueError(f"rates are mean counts per episode, so at least 0, got {dict(rates)}")
    planted, advanced = rates["GERMINATE"], rates["ADVANCE"]
    kept, pruned = rates["FOSSILIZE"], rates["PRUNE"]
    if not (kept <= advanced + _SLACK and advanced <= planted + _SLACK and kept + pruned <= planted + _SLACK):
        raise ValueError(
            "a seed is planted before it is advanced, advanced before it is kept, and ends once: "
            f"expected FOSSILIZE <= ADVANCE <= GERMINATE and FOSSILIZE + PRUNE <= GERMINATE, got {dict(rates)}"
        )


_SLACK = 1e-9


def plan_seeds(
    rates: Mapping[str, float], lifecycle: LifecycleConfig, horizon: int, rng: random.Random
) -> list[SeedPlan]:
    """Seeds for one episode: as many of each fate as the rates say on average, at random times that leave room."""
    planted, advanced = rates["GERMINATE"], rates["ADVANCE"]
    kept, pruned = rates["FOSSILIZE"], rates["PRUNE"]
    # One draw rounds all running sums, so the counts add up in every episode and are right on average.
    rounding = rng.random()
    num_kept, num_ended, num_planted = (
        math.floor(total + rounding + _SLACK) for total in (kept, kept + pruned, planted)
    )
    advance_share = min(1.0, (advanced - kept) / (planted - kept)) if planted > kept else 0.0
    fates = ["keep"] * num_kept + ["prune"] * (num_ended - num_kept) + ["leave"] * (num_planted - num_ended)
    ramp = max(blend.ramp_epochs for blend in BLENDS.values())
    last = max(0, horizon - 1 - lifecycle.min_training - ramp - num_planted)
    return [
        _plan_seed(
            fate,
            rng.randint(0, last),
            fate == "keep" or rng.random() < advance_share,
            lifecycle,
            horizon,
            rng,
        )
        for fate in fates
    ]


def _plan_seed(
    fate: str, start: int, advances: bool, lifecycle: LifecycleConfig, horizon: int, rng: random.Random
) -> SeedPlan:
    trained = min(start + lifecycle.min_training, horizon - 1)
    advance = None
    if advances:
        latest = horizon - 1 - max(blend.ramp_epochs for blend in BLENDS.values())
        advance = rng.randint(trained, max(trained, latest))
    end = None
    if fate != "leave":
        earliest = trained if advance is None else min(advance + 1, horizon - 1)
        # A seed that is to go makes room for others soon.
        latest = horizon - 1 if fate == "keep" else earliest + (horizon - 1 - earliest) // 4
        end = rng.randint(earliest, latest)
    return SeedPlan(plant_at=start, advance_at=advance, end_at=end, keep=fate == "keep")
