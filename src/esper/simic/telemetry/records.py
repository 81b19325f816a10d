"""The small records that emitters take beside the payloads themselves. Plain numbers, never tensors."""

from __future__ import annotations

from collections.abc import Mapping

from esper.leyline import HeadDecision, SeenByPolicy, record


def brief(value: float) -> float:
    """A figure as the steps of a log keep it: seven significant digits, which is what single precision has."""
    return float("%.7g" % value)  # noqa: UP031 (a tenth faster, and there are dozens per step)


def price(value: float) -> float:
    """A reward as the steps of a log keep it: to nine places, so that terms still sum to their total."""
    return round(value, 9)


def brief_or_none(value: float | None) -> float | None:
    """The same of a figure that may not have been measured."""
    return None if value is None else brief(value)


@record
class EnvContext:
    """One epoch of one env: the four ids of its events."""

    round: int
    episode: int
    env: int
    epoch: int


@record
class UpdateClock:
    """The policy update at the end of a round."""

    round: int


Clock = EnvContext | UpdateClock
"""When something is told, or a level is asked for."""


@record
class Decision:
    """What a controller knew when it chose. Controllers that do not draw have no record."""

    value: float | None
    log_prob: float | None
    heads: Mapping[str, HeadDecision]
    """Only the heads the op uses."""
    seen: SeenByPolicy | None = None
    """What it decided on, where somebody looks closer."""
