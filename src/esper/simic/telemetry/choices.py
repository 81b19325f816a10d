"""Counts what a controller could have chosen and what it chose, head by head, over a round. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from esper.leyline import (
    BLENDS,
    OPS,
    SAMPLING_ORDER,
    ActionMasks,
    ActionOutcome,
    ActionSpec,
    ChoiceCount,
    ChoiceStats,
    HostLayout,
    heads_used_by,
)


class ChoiceCounter:
    """The counts of one round. Give it every decision of every env, then take the statistics."""

    def __init__(self, layout: HostLayout) -> None:
        self._layout = layout
        self._names: dict[str, tuple[str, ...]] = {
            "op": tuple(op.name for op in OPS),
            "slot": layout.slot_ids,
            "blueprint": layout.blueprints,
            "blend": tuple(BLENDS),
        }
        self.begin()

    def begin(self) -> None:
        """Starts a round."""
        self._noted: list[tuple[ActionMasks, ActionSpec, ActionOutcome]] = []
        self._legal = {head: dict.fromkeys(names, 0) for head, names in self._names.items()}
        self._chosen = {head: dict.fromkeys(names, 0) for head, names in self._names.items()}
        self._ok = {head: dict.fromkeys(names, 0) for head, names in self._names.items()}
        self._num_decisions = dict.fromkeys(self._names, 0)
        self._num_forced = dict.fromkeys(self._names, 0)

    def add(self, masks: ActionMasks, spec: ActionSpec, outcome: ActionOutcome) -> None:
        """Notes one decision, under the masks it was made with. Counting waits until somebody asks."""
        self._noted.append((masks, spec, outcome))

    def _count(self, masks: ActionMasks, spec: ActionSpec, outcome: ActionOutcome) -> None:
        for head in heads_used_by(spec.op):
            legal = [name for name, open_ in zip(self._names[head], self._row(head, masks, spec), strict=True) if open_]
            chosen = spec.op.name if head == "op" else getattr(spec, head)
            for name in legal:
                self._legal[head][name] += 1
            self._chosen[head][chosen] += 1
            self._ok[head][chosen] += outcome.applied
            self._num_decisions[head] += 1
            self._num_forced[head] += len(legal) == 1

    def stats(self, head: str) -> ChoiceStats:
        """The counts of one head; choices that were never legal are left out."""
        noted, self._noted = self._noted, []
        for each in noted:
            self._count(*each)
        return ChoiceStats(
            head=head,
            choices={
                name: ChoiceCount(
                    num_legal=self._legal[head][name],
                    num_chosen=self._chosen[head][name],
                    num_ok=self._ok[head][name],
                )
                for name in self._names[head]
                if self._legal[head][name]
            },
            num_decisions=self._num_decisions[head],
            num_forced=self._num_forced[head],
        )

    def others(self) -> list[ChoiceStats]:
        """The counts of every head but the op's."""
        return [self.stats(head) for head in SAMPLING_ORDER if head != "op"]

    def _row(self, head: str, masks: ActionMasks, spec: ActionSpec) -> Sequence[bool]:
        """What was legal for a head, given what was chosen before it."""
        if head == "op":
            return masks.op
        if head == "slot":
            return masks.slot_by_op[spec.op]
        if head == "blend":
            return masks.blend
        assert spec.slot is not None, f"{spec.op.name} chooses a blueprint without a slot"
        return masks.blueprint_by_slot[self._layout.slot_position(spec.slot)]
