"""What a controller can say: ops, heads, blends. Append to the tables, never reorder: files and policies index them."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Literal

from esper.leyline.errors import check_known
from esper.leyline.record import record


class LifecycleOp(IntEnum):
    """One op per env and step. The value is the index of the op head."""

    WAIT = 0
    GERMINATE = 1
    ADVANCE = 2
    PRUNE = 3
    FOSSILIZE = 4


OPS: tuple[LifecycleOp, ...] = tuple(LifecycleOp)


HeadName = Literal["slot", "blueprint", "blend", "op"]


@record
class Head:
    """One part of a factored action."""

    name: HeadName
    ops: frozenset[LifecycleOp]
    """Ops for which the choice matters. The op head matters always."""
    sampling_position: int


_TARGETED = frozenset(OPS) - {LifecycleOp.WAIT}
_GERMINATE = frozenset({LifecycleOp.GERMINATE})

HEADS: tuple[Head, ...] = (
    Head(name="slot", ops=_TARGETED, sampling_position=1),
    Head(name="blueprint", ops=_GERMINATE, sampling_position=2),
    Head(name="blend", ops=_GERMINATE, sampling_position=3),
    Head(name="op", ops=frozenset(OPS), sampling_position=0),
)
HEAD_NAMES: tuple[HeadName, ...] = tuple(head.name for head in HEADS)
SAMPLING_ORDER: tuple[str, ...] = tuple(h.name for h in sorted(HEADS, key=lambda head: head.sampling_position))


@cache
def heads_used_by(op: LifecycleOp) -> tuple[str, ...]:
    """Names of the heads whose choice matters for this op, in storage order."""
    return tuple(head.name for head in HEADS if op in head.ops)


def _linear(t: float, steepness: float) -> float:
    return t


def _sigmoid(t: float, steepness: float) -> float:
    low = 1.0 / (1.0 + math.exp(0.5 * steepness))
    raw = 1.0 / (1.0 + math.exp(-steepness * (t - 0.5)))
    return (raw - low) / (1.0 - 2.0 * low)


CURVES: dict[str, Callable[[float, float], float]] = {"linear": _linear, "sigmoid": _sigmoid}
OPERATORS: tuple[str, ...] = ("add", "gate", "multiply")


@record
class BlendSpec:
    """How the output of a seed enters its slot: by which operator, along which curve, over how many epochs."""

    name: str
    operator: str
    curve: str
    steepness: float
    ramp_epochs: int

    def alpha(self, done: int) -> float:
        """Blend strength after `done` of `ramp_epochs` epochs: exactly 0.0 at the start and 1.0 at the end."""
        if done <= 0:
            return 0.0
        if done >= self.ramp_epochs:
            return 1.0
        return min(1.0, max(0.0, CURVES[self.curve](done / self.ramp_epochs, self.steepness)))


def _blend(name: str, operator: str, curve: str, steepness: float, ramp_epochs: int) -> BlendSpec:
    return BlendSpec(name=name, operator=operator, curve=curve, steepness=steepness, ramp_epochs=ramp_epochs)


BLENDS: dict[str, BlendSpec] = {
    blend.name: blend
    for blend in (
        _blend("linear_fast", "add", "linear", 0.0, 3),
        _blend("linear", "add", "linear", 0.0, 5),
        _blend("sigmoid", "add", "sigmoid", 12.0, 5),
        _blend("sigmoid_slow", "add", "sigmoid", 6.0, 8),
        _blend("gated", "gate", "linear", 0.0, 5),
        _blend("multiply", "multiply", "linear", 0.0, 5),
    )
}


def get_blend(name: str) -> BlendSpec:
    """Looks a blend up by name.

    Raises:
        ValueError: No blend has that name; the message lists the known ones.
    """
    check_known("blend", name, BLENDS)
    return BLENDS[name]
