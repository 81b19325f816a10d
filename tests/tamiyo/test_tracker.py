"""The tracker: what counts as progress, when training has settled, and that looking changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.tamiyo.tracker import SignalTracker

RESULTS = st.lists(
    st.tuples(st.floats(0.0, 10.0, allow_nan=False), st.floats(0.0, 100.0, allow_nan=False)), min_size=1, max_size=30
)


def fed(results: list[tuple[float, float]], horizon: int = 40) -> SignalTracker:
    tracker = SignalTracker(horizon)
    for loss, accuracy in results:
        tracker.update(loss, accuracy)
    return tracker


def test_a_plateau_counts_epochs_without_half_a_point() -> None:
    tracker = fed([(1.0, 50.0)])
    assert [tracker.update(1.0, accuracy).plateau_epochs for accuracy in (50.4, 50.1, 50.5, 50.6)] == [1, 2, 0, 1]


def test_a_slow_climb_is_progress() -> None:
    tracker = SignalTracker(40)
    plateaus = [tracker.update(1.0, 50.0 + 0.25 * epoch).plateau_epochs for epoch in range(20)]
    assert max(plateaus) == 1


def test_stability_latches_when_the_loss_stops_falling() -> None:
    falling = SignalTracker(40)
    assert not any(falling.update(2.0 * 0.9**epoch, 10.0).stable for epoch in range(30))
    assert any(falling.update(0.1, 10.0).stable for _ in range(10))
    assert falling.update(0.001, 10.0).stable, "a latch does not open again"


def test_a_loss_that_hardly_falls_has_settled() -> None:
    tracker = SignalTracker(40)
    stable = [tracker.update(1.0 - 0.001 * epoch, 10.0).stable for epoch in range(10)]
    assert stable == [False] * 9 + [True], "once the window is full"


@given(RESULTS)
def test_recent_results_are_the_newest_five_oldest_first(results: list[tuple[float, float]]) -> None:
    tracker = SignalTracker(40)
    for loss, accuracy in results:
        signals = tracker.update(loss, accuracy)
    assert signals.recent_accuracies_pct == tuple(accuracy for _, accuracy in results[-5:])


@given(RESULTS, RESULTS)
def test_a_restored_tracker_continues_the_same_life(
    past: list[tuple[float, float]], future: list[tuple[float, float]]
) -> None:
    tracker = fed(past)
    saved = json.loads(json.dumps(tracker.state_dict()))
    other = fed([(9.0, 1.0)])
    other.load_state_dict(saved)
    for loss, accuracy in future:
        assert other.update(loss, accuracy) == tracker.update(loss, accuracy)


def test_a_saved_state_does_not_follow_the_tracker() -> None:
    tracker = fed([(1.0, 50.0)])
    saved = tracker.state_dict()
    tracker.update(0.5, 60.0)
    assert saved["losses"] == [1.0]


def test_a_tracker_does_not_follow_its_saved_state() -> None:
    tracker = fed([(1.0, 50.0)])
    for saved in (tracker.state_dict(), tracker.state_dict()):
        tracker.load_state_dict(saved)
        saved["losses"].append(9.0)
        saved["accuracies_pct"].append(9.0)
    assert tracker.state_dict()["losses"] == [1.0]
    assert tracker.state_dict()["accuracies_pct"] == [50.0]


def test_an_impossible_horizon_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        SignalTracker(0)
