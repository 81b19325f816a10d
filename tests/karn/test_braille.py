"""Curves of braille dots: every value has its place, gaps stay gaps, and sizes are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.karn.braille import LABEL_WIDTH, Curve, plot


def lines(values: list[float | None], width: int = 12, height: int = 2) -> list[str]:
    return plot([Curve(name="a", values=values, style="red")], width, height).plain.split("\n")


def test_a_rising_curve_rises_from_corner_to_corner() -> None:
    top, bottom = lines([0.0, 1.0], width=LABEL_WIDTH + 1 + 2, height=2)
    assert top.startswith("      1│")
    assert bottom.startswith("      0│")
    assert bottom[LABEL_WIDTH + 1] != " "
    assert top[LABEL_WIDTH + 1] == " "
    assert top[-1] != " "
    assert bottom[-1] == " "


def test_what_was_not_measured_is_a_gap() -> None:
    whole = lines([1.0] * 8, width=LABEL_WIDTH + 1 + 4, height=1)
    broken = lines([1.0, 1.0, None, None, math.nan, math.inf, 1.0, 1.0], width=LABEL_WIDTH + 1 + 4, height=1)
    assert " " not in whole[0][LABEL_WIDTH + 1 :]
    assert broken[0][LABEL_WIDTH + 1 :].count(" ") == 2


def test_the_newest_value_of_a_long_curve_is_at_the_right_edge() -> None:
    top, bottom = lines([0.0] * 999 + [1.0])
    assert top[-1] != " "
    assert top[LABEL_WIDTH + 1 : -1].strip() == ""
    assert " " not in bottom[LABEL_WIDTH + 1 :]


@given(
    values=st.lists(st.none() | st.floats(), max_size=200),
    width=st.integers(0, 60),
    height=st.integers(0, 8),
)
def test_any_values_fill_exactly_the_given_space(values: list[float | None], width: int, height: int) -> None:
    drawn = lines(values, width, height)
    assert len(drawn) == max(height, 1)
    assert {len(line) for line in drawn} == {LABEL_WIDTH + 1 + max(width - LABEL_WIDTH - 1, 1)}


@pytest.mark.parametrize("value", [0.0, -123456.789, 1e-300, 12.3456789, -1.5e200])
def test_labels_fit_their_place(value: float) -> None:
    assert lines([value], height=1)[0].index("│") == LABEL_WIDTH
