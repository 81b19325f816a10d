"""Tamiyo's own rules: audition blueprints behind a settled host, blend what promises to help, keep what does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.leyline import ActionSpec, LifecycleOp, SeedStage, SlotReport
from esper.tamiyo.rules import RuleController
from esper.tamiyo.situation import Setting, Situation


@dataclass(slots=True)
class Auditions:
    """What one env's seeds have shown in this episode."""

    hopeless_epochs: dict[str, int] = field(default_factory=dict)
    """Seed id -> epochs in a row in which its forecast was not positive."""
    worth: dict[str, float] = field(default_factory=dict)
    """Blueprint -> what its last seed was worth: points brought, or the forecast that sent it away."""


class HeuristicController(RuleController):
    """Rules with documented constants, and nothing learned."""

    def __init__(self, setting: Setting, plateau_epochs: int, audition_epochs: int, blend: str) -> None:
        super().__init__(setting, None, blend)
        if plateau_epochs < 1:
            raise ValueError(f"plateau_epochs must be at least 1, got {plateau_epochs}")
        if audition_epochs < 1:
            raise ValueError(f"audition_epochs must be at least 1, got {audition_epochs}")
        self.plateau_epochs = plateau_epochs
        self.audition_epochs = audition_epochs
        self._auditions: dict[int, Auditions] = {}

    def wants_seed(self, situation: Situation) -> bool:
        """True while the host is stuck, or has settled for good."""
        signals = situation.report.signals
        return signals.stable or signals.plateau_epochs >= self.plateau_epochs

    def settle(self, situation: Situation) -> ActionSpec | None:
        """Also ends auditions that lead nowhere."""
        for slot in situation.slots(SeedStage.TRAINING):
            hopeless = self._shown(situation).hopeless_epochs.get(slot.seed_id or "", 0)
            if hopeless >= self.audition_epochs and slot.slot_id in situation.legal_slots(LifecycleOp.PRUNE):
                return situation.on(LifecycleOp.PRUNE, slot.slot_id)
        return super().settle(situation)

    def trusts(self, slot: SlotReport) -> bool:
        """Blends only what is forecast to help."""
        return slot.predicted_gain is not None and slot.predicted_gain > 0.0

    def choose_blueprint(self, situation: Situation, slot_id: str) -> str | None:
        """The largest blueprint that had no seed yet; then the one that was worth most, if any was worth anything."""
        legal = situation.legal_blueprints(slot_id)
        worth = self._shown(situation).worth
        living = {slot.blueprint for slot in situation.report.slots if slot.stage.is_live}
        untried = [name for name in legal if name not in worth and name not in living]
        if untried:
            return situation.largest(slot_id, untried)
        proven = [name for name in legal if worth.get(name, 0.0) > 0.0]
        return max(proven, key=lambda name: worth[name]) if proven else None

    def meet(self, situation: Situation) -> None:
        """Starts with no opinion."""
        super().meet(situation)
        self._auditions[situation.report.env_id] = Auditions()

    def learn(self, situation: Situation, op: LifecycleOp) -> None:
        """Notes forecasts and contributions of every seed."""
        super().learn(situation, op)
        shown = self._shown(situation)
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

    def forget(self) -> None:
        """Drops opinions of earlier episodes."""
        super().forget()
        self._auditions.clear()

    def state_dict(self) -> dict[str, Any]:
        """Evidence and opinions, by env."""
        shown = {str(env_id): asdict(auditions) for env_id, auditions in self._auditions.items()}
        return {"evidence": super().state_dict(), "auditions": shown}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with saved evidence and opinions."""
        super().load_state_dict(state["evidence"])
        self._auditions = {int(env_id): Auditions(**copy.deepcopy(a)) for env_id, a in state["auditions"].items()}

    def _shown(self, situation: Situation) -> Auditions:
        return self._auditions[situation.report.env_id]
