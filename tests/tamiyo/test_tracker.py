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


def test_the_untrained_host_has_no_deltas() -> None:
    signals = SignalTracker(40).update(2.3, 10.0)
    assert signals.epochs_done == 0
    assert signals.loss_delta is None
    assert signals.accuracy_delta_pp is None
    assert signals.recent_losses == (2.3,)
    assert not signals.stable


def test_deltas_are_now_minus_before() -> None:
    tracker = fed([(2.3, 10.0)])
    signals = tracker.update(2.0, 30.0)
    assert signals.epochs_done == 1
    assert signals.loss_delta == pytest.approx(-0.3)
    assert signals.accuracy_delta_pp == pytest.approx(20.0)


def test_a_plateau_counts_epochs_without_half_a_point() -> None:
    tracker = fed([(1.0, 50.0)])
    assert [tracker.update(1.0, accuracy).plateau_epochs for accuracy in (50.4, 50.1, 50.5, 50.6)] == [1, 2, 0, 1]


def test_a_slow_climb_is_progress() -> None:
    tracker = SignalTracker(40)
    plateaus = [tracker.update(1.0, 50.0 + 0.25 * epoch).plateau_epochs for epoch in range(20)]
    assert max(plateaus) == 1


def test_falling_accuracy_keeps_the_best() -> None:
    tracker = fed([(1.0, 50.0), (1.0, 80.0)])
    assert tracker.update(1.0, 60.0).best_accuracy_pct == 80.0


def test_stability_latches_when_the_loss_stops_falling() -> None:
    falling = SignalTracker(40)
    assert not any(falling.update(2.0 * 0.9**epoch, 10.0).stable for epoch in range(30))
    assert any(falling.update(0.1, 10.0).stable for _ in range(10))
    assert falling.update(0.001, 10.0).stable, "a latch does not open again"


@given(RESULTS)
def test_recent_results_are_the_newest_five_oldest_first(results: list[tuple[float, float]]) -> None:
    tracker = SignalTracker(40)
    for loss, accuracy in results:
        signals = tracker.update(loss, accuracy)
    assert signals.recent_losses == tuple(loss for loss, _ in results[-5:])
    assert signals.recent_accuracies_pct == tuple(accuracy for _, accuracy in results[-5:])
    assert signals.epochs_done == len(results) - 1


@given(RESULTS, st.floats(0.0, 10.0), st.floats(0.0, 100.0))
def test_peek_foretells_update_and_remembers_nothing(
    results: list[tuple[float, float]], loss: float, accuracy: float
) -> None:
    tracker = fed(results)
    state = tracker.state_dict()
    peeked = tracker.peek(loss, accuracy)
    assert tracker.state_dict() == state
    assert tracker.update(loss, accuracy) == peeked


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


def test_reset_forgets_the_last_episode() -> None:
    tracker = fed([(1.0, 50.0)] * 15)
    tracker.reset()
    assert tracker.update(2.3, 10.0) == SignalTracker(40).update(2.3, 10.0)


@pytest.mark.parametrize(("horizon", "window"), [(0, 10), (10, 1)])
def test_impossible_sizes_are_refused(horizon: int, window: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        SignalTracker(horizon, window)
