"""Outputs of a model with some of its seeds switched off, without running twice what is the same.

What a submodule gave before the first switched seed is kept and given again instead of being computed again. Every
output has the bits of a pass of its own: that is checked on the first batch of each set of seeds, and where it does not
hold, or the model calls its submodules in another order, every coalition gets a pass of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esper.growth.network import AttachedNetwork, same_outputs
from esper.growth.structure import map_tensors, tensors
from esper.growth.tracing import Call, trace

Coalition = frozenset[str]
"""Slots whose seeds are on."""
Run = Callable[[], Any]
"""One pass of the model over a batch."""


class OrderChanged(Exception):
    """The model called a submodule that the plan did not expect."""


@dataclass(slots=True)
class Step:
    """One call of the plan."""

    module: nn.Module
    after: int
    """Position of the next call that is not inside this one."""
    seeds_before: int
    """Slots, in order, that have had their say before this call ends."""
    is_kept: bool
    """True if its output is worth keeping: it ends before a slot, and no call around it does."""


class CoalitionPasses:
    """Runs a model once per coalition and batch, sharing what coalitions have in common.

    Args:
        network: The growing network, in eval mode while it is used.
    """

    def __init__(self, network: AttachedNetwork) -> None:
        self.network = network
        self.fell_back: str | None = None
        """Why coalitions get passes of their own; None while they share."""
        self._plan: list[Step] = []
        self._slots: tuple[str, ...] = ()
        """Blended slots in execution order, for which the plan was made; none: there is no plan."""
        self._checked = False
        self._overwritten: set[int] = set()
        """Calls of the plan whose output is overwritten in place later on."""

    def outputs(self, run: Run, coalitions: Sequence[Coalition]) -> list[Any]:
        """One output per coalition. `run` is called once for each of them, without gradients."""
        with torch.no_grad():
            if len(coalitions) == 1 or self.fell_back is not None:
                return self.separate(run, coalitions)
            self._prepare(run)
            try:
                shared = self._shared(run, coalitions)
            except OrderChanged:
                self.fell_back = "the model changed the order in which it calls its submodules"
                return self.separate(run, coalitions)
            if not self._checked:
                self._checked = True
                expected = self.separate(run, coalitions)
                if not all(map(same_outputs, expected, shared)):
                    self.fell_back = "sharing did not give the bits of separate passes"
                    return expected
            return shared

    def separate(self, run: Run, coalitions: Sequence[Coalition]) -> list[Any]:
        """One output per coalition, each from a pass of its own."""
        outputs = []
        for coalition in coalitions:
            with self.network.coalition(coalition):
                outputs.append(run())
        return outputs

    # ---- the plan

    def _prepare(self, run: Run) -> None:
        """Records the calls of a pass, if the set of blended seeds is new."""
        slots = tuple(slot.spec.slot_id for slot in self.network.all_slots() if slot.stage.is_blended)
        if slots == self._slots:
            return
        calls = trace(self.network.model, run)
        sites = {self.network.slot(slot_id).site.name: slot_id for slot_id in slots}
        ends = {sites[call.name]: call.end for call in calls if call.name in sites}
        self._slots = tuple(sorted(slots, key=lambda slot_id: ends[slot_id]))
        self._plan = _make_plan(calls, [ends[slot_id] for slot_id in self._slots])
        self._checked = False
        self._overwritten = set()

    # ---- sharing

    def _shared(self, run: Run, coalitions: Sequence[Coalition]) -> list[Any]:
        # Neighbours in this order agree for as long as possible, so one kept output per call is enough.
        order = sorted(coalitions, key=lambda coalition: [slot_id not in coalition for slot_id in self._slots])
        while True:
            replay = _Replay(self._plan, self._overwritten)
            found: dict[Coalition, Any] = {}
            with replay.installed():
                for coalition in order:
                    replay.start([slot_id in coalition for slot_id in self._slots])
                    with self.network.coalition(coalition):
                        found[coalition] = run()
                    spoiled = replay.spoiled()
                    if spoiled:
                        break
            if not spoiled:
                return [found[coalition] for coalition in coalitions]
            self._overwritten |= spoiled  # from now on copies of these are kept


def _make_plan(calls: Sequence[Call], ends: Sequence[int]) -> list[Step]:
    """The plan for calls in the order of their start, and slots whose sites' calls end at these times."""
    starts = [call.start for call in calls]
    around: list[Call] = []
    plan = []
    for call in calls:
        while around and around[-1].end < call.start:
            around.pop()
        # Ends grow outwards, so the innermost call around this one is the first that could be kept in its place.
        first = around[-1].end if around else math.inf
        plan.append(
            Step(
                module=call.module,
                after=bisect_left(starts, call.end),
                seeds_before=sum(end < call.end for end in ends),
                is_kept=any(call.end <= end < first for end in ends),
            )
        )
        around.append(call)
    return plan


@dataclass(slots=True)
class _Kept:
    prefix: tuple[bool, ...]
    """Which of the seeds before it were on."""
    output: Any
    versions: tuple[int, ...]
    """How often each tensor had been overwritten when it was kept."""


class _Replay:
    """Stands in for the forward passes of all submodules during the passes over one batch."""

    def __init__(self, plan: Sequence[Step], copied: set[int]) -> None:
        self._plan = plan
        self._copied = copied
        self._kept: dict[int, _Kept] = {}
        self._position = 0
        self._seeds: tuple[bool, ...] = ()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every submodule asks here first, for the block."""
        modules = {id(step.module): step.module for step in self._plan}
        own = {key: module.__dict__["forward"] for key, module in modules.items() if "forward" in module.__dict__}
        try:
            for module in modules.values():
                module.forward = self._stand_in(module, module.forward)
            yield
        finally:
            for key, module in modules.items():
                module.__dict__.pop("forward", None)
                if key in own:
                    module.forward = own[key]

    def start(self, seeds: Sequence[bool]) -> None:
        """Begins a pass with these seeds on."""
        self._position, self._seeds = 0, tuple(seeds)

    def _stand_in(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            position = self._position
            if position >= len(self._plan) or self._plan[position].module is not module:
                raise OrderChanged
            step = self._plan[position]
            if not step.is_kept:
                self._position += 1
                return forward(*args, **kwargs)
            prefix = self._seeds[: step.seeds_before]
            kept = self._kept.get(position)
            if kept is None or kept.prefix != prefix:
                self._position += 1
                output = forward(*args, **kwargs)
                kept = self._keep(position, prefix, output)
            self._position = step.after
            return map_tensors(kept.output, torch.clone) if position in self._copied else kept.output

        return call

    def _keep(self, position: int, prefix: tuple[bool, ...], output: Any) -> _Kept:
        if position in self._copied:
            output = map_tensors(output, torch.clone)
        kept = _Kept(prefix, output, _versions(output))
        self._kept[position] = kept
        return kept

    def spoiled(self) -> set[int]:
        """Calls whose kept output was overwritten since."""
        return {
            at for at, kept in self._kept.items() if at not in self._copied and kept.versions != _versions(kept.output)
        }


def _versions(output: Any) -> tuple[int, ...]:
    return tuple(tensor._version for _, tensor in tensors(output))
