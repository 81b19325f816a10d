"""The optimizer record refuses nonsense and the schedule is a pure, falling function of the epoch."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import FINAL_LR_FACTOR, SCHEDULES, OptimSpec, lr_factor

GOOD = {"kind": "sgd", "lr": 0.05, "weight_decay": 5e-4, "momentum": 0.9, "schedule": "cosine"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "adam", "unknown optimizer 'adam'. Known: adamw, sgd"),
        ("schedule", "step", "unknown schedule 'step'. Known: constant, cosine"),
        ("lr", 0.0, "lr must be"),
        ("lr", math.inf, "lr must be"),
        ("lr", math.nan, "lr must be"),
        ("weight_decay", -1e-9, "weight_decay must be"),
        ("weight_decay", math.nan, "weight_decay must be"),
        ("momentum", 1.0, "momentum must be"),
        ("kind", "adamw", "momentum is for sgd"),
    ],
)
def test_bad_values_name_their_field(field: str, value: object, message: str) -> None:
    OptimSpec(**GOOD)
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        OptimSpec(**{**GOOD, field: value})


@given(st.integers(2, 300))
def test_cosine_falls_from_one_to_the_final_factor(horizon: int) -> None:
    factors = [lr_factor("cosine", epoch, horizon) for epoch in range(horizon)]
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(FINAL_LR_FACTOR)
    assert all(later < earlier for earlier, later in itertools.pairwise(factors))


@given(st.sampled_from(SCHEDULES), st.integers(1, 50))
def test_every_schedule_starts_at_the_full_rate(schedule: str, horizon: int) -> None:
    assert lr_factor(schedule, 0, horizon) == 1.0


def test_constant_stays() -> None:
    assert {lr_factor("constant", epoch, 40) for epoch in range(40)} == {1.0}


@pytest.mark.parametrize("epoch", [-1, 40])
def test_epochs_outside_the_episode_are_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.39"):
        lr_factor("cosine", epoch, 40)
