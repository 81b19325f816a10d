"""Actions of a Gymnasium env by number: one number per joint choice of op, slot, blueprint and blend.

Choices of several dimensions would need masks that depend on each other, which masked learners elsewhere do not know:
what may be planted depends on the slot. So every joint choice is an action of its own, and masks are exact.
"""

# A joint choices

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from esper.leyline import BLENDS, OPS, Action, ActionMasks, HostLayout, LifecycleOp


def joint_choices(layouts: Sequence[HostLayout]) -> tuple[Action, ...]:
    """Every choice that can ever be legal in a host of one of these layouts; the first one waits."""
    return tuple(dict.fromkeys(choice for layout in layouts for choice in _choices(layout)))


def _choices(layout: HostLayout) -> Iterator[Action]:
    yield Action(op=LifecycleOp.WAIT)
    for op in OPS:
        if op not in (LifecycleOp.WAIT, LifecycleOp.GERMINATE):
            yield from (Action(op=op, slot=slot_id) for slot_id in layout.slot_ids)
    for slot_id, cards in zip(layout.slot_ids, layout.cards, strict=True):
        for card in cards:
            if card.fits:
                for blend in BLENDS:
                    yield Action(op=LifecycleOp.GERMINATE, slot=slot_id, blueprint=card.blueprint, blend=blend)


def legal_choices(choices: Sequence[Action], layout: HostLayout, masks: ActionMasks) -> npt.NDArray[np.bool_]:
    """`[A]`: which of them are legal now. What a host of this layout does not have never is."""
    slots = {slot_id: position for position, slot_id in enumerate(layout.slot_ids)}
    blueprints = {name: position for position, name in enumerate(layout.blueprints)}
    blends = dict(zip(BLENDS, masks.blend, strict=True))

    def is_legal(choice: Action) -> bool:
        if choice.slot is None:
            return masks.op[choice.op]
        slot = slots.get(choice.slot)
        if slot is None or not masks.slot_by_op[choice.op][slot]:
            return False
        if choice.blueprint is None or choice.blend is None:
            return True
        blueprint = blueprints.get(choice.blueprint)
        return blueprint is not None and masks.blueprint_by_slot[slot][blueprint] and blends[choice.blend]

    return np.fromiter(map(is_legal, choices), dtype=np.bool_, count=len(choices))
