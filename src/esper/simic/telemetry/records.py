"""The small records that emitters take beside the payloads themselves. Plain numbers, never tensors."""

from __future__ import annotations

from collections.abc import Mapping

from esper.leyline import HeadDecision, record


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

    forced: bool
    """True where nothing else was legal."""
    value: float | None
    log_prob: float | None
    heads: Mapping[str, HeadDecision]
    """Only the heads the op uses."""
