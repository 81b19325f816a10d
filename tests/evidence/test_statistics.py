"""Intervals cover as often as they say, and odd data gives odd answers rather than crashes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.evidence import statistics
from esper.evidence.statistics import (
    compare_samples,
    difference_of_policies,
    holm,
    paired_difference,
    require_libraries,
    sign_flip_p,
)

numbers = st.floats(-50, 50, allow_nan=False).map(lambda value: round(value, 3))


@pytest.mark.parametrize("skewed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_interval_covers_the_true_mean_at_its_rate(skewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    chance = random.Random(1)
    covered = 0
    for _ in range(200):
        # Exponential draws have mean 1 and lean far to one side.
        sample = [chance.expovariate(1) if skewed else chance.gauss(1, 0.6) for _ in range(20)]
        found = paired_difference(sample)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1 <= found.high
    # A percentile interval covers 92 % and 88 % of the same samples.
    assert (0.9 if skewed else 0.93) <= covered / 200 <= 0.98


def test_the_two_level_interval_covers_the_mean_over_policies() -> None:
    chance = random.Random(2)
    covered, width_one_level = 0, 0
    for _ in range(150):
        by_seed = [chance.gauss(0, 0.5) for _ in range(20)]
        table = [
            [1 + skill + luck + chance.gauss(0, 0.3) for luck in by_seed]
            for skill in (chance.gauss(0, 1) for _ in range(6))
        ]
        found, single = difference_of_policies(table), paired_difference(table[0])
        assert found.low is not None
        assert found.high is not None
        assert single.low is not None
        assert single.high is not None
        covered += found.low <= 1 <= found.high
        width_one_level += single.low <= 1 <= single.high
    assert covered / 150 >= 0.89
    assert width_one_level / 150 < 0.7, "run seeds of one policy say little about the next policy"


def test_fewer_than_ten_pairs_have_no_interval_and_no_p() -> None:
    found = paired_difference([1.0, 2.0, 3.0, 0.0, -1.0, 1.0, 2.0, 2.0, 1.0])
    assert (found.low, found.high, found.p) == (None, None, None)
    assert (found.wins, found.ties, found.losses) == (7, 1, 1)
    assert found.mean == pytest.approx(11 / 9)
    assert paired_difference([*range(10)]).low is not None


def test_fewer_than_five_policies_say_nothing_about_the_method() -> None:
    table = [[float(seed + policy) for seed in range(20)] for policy in range(5)]
    assert difference_of_policies(table[:4]).low is None
    assert difference_of_policies(table).low is not None
    assert difference_of_policies(table[:1]) == paired_difference(table[0])
    with pytest.raises(ValueError, match="same run seeds"):
        difference_of_policies([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("value", [0.0, 2.5, -2.5])
def test_equal_differences_are_certain(value: float) -> None:
    found = paired_difference([value] * 20)
    assert found.low == found.high == found.mean == value
    assert found.p == (1.0 if value == 0 else pytest.approx(0.0, abs=0.01))


def test_one_pair_that_differs_makes_no_interval_out_of_nothing() -> None:
    found = paired_difference([0.0] * 19 + [1.0])
    assert (found.low, found.high) == (None, None)
    assert found.p == 1.0


@settings(max_examples=25, deadline=None)
@given(st.lists(numbers, min_size=10, max_size=24), st.randoms(use_true_random=False))
def test_order_never_matters_and_the_mean_is_inside(values: list[float], chance: random.Random) -> None:
    found = paired_difference(values)
    shuffled = list(values)
    chance.shuffle(shuffled)
    assert paired_difference(shuffled) == found
    assert found.wins + found.ties + found.losses == found.num_pairs == len(values)
    if found.low is not None and found.high is not None:
        assert found.low <= found.high


def test_sign_flips_know_a_sure_thing_from_a_toss() -> None:
    assert sign_flip_p([1.0] * 12) < 0.01
    assert sign_flip_p([1.0, -1.0] * 6) > 0.5


def test_holm_multiplies_the_smallest_by_the_number_of_tests() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {
        "a": pytest.approx(0.03),
        "b": pytest.approx(0.06),
        "c": pytest.approx(0.06),
    }
    assert holm({}) == {}


def test_samples_are_compared_by_their_means() -> None:
    chance = random.Random(3)
    before, after = [[chance.gauss(mean, 1) for _ in range(40)] for mean in (0, 1)]
    low, high = compare_samples(before, after)
    assert low is not None
    assert high is not None
    assert 0 < low < 1 < high < 2
    assert compare_samples([1.0] * 20, [1.0] * 20) == (None, None)
    assert compare_samples(before[:9], after) == (None, None)


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.evidence.statistics.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"arch.*pip install 'esper-growth\[evidence\]'"):
        require_libraries()
