"""The rule arms: when to plant differs, all that follows is shared, so that no baseline fails for want of a commit.

A rule arm advances as soon as the gate allows, keeps what was worth its place three epochs running, drops what was not,
and decides about everything before the episode ends.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.leyline import BLENDS, ActionSpec, LifecycleOp, SeedStage, SlotReport, record
from esper.tamiyo.controller import Controller
from esper.tamiyo.situation import Setting, Situation, check_names, life_epochs


@record
class CommitRule:
    """When a held seed is kept or dropped."""

    keep_pp: float = 1.0
    """Points of contribution a seed must bring to be kept."""
    drop_pp: float = 0.0
    """Points of contribution at or below which a seed is dropped."""
    epochs: int = 3
    """Epochs in a row the evidence must last."""

    def __post_init__(self) -> None:
        if not self.keep_pp > self.drop_pp:
            raise ValueError(f"keep_pp must be above drop_pp ({self.drop_pp}), got {self.keep_pp}")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")

    def verdict(self, contributions: list[float]) -> LifecycleOp | None:
        """Keep, drop, or None while the evidence is mixed or short."""
        recent = contributions[-self.epochs :]
        if len(recent) < self.epochs:
            return None
        if min(recent) >= self.keep_pp:
            return LifecycleOp.FOSSILIZE
        return LifecycleOp.PRUNE if max(recent) <= self.drop_pp else None


COMMIT_RULE = CommitRule()
"""The one commit rule of all rule arms: a baseline that cannot keep a seed would be a straw man."""


@dataclass(slots=True)
class EnvMemory:
    """What a rule arm remembers of one env's episode."""

    last_planted: int = 0
    """Epoch at which the last seed was planted; the start counts as planting."""
    best_loss: float | None = None
    """Validation loss that the next improvement is measured from."""
    stale_epochs: int = 0
    """Epochs since that loss was last improved on."""
    contributions: dict[str, list[float]] = field(default_factory=dict)
    """Seed id -> contributions while it was held, oldest first."""


