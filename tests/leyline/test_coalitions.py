"""Attribution from coalition tables: against brute force, and never from what was not measured."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    CoalitionTable,
    coalition_mask,
    coalitions_to_measure,
    contribution,
    full_coalition,
    interaction,
    interaction_sum,
    shapley,
    solo,
)

POINTS = st.floats(min_value=0.0, max_value=100.0, allow_nan=False)


@st.composite
def games(draw: st.DrawFn, max_players: int = 3) -> tuple[dict[int, float], int]:
    players = draw(st.integers(1, max_players))
    size = 2**players
    return dict(enumerate(draw(st.lists(POINTS, min_size=size, max_size=size)))), players


def shapley_by_permutations(values: dict[int, float], players: int, player: int) -> float:
    """The definition: average over all orders in which players can arrive."""
    total = 0.0
    for order in itertools.permutations(range(players)):
        before = sum(1 << other for other in order[: order.index(player)])
        total += values[before | 1 << player] - values[before]
    return total / math.factorial(players)


@given(games())
def test_shapley_agrees_with_the_average_over_arrival_orders(game: tuple[dict[int, float], int]) -> None:
    values, players = game
    found = shapley(values, players)
    assert found is not None
    for player in range(players):
        assert found[player] == pytest.approx(shapley_by_permutations(values, players, player), abs=1e-9)


@given(games())
def test_shapley_shares_out_the_total_gain_exactly(game: tuple[dict[int, float], int]) -> None:
    values, players = game
    found = shapley(values, players)
    assert found is not None
    gain = values[full_coalition(players)] - values[0]
    assert gain is not None
    assert math.fsum(found) == pytest.approx(gain, abs=1e-9)


@given(games(), st.permutations(range(3)))
def test_relabelling_players_relabels_their_values(game: tuple[dict[int, float], int], order: list[int]) -> None:
    values, players = game
    order = [new for new in order if new < players]
    renamed = {
        sum(1 << order[player] for player in range(players) if mask >> player & 1): points
        for mask, points in values.items()
    }
    old, new = shapley(values, players), shapley(renamed, players)
    assert old is not None
    assert new is not None
    for player in range(players):
        assert new[order[player]] == pytest.approx(old[player], abs=1e-9)
        assert contribution(renamed, players, order[player]) == contribution(values, players, player)


@given(games())
def test_a_player_that_changes_nothing_is_worth_nothing(game: tuple[dict[int, float], int]) -> None:
    values, players = game
    dummy = players
    extended = {mask: values[mask & full_coalition(players)] for mask in range(2 ** (players + 1))}
    found = shapley(extended, players + 1)
    assert found is not None
    assert found[dummy] == pytest.approx(0.0, abs=1e-9)
    assert contribution(extended, players + 1, dummy) == 0.0
    assert solo(extended, dummy) == 0.0


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=3), st.integers(0, 50))
def test_in_an_additive_game_all_attributions_agree(weights: list[int], base: int) -> None:
    players = len(weights)
    values = {mask: float(base + sum(w for i, w in enumerate(weights) if mask >> i & 1)) for mask in range(2**players)}
    found = shapley(values, players)
    assert found is not None
    for player, weight in enumerate(weights):
        assert found[player] == pytest.approx(weight, abs=1e-9)
        assert contribution(values, players, player) == weight
        assert solo(values, player) == weight
        assert interaction_sum(values, players, player) == 0.0


def test_interaction_of_a_pair_is_what_they_bring_only_together() -> None:
    values = {0b00: 50.0, 0b01: 53.0, 0b10: 51.0, 0b11: 60.0}
    assert interaction(values, 0, 1) == 6.0
    assert interaction_sum(values, 2, 0) == 6.0


@pytest.mark.parametrize("players", [0, 1, 2, 3])
def test_up_to_three_players_every_coalition_is_measured_once(players: int) -> None:
    assert coalitions_to_measure(players, 0) == tuple(range(2**players))


@given(st.integers(4, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, 2**n - 1))))
def test_beyond_three_players_contributions_stay_measurable_and_the_rest_is_unmeasured(case: tuple[int, int]) -> None:
    players, fossils = case
    masks = coalitions_to_measure(players, fossils)
    assert len(set(masks)) == len(masks) <= players + 3
    values = {mask: float(mask) for mask in masks}
    assert all(contribution(values, players, player) == 2**player for player in range(players))
    assert fossils in values
    assert shapley(values, players) is None


def test_what_was_not_measured_is_none() -> None:
    values = {0b11: 60.0, 0b01: 55.0}
    assert contribution(values, 2, 1) == 5.0
    assert contribution(values, 2, 0) is None
    assert solo(values, 0) is None
    assert interaction(values, 0, 1) is None
    assert interaction_sum(values, 2, 0) is None
    assert shapley(values, 2) is None


def test_a_mask_enables_exactly_the_named_slots() -> None:
    table = CoalitionTable(slot_ids=("r0c0", "r0c2"), accuracy_pct={}, loss={})
    assert [coalition_mask(table, slots) for slots in ([], ["r0c2"], ["r0c0", "r0c2"])] == [0b00, 0b10, 0b11]
