"""What the agent hands out: TypedDicts, all keys required. No behaviour, no torch.

A meta test compares the head keys with `HEADS`, so a new head fails until it is added here.
"""

from __future__ import annotations

from typing import TypedDict

from esper.leyline import GradientStats, HeadEntropies, PPOUpdateMetrics

__all__ = ["ActionDict", "GradientStats", "HeadEntropies", "HeadLogProbs", "PPOUpdateMetrics"]


class ActionDict(TypedDict):
    """One env's choice as indices. Heads the op does not use hold 0."""

    slot: int
    blueprint: int
    blend: int
    op: int


class HeadLogProbs(TypedDict):
    """Log-probability of each head's choice; exactly 0.0 where there was nothing to choose."""

    slot: float
    blueprint: float
    blend: float
    op: float