class RuleController(Controller):
    """Plants by its own rule; advances, keeps and drops by the shared ones."""

    def __init__(self, setting: Setting, blueprint: str | None, blend: str) -> None:
        super().__init__(setting)
        check_names(setting.layout, blueprint, blend)
        self.blueprint = blueprint
        self.blend = blend
        self._memory: dict[int, EnvMemory] = {}

    @abstractmethod
    def wants_seed(self, situation: Situation) -> bool:
        """Is it time to plant?"""

    def decide(self, situation: Situation) -> ActionSpec:
        """Settles held seeds first, then moves trained ones on, then plants."""
        for choose in (self.settle, self.advance, self.plant):
            if (spec := choose(situation)) is not None:
                return spec
        return situation.wait()

    def settle(self, situation: Situation) -> ActionSpec | None:
        """Keeps or drops a held seed whose evidence is clear; in the last steps, every blended one."""
        blended = situation.slots(SeedStage.BLENDING, SeedStage.HOLDING)
        # One op per step: the last decisions start as many steps before the end as there are seeds to decide on.
        time_is_up = situation.steps_left <= len(blended)
        for slot in blended:
            op = self._last_word(situation, slot) if time_is_up else self._verdict(situation, slot)
            if op is not None and slot.slot_id in situation.legal_slots(op):
                return situation.on(op, slot.slot_id)
        return None

    def advance(self, situation: Situation) -> ActionSpec | None:
        """Starts blending a trained seed, if it can still be kept in time."""
        for slot_id in situation.legal_slots(LifecycleOp.ADVANCE):
            slot = situation.report.slots[self.setting.layout.slot_position(slot_id)]
            assert slot.blend is not None
            if situation.steps_left > BLENDS[slot.blend].ramp_epochs and self.trusts(slot):
                return situation.on(LifecycleOp.ADVANCE, slot_id)
        return None

    def trusts(self, slot: SlotReport) -> bool:
        """Whether a trained seed may be blended once its gate is open."""
        return True

    def plant(self, situation: Situation) -> ActionSpec | None:
        """Plants in the next empty slot when the rule says so and a whole life still fits."""
        life = life_epochs(self.setting.lifecycle, self.blend) + COMMIT_RULE.epochs
        if situation.steps_left <= life or self.blend not in situation.legal_blends():
            return None
        if not self.wants_seed(situation):
            return None
        for slot_id in situation.legal_slots(LifecycleOp.GERMINATE):
            if (blueprint := self.choose_blueprint(situation, slot_id)) is not None:
                return situation.germinate(slot_id, blueprint, self.blend)
        return None

    def choose_blueprint(self, situation: Situation, slot_id: str) -> str | None:
        """What to plant in a slot: the configured blueprint, or the largest; None if nothing suitable is legal."""
        legal = situation.legal_blueprints(slot_id)
        if self.blueprint is not None:
            return self.blueprint if self.blueprint in legal else None
        return situation.largest(slot_id, legal)

    def _verdict(self, situation: Situation, slot: SlotReport) -> LifecycleOp | None:
        return COMMIT_RULE.verdict(self._seen(situation, slot)) if slot.stage is SeedStage.HOLDING else None

    def _last_word(self, situation: Situation, slot: SlotReport) -> LifecycleOp:
        seen = self._seen(situation, slot)
        helped = bool(seen) and math.fsum(seen) / len(seen) > COMMIT_RULE.drop_pp
        may_keep = slot.slot_id in situation.legal_slots(LifecycleOp.FOSSILIZE)
        return LifecycleOp.FOSSILIZE if helped and may_keep else LifecycleOp.PRUNE

    def _seen(self, situation: Situation, slot: SlotReport) -> list[float]:
        assert slot.seed_id is not None
        return self.memory(situation).contributions.get(slot.seed_id, [])

    def memory(self, situation: Situation) -> EnvMemory:
        """What is remembered of this env."""
        return self._memory[situation.report.env_id]

    def forget(self) -> None:
        """Drops the evidence about earlier episodes."""
        self._memory.clear()

    def meet(self, situation: Situation) -> None:
        """Starts a memory for an env."""
        self._memory[situation.report.env_id] = EnvMemory(best_loss=situation.report.val_loss)

    def learn(self, situation: Situation, op: LifecycleOp) -> None:
        """Notes plantings, and what held seeds brought."""
        memory = self.memory(situation)
        if op is LifecycleOp.GERMINATE:
            memory.last_planted = situation.report.epochs_done - 1
        for slot in situation.slots(SeedStage.HOLDING):
            if slot.contribution_pp is not None and slot.seed_id is not None:
                memory.contributions.setdefault(slot.seed_id, []).append(slot.contribution_pp)

    def state_dict(self) -> dict[str, Any]:
        """The evidence so far, by env."""
        return {str(env_id): asdict(memory) for env_id, memory in self._memory.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with saved evidence."""
        self._memory = {int(env_id): EnvMemory(**copy.deepcopy(memory)) for env_id, memory in state.items()}


class PeriodicController(RuleController):
    """Plants every so many epochs."""

    def __init__(self, setting: Setting, every_epochs: int, blueprint: str | None, blend: str) -> None:
        super().__init__(setting, blueprint, blend)
        if every_epochs < 1:
            raise ValueError(f"every_epochs must be at least 1, got {every_epochs}")
        self.every_epochs = every_epochs

    def wants_seed(self, situation: Situation) -> bool:
        """True once enough epochs have passed since the start or the last planting."""
        return situation.report.epochs_done - self.memory(situation).last_planted >= self.every_epochs


class PlateauController(RuleController):
    """Plants when the validation loss has stopped improving."""

    def __init__(self, setting: Setting, min_gain: float, patience: int, blueprint: str | None, blend: str) -> None:
        super().__init__(setting, blueprint, blend)
        if not min_gain >= 0.0:
            raise ValueError(f"min_gain must be at least 0 nats, got {min_gain}")
        if patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, got {patience}")
        self.min_gain = min_gain
        self.patience = patience

    def wants_seed(self, situation: Situation) -> bool:
        """True after `patience` epochs without an improvement of `min_gain` nats."""
        return self.memory(situation).stale_epochs >= self.patience

    def learn(self, situation: Situation, op: LifecycleOp) -> None:
        """Notes improvements too. A new seed gets the same patience as the host had."""
        super().learn(situation, op)
        memory, loss = self.memory(situation), situation.report.val_loss
        improved = memory.best_loss is None or loss <= memory.best_loss - self.min_gain
        memory.stale_epochs = 0 if improved or op is LifecycleOp.GERMINATE else memory.stale_epochs + 1
        if improved:
            memory.best_loss = loss


class FragrowController(RuleController):
    """Plants at intervals that grow with overfitting: a host that fits too well needs no more parameters."""

    def __init__(self, setting: Setting, max_interval: float, blueprint: str | None, blend: str) -> None:
        super().__init__(setting, blueprint, blend)
        if not max_interval >= 1.0:
            raise ValueError(f"max_interval must be at least 1 epoch, got {max_interval}")
        self.max_interval = max_interval

    def wants_seed(self, situation: Situation) -> bool:
        """True once the interval for the present gap has passed since the start or the last planting."""
        train = situation.report.train_accuracy_pct
        if train is None:
            return False
        waited = situation.report.epochs_done - self.memory(situation).last_planted
        return waited >= fragrow_interval(self.max_interval, train - situation.report.val_accuracy_pct)


def fragrow_interval(max_interval: float, gap_pp: float) -> float:
    """Epochs between plantings for a gap between training and validation accuracy, in points."""
    return max_interval / (1.0 + math.exp(min(4.0 - gap_pp, 700.0)))
