"""The rule arms: when to plant differs, all that follows is shared, so that no baseline fails for want of a commit.

A rule arm advances as soon as the gate allows, keeps what was worth its place three epochs running, drops what was not,
and decides about everything before the episode ends.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from esper.leyline import BLENDS, ActionSpec, LifecycleOp, SeedStage, SlotReport
from esper.tamiyo.controller import Controller, Setting, Situation, check_names, life_epochs

# One commit rule for all rule arms: a baseline that cannot keep a seed would be a straw man.
KEEP_PP = 1.0
"""Points of contribution a held seed must bring to be kept."""
DROP_PP = 0.0
"""Points of contribution at or below which a held seed is dropped."""
COMMIT_EPOCHS = 3
"""Epochs in a row the evidence must last."""


def commit_verdict(contributions: Sequence[float]) -> LifecycleOp | None:
    """Keep, drop, or None while the evidence is mixed or short."""
    recent = contributions[-COMMIT_EPOCHS:]
    if len(recent) < COMMIT_EPOCHS:
        return None
    if min(recent) >= KEEP_PP:
        return LifecycleOp.FOSSILIZE
    return LifecycleOp.PRUNE if max(recent) <= DROP_PP else None


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


class RuleController(Controller[EnvMemory]):
    """Plants by its own rule; advances, keeps and drops by the shared ones.

    Args:
        setting: The hosts.
        blueprint: What to plant; None takes the largest that is legal.
        blend: How seeds are blended in.
    """

    memory_type = EnvMemory

    def __init__(self, setting: Setting, blueprint: str | None, blend: str) -> None:
        super().__init__(setting)
        check_names(setting.layout, blueprint, blend)
        self.blueprint = blueprint
        self.blend = blend

    def start(self, situation: Situation) -> EnvMemory:
        """No seed planted, nothing seen but the untrained host."""
        return self.memory_type(best_loss=situation.report.val_loss)

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
        life = life_epochs(self.setting.lifecycle, self.blend) + COMMIT_EPOCHS
        if situation.steps_left <= life or self.blend not in situation.legal_blends():
            return None
        if not self.wants_seed(situation):
            return None
        chosen = self.choose_place(situation)
        return None if chosen is None else situation.germinate(*chosen, self.blend)

    def choose_place(self, situation: Situation) -> tuple[str, str] | None:
        """Slot and blueprint of the next seed: the first free slot in which there is something to plant."""
        for slot_id in situation.legal_slots(LifecycleOp.GERMINATE):
            if (blueprint := self.choose_blueprint(situation, slot_id)) is not None:
                return slot_id, blueprint
        return None

    def choose_blueprint(self, situation: Situation, slot_id: str) -> str | None:
        """What to plant in a slot: the configured blueprint, or the largest; None if nothing suitable is legal."""
        legal = situation.legal_blueprints(slot_id)
        if self.blueprint is not None:
            return self.blueprint if self.blueprint in legal else None
        return situation.largest(slot_id, legal)

    def _verdict(self, situation: Situation, slot: SlotReport) -> LifecycleOp | None:
        return commit_verdict(self._seen(situation, slot)) if slot.stage is SeedStage.HOLDING else None

    def _last_word(self, situation: Situation, slot: SlotReport) -> LifecycleOp:
        seen = self._seen(situation, slot)
        helped = bool(seen) and math.fsum(seen) / len(seen) > DROP_PP
        may_keep = slot.slot_id in situation.legal_slots(LifecycleOp.FOSSILIZE)
        return LifecycleOp.FOSSILIZE if helped and may_keep else LifecycleOp.PRUNE

    def _seen(self, situation: Situation, slot: SlotReport) -> list[float]:
        assert slot.seed_id is not None
        return self.memory[situation.report.env_id].contributions.get(slot.seed_id, [])

    def update(self, situation: Situation, op: LifecycleOp) -> None:
        """Notes plantings, and what held seeds brought."""
        memory = self.memory[situation.report.env_id]
        if op is LifecycleOp.GERMINATE:
            memory.last_planted = situation.report.epochs_done - 1
        for slot in situation.slots(SeedStage.HOLDING):
            if slot.contribution_pp is not None and slot.seed_id is not None:
                memory.contributions.setdefault(slot.seed_id, []).append(slot.contribution_pp)


PLACES = ("anywhere", "first")


class LargestController(RuleController):
    """Plants the largest seed that is legal, one after the other from the first epoch, and keeps what contributes.

    Args:
        place: "anywhere" takes the slot in which the largest seed fits, "first" the first free one.
        blueprint: What to plant as long as it is legal; then, and with None from the start, the largest.
        max_live: Seeds that may be on their way at once.
    """

    def __init__(
        self,
        setting: Setting,
        place: str = "anywhere",
        blueprint: str | None = None,
        blend: str = "linear_fast",
        max_live: int = 1,
    ) -> None:
        super().__init__(setting, blueprint, blend)
        if place not in PLACES:
            raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
        if max_live < 1:
            raise ValueError(f"max_live must be at least 1, got {max_live}")
        self.place = place
        self.max_live = max_live

    def wants_seed(self, situation: Situation) -> bool:
        """True while fewer seeds than allowed are on their way."""
        return situation.report.num_live < self.max_live

    def choose_place(self, situation: Situation) -> tuple[str, str] | None:
        """The named blueprint where it is legal, else the largest of the slot, or of all slots."""
        free = situation.legal_slots(LifecycleOp.GERMINATE)
        legal = {slot_id: situation.legal_blueprints(slot_id) for slot_id in free}
        named = {slot_id: [self.blueprint] for slot_id in free if self.blueprint in legal[slot_id]}
        choices = [(slot_id, name) for slot_id, names in (named or legal).items() for name in names if name is not None]
        if self.place == "first":
            choices = [choice for choice in choices if choice[0] == choices[0][0]]
        return max(choices, key=lambda choice: self.setting.layout.card(*choice).params, default=None)

    def _verdict(self, situation: Situation, slot: SlotReport) -> LifecycleOp | None:
        seen = self._seen(situation, slot)
        if slot.stage is SeedStage.HOLDING and seen and seen[-1] > DROP_PP:
            return LifecycleOp.FOSSILIZE
        return super()._verdict(situation, slot)


class PeriodicController(RuleController):
    """Plants every so many epochs.

    Args:
        every_epochs: Epochs from the start to the first planting, and from each to the next.
    """

    def __init__(
        self, setting: Setting, every_epochs: int = 6, blueprint: str | None = None, blend: str = "linear"
    ) -> None:
        super().__init__(setting, blueprint, blend)
        if every_epochs < 1:
            raise ValueError(f"every_epochs must be at least 1, got {every_epochs}")
        self.every_epochs = every_epochs

    def wants_seed(self, situation: Situation) -> bool:
        """True once enough epochs have passed since the start or the last planting."""
        return situation.report.epochs_done - self.memory[situation.report.env_id].last_planted >= self.every_epochs


class PlateauController(RuleController):
    """Plants when the validation loss has stopped improving.

    Args:
        min_gain: Fall of the validation loss, in nats, that counts as improvement.
        patience: Epochs without improvement before a seed is planted.
    """

    def __init__(
        self,
        setting: Setting,
        min_gain: float = 0.01,
        patience: int = 4,
        blueprint: str | None = None,
        blend: str = "linear",
    ) -> None:
        super().__init__(setting, blueprint, blend)
        if not min_gain >= 0.0:
            raise ValueError(f"min_gain must be at least 0 nats, got {min_gain}")
        if patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, got {patience}")
        self.min_gain = min_gain
        self.patience = patience

    def wants_seed(self, situation: Situation) -> bool:
        """True after `patience` epochs without an improvement of `min_gain` nats."""
        return self.memory[situation.report.env_id].stale_epochs >= self.patience

    def update(self, situation: Situation, op: LifecycleOp) -> None:
        """Notes improvements too. A new seed gets the same patience as the host had."""
        super().update(situation, op)
        memory, loss = self.memory[situation.report.env_id], situation.report.val_loss
        improved = memory.best_loss is None or loss <= memory.best_loss - self.min_gain
        memory.stale_epochs = 0 if improved or op is LifecycleOp.GERMINATE else memory.stale_epochs + 1
        if improved:
            memory.best_loss = loss


class FragrowController(RuleController):
    """Plants at intervals that grow with overfitting: a host that fits too well needs no more parameters.

    Args:
        max_interval: Epochs between plantings in a host that overfits badly; half of it at a gap of 4 points.
    """

    def __init__(
        self, setting: Setting, max_interval: float = 20.0, blueprint: str | None = None, blend: str = "linear"
    ) -> None:
        super().__init__(setting, blueprint, blend)
        if not max_interval >= 1.0:
            raise ValueError(f"max_interval must be at least 1 epoch, got {max_interval}")
        self.max_interval = max_interval

    def wants_seed(self, situation: Situation) -> bool:
        """True once the interval for the present gap has passed since the start or the last planting."""
        train = situation.report.train_accuracy_pct
        if train is None:
            return False
        waited = situation.report.epochs_done - self.memory[situation.report.env_id].last_planted
        return waited >= fragrow_interval(self.max_interval, train - situation.report.val_accuracy_pct)


def fragrow_interval(max_interval: float, gap_pp: float) -> float:
    """Epochs between plantings for a gap between training and validation accuracy, in points."""
    return max_interval / (1.0 + math.exp(min(4.0 - gap_pp, 700.0)))


@dataclass(slots=True)
class AuditionMemory(EnvMemory):
    """What the heuristic remembers too."""

    hopeless_epochs: dict[str, int] = field(default_factory=dict)
    """Seed id -> epochs in a row in which its forecast was not positive."""
    worth: dict[str, float] = field(default_factory=dict)
    """Blueprint -> what its last seed was worth: points brought, or the forecast that sent it away."""


class HeuristicController(RuleController):
    """Auditions blueprints behind the host, blends what promises to help, keeps what does. Nothing is learned.

    Args:
        plateau_epochs: Epochs without a gain of half a point after which seeds are auditioned; 0 does not wait. An
            audition costs the host nothing, and a host that sees keeps gaining until it is too late to plant.
        audition_epochs: Epochs in a row with a forecast of no gain after which an audition ends.
    """

    memory_type = AuditionMemory

    def __init__(
        self, setting: Setting, plateau_epochs: int = 0, audition_epochs: int = 3, blend: str = "linear_fast"
    ) -> None:
        super().__init__(setting, None, blend)
        if plateau_epochs < 0:
            raise ValueError(f"plateau_epochs must be at least 0, got {plateau_epochs}")
        if audition_epochs < 1:
            raise ValueError(f"audition_epochs must be at least 1, got {audition_epochs}")
        self.plateau_epochs = plateau_epochs
        self.audition_epochs = audition_epochs

    def wants_seed(self, situation: Situation) -> bool:
        """True while the host is stuck, or has settled for good."""
        signals = situation.report.signals
        return signals.stable or signals.plateau_epochs >= self.plateau_epochs

    def settle(self, situation: Situation) -> ActionSpec | None:
        """Also ends auditions that lead nowhere."""
        for slot in situation.slots(SeedStage.TRAINING):
            hopeless = self._auditions(situation).hopeless_epochs.get(slot.seed_id or "", 0)
            if hopeless >= self.audition_epochs and slot.slot_id in situation.legal_slots(LifecycleOp.PRUNE):
                return situation.on(LifecycleOp.PRUNE, slot.slot_id)
        return super().settle(situation)

    def trusts(self, slot: SlotReport) -> bool:
        """Blends only what is forecast to help."""
        return slot.predicted_gain is not None and slot.predicted_gain > 0.0

    def choose_blueprint(self, situation: Situation, slot_id: str) -> str | None:
        """The largest blueprint that had no seed yet; then the one that was worth most, if any was worth anything."""
        legal = situation.legal_blueprints(slot_id)
        worth = self._auditions(situation).worth
        living = {slot.blueprint for slot in situation.report.slots if slot.stage.is_live}
        untried = [name for name in legal if name not in worth and name not in living]
        if untried:
            return situation.largest(slot_id, untried)
        proven = [name for name in legal if worth.get(name, 0.0) > 0.0]
        return max(proven, key=lambda name: worth[name]) if proven else None

    def update(self, situation: Situation, op: LifecycleOp) -> None:
        """Notes forecasts and contributions of every seed."""
        super().update(situation, op)
        shown = self._auditions(situation)
        for slot in situation.report.slots:
            if slot.seed_id is None or slot.blueprint is None:
                continue
            if slot.stage is SeedStage.TRAINING and slot.predicted_gain is not None:
                hopeless = slot.predicted_gain <= 0.0
                shown.hopeless_epochs[slot.seed_id] = shown.hopeless_epochs.get(slot.seed_id, 0) + 1 if hopeless else 0
                if hopeless:
                    shown.worth[slot.blueprint] = slot.predicted_gain
            elif slot.contribution_pp is not None:
                shown.worth[slot.blueprint] = slot.contribution_pp

    def _auditions(self, situation: Situation) -> AuditionMemory:
        memory = self.memory[situation.report.env_id]
        assert isinstance(memory, AuditionMemory)
        return memory
