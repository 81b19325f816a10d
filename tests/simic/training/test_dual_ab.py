"""Two configurations on the same hosts: paired episode by episode, or refused."""

from dataclasses import replace

import pytest

from esper.simic.training.dual_ab import check_pairable, differing_fields, paired_rounds
from esper.simic.training.vectorized import open_trainer
from tests.simic.training.runs import TINY, Listening

WAIT = replace(TINY, controller="wait_only")


def test_only_pairs_are_compared():
    check_pairable(TINY, replace(TINY, reward_mode="sparse"))
    with pytest.raises(ValueError, match="they differ in seed 0 and 1"):
        check_pairable(TINY, replace(TINY, seed=1))
    with pytest.raises(ValueError, match="nothing to compare"):
        check_pairable(TINY, TINY)
    assert differing_fields(TINY, WAIT) == ("controller",)


def test_both_sides_play_the_same_hosts_in_turns():
    heard = Listening(), Listening()
    with (
        open_trainer(WAIT, heard[0]) as a,
        open_trainer(replace(TINY, controller="random"), heard[1]) as b,
    ):
        *_, found = reported = list(paired_rounds(a, b))
    first = [facts.before.reports for facts in (heard[0].steps[0], heard[1].steps[0])]
    assert [report.val_loss for report in first[0]] == [report.val_loss for report in first[1]]
    assert [len(pairs) for pairs in found.pairs] == [2, 2]
    assert len(reported) == 2
    last = [(left.committed_accuracy_pct, right.committed_accuracy_pct) for left, right in found.pairs[-1]]
    assert found.differences_pp(last_rounds=1) == tuple(right - left for left, right in last)
    grown = [(left.params_ratio, right.params_ratio) for pairs in found.pairs for left, right in pairs]
    assert all(left == 1.0 for left, _ in grown)
    assert any(right > 1.0 for _, right in grown)


def test_a_side_that_does_the_same_shows_no_difference():
    """The heuristic waits for a plateau, which four epochs do not show: both sides must then agree to the last bit."""
    with (
        open_trainer(WAIT, Listening()) as a,
        open_trainer(replace(TINY, controller="plateau"), Listening()) as b,
    ):
        *_, found = paired_rounds(a, b)
    assert set(found.differences_pp(2)) == {0.0}
