"""Rewards between tasks: decisions are compared inside a group, in its own units, and noise is not magnified."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.rewards.groups import ERROR_FLOOR, SPREAD_FLOOR, group_scales, twin_scales

RETURNS = st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=8)


@given(RETURNS, RETURNS)
def test_scaled_returns_of_every_group_have_mean_zero_and_no_more_than_unit_spread(
    first: list[float], second: list[float]
) -> None:
    groups = ["a"] * len(first) + ["b"] * len(second)
    scales = group_scales(groups, [*first, *second])
    for name, values in (("a", first), ("b", second)):
        own = [scale for scale, group in zip(scales, groups, strict=True) if group == name]
        scaled = [(value - scale.baseline) / scale.unit for value, scale in zip(values, own, strict=True)]
        assert statistics.fmean(scaled) == pytest.approx(0.0, abs=1e-6)
        assert statistics.pstdev(scaled) <= 1.0 + 1e-9


def test_an_easy_task_and_a_hard_one_count_the_same_but_noise_does_not() -> None:
    easy, hard, noise = [0.9, 0.95, 1.0], [0.1, 0.4, 0.7], [0.500, 0.501, 0.502]
    scales = group_scales([0, 0, 0, 1, 1, 1, 2, 2, 2], [*easy, *hard, *noise])
    best = [(v[-1] - s.baseline) / s.unit for v, s in zip((easy, hard, noise), scales[::3], strict=True)]
    assert best[0] == pytest.approx(best[1])
    assert best[2] == pytest.approx(0.001 / SPREAD_FLOOR)


def test_an_env_that_did_not_finish_judges_nobody() -> None:
    with_lost = group_scales(["a", "a", "a"], [0.2, None, 0.8])
    assert with_lost == [group_scales(["a", "a"], [0.2, 0.8])[0]] * 3
    assert group_scales(["a"], [None])[0].unit == SPREAD_FLOOR


def test_gains_over_the_waiting_twin_are_shares_of_the_error_it_was_left_with() -> None:
    groups, twins = ["a", "a", "b", "b"], [False, True, True, False]
    scales = twin_scales(groups, [0.75, 0.5, 0.95, 0.96], [0.75, 0.5, 0.99, 0.98], twins)
    assert (0.75 - scales[0].baseline) / scales[0].unit == pytest.approx(0.5)
    assert scales[3].unit == ERROR_FLOOR
    assert scales[1].baseline == 0.5
    with pytest.raises(ValueError, match=r"without a waiting twin: \['b'\]"):
        twin_scales(groups, [0.0] * 4, [0.0] * 4, [False, True, False, False])
