"""Two configurations on the same hosts: paired episode by episode, or refused."""

from dataclasses import replace

import pytest

from esper.simic.training.dual_ab import check_comparable, compare, differing_fields
from esper.simic.training.vectorized import open_trainer
from esper.simic.training.vectorized_trainer import NeverStop
from tests.simic.training.runs import TINY, Listening

WAIT = replace(TINY, controller="wait_only")


def test_only_pairs_are_compared():
    check_comparable(TINY, replace(TINY, reward_mode="sparse"))
    with pytest.raises(ValueError, match="they differ in seed 0 and 1"):
        check_comparable(TINY, replace(TINY, seed=1))
    with pytest.raises(ValueError, match="nothing to compare"):
        check_comparable(TINY, TINY)
    assert differing_fields(TINY, WAIT) == ("controller",)


def test_both_sides_play_the_same_hosts_in_turns():
    heard = Listening(), Listening()
    with (
        open_trainer(WAIT, heard[0], NeverStop()) as a,
        open_trainer(replace(TINY, controller="random"), heard[1], NeverStop()) as b,
    ):
        told = []
        found = compare(a, b, told.append)
    first = [facts.before.reports for facts in (heard[0].steps[0], heard[1].steps[0])]
    assert [report.val_loss for report in first[0]] == [report.val_loss for report in first[1]]
    assert len(found.pairs) == 2 * 2
    assert len(told) == 2
    assert found.differences_pp(last_rounds=1) == tuple(pair.difference_pp for pair in found.pairs[2:])
    assert any(pair.params_ratio_b > 1.0 for pair in found.pairs)
    assert all(pair.params_ratio_a == 1.0 for pair in found.pairs)


def test_a_side_that_does_the_same_shows_no_difference():
    """The heuristic waits for a plateau, which four epochs do not show: both sides must then agree to the last bit."""
    with (
        open_trainer(WAIT, Listening(), NeverStop()) as a,
        open_trainer(replace(TINY, controller="plateau"), Listening(), NeverStop()) as b,
    ):
        found = compare(a, b)
    assert set(found.differences_pp(2)) == {0.0}
