"""Splits are disjoint, complete, stratified and the same for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.runtime.data.splits import hold_out, spread

FROZEN = [0, 5, 13, 15, 23, 24, 34, 38]
LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=200).map(lambda labels: np.array(labels, dtype=np.int64))


@given(LABELS, st.data())
def test_held_out_rows_are_exact_disjoint_and_in_proportion(labels: np.ndarray, data: st.DataObject) -> None:
    num_held = data.draw(st.integers(1, len(labels) - 1))
    kept, held = hold_out(labels, num_held, "x")
    assert len(held) == num_held
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert list(kept) == sorted(kept)
    assert list(held) == sorted(held)
    for label in np.unique(labels):
        fair = (labels == label).sum() * num_held / len(labels)
        assert abs((labels[held] == label).sum() - fair) < 1


def test_rows_never_change() -> None:
    labels = np.arange(40) % 4
    _, held = hold_out(labels, 8, "anything")
    assert held.tolist() == FROZEN
    assert hold_out(labels, 8, "something else")[1].tolist() != FROZEN


@pytest.mark.parametrize("num_held", [0, 5])
def test_a_split_needs_rows_on_both_sides(num_held: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.4"):
        hold_out(np.zeros(5, dtype=np.int64), num_held, "x")


@given(st.integers(1, 500), st.integers(1, 500))
def test_spread_rows_are_distinct_ordered_and_even(num_rows: int, num_wanted: int) -> None:
    rows = spread(num_rows, num_wanted)
    assert len(rows) == min(num_rows, num_wanted)
    steps = np.diff(rows)
    assert rows[0] == 0
    assert rows[-1] < num_rows
    if len(steps):
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1
    assert num_rows - rows[-1] <= math.ceil(num_rows / len(rows))
