"""The base of all fixed controllers: one decision per env, made inside the masks, with a memory that can be saved."""

from __future__ import annotations

import copy
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from esper.leyline import (
    BLENDS,
    ActionExecutionResult,
    ActionMasks,
    ActionSpec,
    EpochReport,
    HostLayout,
    LifecycleConfig,
    LifecycleOp,
    SeedStage,
    SlotReport,
    check_known,
    derive_seed,
    record,
    wait,
)


@record
class Setting:
    """What a fixed controller is built for: the hosts, the limits of growth, and the seed of its random draws."""

    layout: HostLayout
    lifecycle: LifecycleConfig
    run_seed: int

    @property
    def room(self) -> float:
        """Parameters that seeds may have together."""
        budget = self.lifecycle.param_budget
        return math.inf if budget is None else budget - self.layout.host_params


@record
class Situation:
    """What a rule may know about one env."""

    report: EpochReport
    masks: ActionMasks
    setting: Setting

    @property
    def steps_left(self) -> int:
        """Decisions left in the episode, this one included."""
        return self.report.signals.horizon - self.report.epochs_done

    def slots(self, *stages: SeedStage) -> list[SlotReport]:
        """Slots in these stages, in execution order."""
        return [slot for slot in self.report.slots if slot.stage in stages]

    def legal_slots(self, op: LifecycleOp) -> list[str]:
        """Slots on which an op is legal now, in execution order."""
        row = self.masks.slot_by_op[op]
        return [slot_id for slot_id, legal in zip(self.setting.layout.slot_ids, row, strict=True) if legal]

    def legal_blueprints(self, slot_id: str) -> list[str]:
        """Blueprints that may be planted in a slot now, in head order."""
        layout = self.setting.layout
        row = self.masks.blueprint_by_slot[layout.slot_position(slot_id)]
        return [name for name, legal in zip(layout.blueprints, row, strict=True) if legal]

    def largest(self, slot_id: str, blueprints: Sequence[str]) -> str | None:
        """The blueprint with most parameters, the first of equals; None if there is no choice.

        A rule that knows nothing of blueprints starts with the most able one: what it cannot do, smaller ones of its
        kind cannot do either, and a budget shortens the list by itself.
        """
        return max(blueprints, key=lambda name: self.setting.layout.card(slot_id, name).params, default=None)

    def legal_blends(self) -> list[str]:
        """Blends that may be chosen now, in head order."""
        return [name for name, legal in zip(BLENDS, self.masks.blend, strict=True) if legal]

    def wait(self) -> ActionSpec:
        """Doing nothing."""
        return wait(self.report.env_id)

    def on(self, op: LifecycleOp, slot_id: str) -> ActionSpec:
        """An op on the seed in a slot."""
        return ActionSpec(env_id=self.report.env_id, op=op, slot=slot_id)

    def germinate(self, slot_id: str, blueprint: str, blend: str) -> ActionSpec:
        """Planting a seed."""
        return ActionSpec(
            env_id=self.report.env_id, op=LifecycleOp.GERMINATE, slot=slot_id, blueprint=blueprint, blend=blend
        )

    def rng(self, purpose: str) -> random.Random:
        """A generator for this decision alone, so that no decision depends on how many were made before."""
        report = self.report
        return random.Random(
            derive_seed(self.setting.run_seed, report.env_id, report.episode, report.epochs_done, purpose)
        )


def situations(state: ActionExecutionResult, setting: Setting) -> list[Situation]:
    """Every env of a state, in env order."""
    return [
        Situation(report=report, masks=masks, setting=setting)
        for report, masks in zip(state.reports, state.post_action_masks, strict=True)
    ]


def own_situations(state: ActionExecutionResult) -> list[Situation]:
    """Every env of a state as a rule without random draws sees it, in env order: hosts may differ."""
    return [
        Situation(
            report=report,
            masks=masks,
            setting=Setting(layout=context.layout, lifecycle=context.lifecycle, run_seed=0),
        )
        for report, masks, context in zip(state.reports, state.post_action_masks, state.contexts, strict=True)
    ]


Memory = TypeVar("Memory")


class Controller(ABC, Generic[Memory]):
    """A rule that looks at one env at a time. Runs in the same loop as a learned policy."""

    memory_type: type[Memory]
    """Dataclass of what the rule remembers of an episode."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.memory: dict[int, Memory] = {}
        """By env id, for the running episodes."""

    @abstractmethod
    def decide(self, situation: Situation) -> ActionSpec:
        """The choice for one env. It must be legal there."""

    @abstractmethod
    def start(self, situation: Situation) -> Memory:
        """The memory of an env at the start of its episode."""

    def update(self, situation: Situation, op: LifecycleOp) -> None:
        """Remembers what it needs of an env after a step in which it took `op`."""

    def begin(self, state: ActionExecutionResult) -> None:
        """Starts a round of episodes from their reset state; earlier ones are forgotten."""
        self.memory = {situation.report.env_id: self.start(situation) for situation in situations(state, self.setting)}

    def act(self, state: ActionExecutionResult) -> tuple[ActionSpec, ...]:
        """One spec per env, in env order. Where only waiting is legal, the rule is not asked."""
        return tuple(
            situation.wait() if situation.masks.op.count(True) == 1 else self.decide(situation)
            for situation in situations(state, self.setting)
        )

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        """Updates the memory of every env whose episode was not over."""
        for situation, outcome in zip(situations(after, self.setting), after.outcomes, strict=True):
            if outcome.applied:
                self.update(situation, outcome.op)

    def state_dict(self) -> dict[str, Any]:
        """The memory by env, as plain JSON."""
        return {str(env_id): asdict(memory) for env_id, memory in self.memory.items()}  # type: ignore[call-overload]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a saved memory."""
        self.memory = {int(env_id): self.load_memory(copy.deepcopy(saved)) for env_id, saved in state.items()}

    def load_memory(self, saved: dict[str, Any]) -> Memory:
        """One env's memory from its JSON form."""
        return self.memory_type(**saved)


@dataclass(slots=True)
class NoMemory:
    """Of a rule that looks at the present only."""


class StatelessController(Controller[NoMemory]):
    """A rule without a memory."""

    memory_type = NoMemory

    def start(self, situation: Situation) -> NoMemory:
        """Nothing to remember."""
        return NoMemory()


def life_epochs(lifecycle: LifecycleConfig, blend: str) -> int:
    """Steps from planting a seed to the first step at which it can be kept."""
    return lifecycle.min_training + BLENDS[blend].ramp_epochs


def check_names(layout: HostLayout, blueprint: str | None, blend: str) -> None:
    """Refuses names no slot of this host can use, before an episode starts.

    Raises:
        ValueError: The blueprint is unknown or fits nowhere, or the blend is unknown.
    """
    check_known("blend", blend, BLENDS)
    if blueprint is None:
        return
    if not any(layout.card(slot_id, blueprint).fits for slot_id in layout.slot_ids):
        raise ValueError(f"blueprint {blueprint!r} fits no slot of this {layout.topology} host")
