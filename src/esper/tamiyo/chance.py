"""Chance as a controller: legal choices at random, or seeds at random times with as many ops as somebody else took."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from esper.leyline import BLENDS, OPS, ActionSpec, LifecycleConfig, LifecycleOp
from esper.tamiyo.controller import Controller
from esper.tamiyo.situation import Setting, Situation


class WaitOnlyController(Controller):
    """Does nothing: what the host becomes by itself."""

    def decide(self, situation: Situation) -> ActionSpec:
        """Waits."""
        return situation.wait()


class RandomController(Controller):
    """Uniform over legal ops, then slots, blueprints and blends."""

    def decide(self, situation: Situation) -> ActionSpec:
        """Draws from a generator of this decision alone."""
        chance = situation.chance("random")
        op = chance.choice([op for op in OPS if situation.masks.op[op]])
        if op is LifecycleOp.WAIT:
            return situation.wait()
        if op is LifecycleOp.GERMINATE:
            return _random_seed(situation, chance)
        return situation.on(op, chance.choice(situation.legal_slots(op)))


def _random_seed(situation: Situation, chance: random.Random) -> ActionSpec:
    slot_id = chance.choice(situation.legal_slots(LifecycleOp.GERMINATE))
    blueprint = chance.choice(situation.legal_blueprints(slot_id))
    return situation.germinate(slot_id, blueprint, chance.choice(situation.legal_blends()))


@dataclass(slots=True)
class Life:
    """What is to become of one seed, and when at the earliest."""

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


class RateMatchedController(Controller):
    """Takes given numbers of ops per episode at random legal times, on random slots, with random blueprints.

    The counts of each episode are rounded so that their means are the given rates and every seed's fate is consistent:
    who is kept was advanced before. An op whose gate is closed when due is tried again every epoch.
    """

    def __init__(self, setting: Setting, rates: Mapping[str, float]) -> None:
        super().__init__(setting)
        check_rates(rates)
        self.rates = dict(rates)
        self._lives: dict[int, list[Life]] = {}

    def decide(self, situation: Situation) -> ActionSpec:
        """The first due op that is legal, lives taken in random order."""
        chance = situation.chance("rate_matched")
        lives = list(self._lives[situation.report.env_id])
        chance.shuffle(lives)
        for life in lives:
            if life.slot_id is None and not self._leaves_room(life, lives):
                continue
            for op in life.due(situation.report.epochs_done):
                if (spec := _legal_spec(situation, op, life, chance)) is not None:
                    life.note(spec)
                    return spec
        return situation.wait()

    def _leaves_room(self, life: Life, lives: list[Life]) -> bool:
        """False for a seed that would stay in the last slot while others are still to come and go."""
        passing = any(other.passes and not other.ended for other in lives)
        staying = sum(not other.passes and other.slot_id is not None for other in lives)
        return life.passes or not passing or staying + 1 < len(self.setting.layout.slots)

    def forget(self) -> None:
        """Drops the plans of earlier episodes."""
        self._lives.clear()

    def meet(self, situation: Situation) -> None:
        """Plans an env's episode."""
        chance = situation.chance("rate_matched:plan")
        horizon = situation.report.signals.horizon
        self._lives[situation.report.env_id] = plan_lives(self.rates, self.setting.lifecycle, horizon, chance)

    def state_dict(self) -> dict[str, Any]:
        """The plans and how far they got, by env."""
        return {str(env_id): [asdict(life) for life in lives] for env_id, lives in self._lives.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the plans."""
        self._lives = {int(env_id): [Life(**life) for life in lives] for env_id, lives in state.items()}


def _legal_spec(situation: Situation, op: LifecycleOp, life: Life, chance: random.Random) -> ActionSpec | None:
    if op is LifecycleOp.GERMINATE:
        return _random_seed(situation, chance) if situation.masks.op[op] else None
    assert life.slot_id is not None
    return situation.on(op, life.slot_id) if life.slot_id in situation.legal_slots(op) else None


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


def plan_lives(
    rates: Mapping[str, float], lifecycle: LifecycleConfig, horizon: int, chance: random.Random
) -> list[Life]:
    """Seeds for one episode: as many of each fate as the rates say on average, at random times that leave room."""
    planted, advanced = rates["GERMINATE"], rates["ADVANCE"]
    kept, pruned = rates["FOSSILIZE"], rates["PRUNE"]
    # One draw rounds all running sums, so the counts add up in every episode and are right on average.
    rounding = chance.random()
    num_kept, num_ended, num_planted = (
        math.floor(total + rounding + _SLACK) for total in (kept, kept + pruned, planted)
    )
    advance_share = min(1.0, (advanced - kept) / (planted - kept)) if planted > kept else 0.0
    fates = ["keep"] * num_kept + ["prune"] * (num_ended - num_kept) + ["leave"] * (num_planted - num_ended)
    ramp = max(blend.ramp_epochs for blend in BLENDS.values())
    last = max(0, horizon - 1 - lifecycle.min_training - ramp - num_planted)
    return [
        _plan_life(
            fate,
            chance.randint(0, last),
            fate == "keep" or chance.random() < advance_share,
            lifecycle,
            horizon,
            chance,
        )
        for fate in fates
    ]


def _plan_life(
    fate: str, start: int, advances: bool, lifecycle: LifecycleConfig, horizon: int, chance: random.Random
) -> Life:
    trained = min(start + lifecycle.min_training, horizon - 1)
    advance = None
    if advances:
        latest = horizon - 1 - max(blend.ramp_epochs for blend in BLENDS.values())
        advance = chance.randint(trained, max(trained, latest))
    end = None
    if fate != "leave":
        earliest = trained if advance is None else min(advance + 1, horizon - 1)
        # A seed that is to go makes room for others soon.
        latest = horizon - 1 if fate == "keep" else earliest + (horizon - 1 - earliest) // 4
        end = chance.randint(earliest, latest)
    return Life(plant_at=start, advance_at=advance, end_at=end, keep=fate == "keep")
