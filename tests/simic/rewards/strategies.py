"""Arbitrary episodes, lived by the simulated worker under its real masks and gates."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from esper.simic.rewards import RewardConfig
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import Step, play, random_chooser, world
from tests.simic.rewards.pricing import make_config

GROWING = (2, 3, 4, 1, 3)
"""Op weights under which seeds live long enough to be kept."""
PRUNING = (2, 3, 4, 2, 0)
"""Op weights under which every seed is pruned again."""


@dataclass(frozen=True)
class Episode:
    spec: SimulationSpec
    steps: list[Step]
    config: RewardConfig


@st.composite
def episodes(
    draw: st.DrawFn,
    *,
    op_weights: tuple[int, ...] = GROWING,
    may_crash: bool = True,
    max_slots: int = 5,
    families: tuple[str, ...] = ("contribution", "loss"),
) -> Episode:
    """Any number of slots, horizon, noise, discount, family and legal behaviour, with or without a rollback."""
    horizon = draw(st.integers(8, 30))
    crash = draw(st.none() | st.integers(0, horizon - 1)) if may_crash else None
    spec = world(
        draw(st.integers(1, max_slots)),
        horizon=horizon,
        noise_pp=draw(st.sampled_from([0.0, 0.5, 2.0])),
        rollback_epoch=crash,
    )
    config = make_config(
        spec,
        family=draw(st.sampled_from(families)),
        gamma=draw(st.sampled_from([0.9, 0.995, 1.0])),
        span=draw(st.sampled_from([2.0, 15.0, 60.0])),
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    return Episode(spec=spec, steps=play(spec, random_chooser(rng, op_weights)), config=config)
