"""The charts of a report draw the figures of the log, each in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="charts need the extra `runs`")

from esper.karn import charts
from esper.karn.history import RunHistory, read_history
from esper.karn.replay import replay
from esper.leyline import HeadEntropies
from tests.karn.logs import (
    LogWriter,
    T,
    episode_completed,
    germinated,
    ppo_update,
    round_completed,
    seed_ended,
    stage_changed,
    started,
)

Draw = Callable[[Callable[[RunHistory], str | None]], list[Any]]


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    log = LogWriter(tmp_path)
    log.emit(T.RUN_STARTED, started(epochs_per_episode=10))
    return log


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws a chart of the log and hands out its axes instead of a picture."""
    monkeypatch.setattr(charts, "svg_of", lambda figure: figure)

    def axes_of(chart: Callable[[RunHistory], str | None]) -> list[Any]:
        figure: Any = chart(read_history(replay(tmp_path)))
        return list(figure.axes)

    return axes_of


def curves(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The lines of a plot by name."""
    return {line.get_label(): list(map(tuple, line.get_xydata().tolist())) for line in axes.get_lines()}


def test_every_curve_of_a_run_is_what_it_is_called(log: LogWriter, draw: Draw) -> None:
    for number in (0, 1):
        log.emit(
            T.ROUND_COMPLETED,
            round_completed(
                accuracy_mean_pct=50.0 + number,
                rolling_accuracy_pct=60.0 + number,
                committed_accuracy_pct=None if number else 70.0,
                return_mean=2.0 + number,
            ),
            round=number,
        )
    accuracy, _, returns = draw(charts.learning_chart)
    found = curves(accuracy)
    assert found["mean over envs"] == [(0, 50), (1, 51)]
    assert found["mean of ten rounds"] == [(0, 60), (1, 61)]
    measured, unmeasured = found["committed network"]
    assert measured == (0, 70)
    assert math.isnan(unmeasured[1])  # a gap, and no zero
    assert curves(returns)["mean over envs"] == [(0, 2), (1, 3)]


def test_outcomes_stand_at_their_size_and_accuracy(log: LogWriter, draw: Draw) -> None:
    for env, measured in enumerate((81.0, None, 83.0)):
        done = episode_completed(params_ratio=1.5 + env, final_accuracy_pct=measured)
        log.emit(T.EPISODE_COMPLETED, done, round=4, episode=0, env=env, epoch=2)
    axes, _ = draw(charts.outcome_chart)
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[1.5, 81.0], [3.5, 83.0]]
    assert dots.get_array().tolist() == [4, 4]


def test_seeds_live_where_and_when_the_log_says(log: LogWriter, draw: Draw) -> None:
    def at(epoch: int) -> dict[str, int]:
        return {"round": 2, "episode": 2, "env": 1, "epoch": epoch}

    log.emit(T.SEED_GERMINATED, germinated(slot_id="r0c1"), **at(3))
    log.emit(T.SEED_STAGE_CHANGED, stage_changed(slot_id="r0c1", to_stage="TRAINING"), **at(3))
    log.emit(T.SEED_PRUNED, seed_ended(slot_id="r0c1"), **at(7))
    (axes,) = draw(charts.timeline_chart)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["env 1  r0c1"]
    bars = {bar.get_facecolor(): (bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width()}
    from matplotlib.colors import to_rgba

    assert bars[to_rgba(charts.TIMELINE_COLORS["TRAINING"])] == (23, 4)  # episode 2 begins at epoch 20
    (cross,) = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert cross.get_xydata().tolist() == [[27, 0]]


def test_every_curve_of_the_policy_is_what_it_is_called(log: LogWriter, draw: Draw) -> None:
    log.emit(
        T.PPO_UPDATE_COMPLETED,
        ppo_update(head_entropies=HeadEntropies(slot=0.2, blueprint=0.4, blend=0.6, op=0.8)),
        round=6,
    )
    found = {name: points for axes in draw(charts.policy_chart) for name, points in curves(axes).items()}
    assert found == {
        "KL": [(6, 0.012)],
        "target": [(6, ppo_update().metrics["target_kl"])],
        "slot": [(6, 0.2)],
        "blueprint": [(6, 0.4)],
        "blend": [(6, 0.6)],
        "op": [(6, 0.8)],
        "policy": [(6, -0.01)],
        "value": [(6, 0.3)],
        "value error / deviation": [(6, 0.7)],
        "explained variance": [(6, 0.4)],
        "clipped": [(6, 0.1)],
        "largest": [(6, 0.9)],
        "clipped at": [(6, 0.5)],
    }


def test_figures_that_no_axis_can_hold_are_gaps(log: LogWriter, tmp_path: Path) -> None:
    for number, value in enumerate((1e308, -1e308, 1.0)):
        figures = {"return_mean": value, "return_std": abs(value), "accuracy_mean_pct": value}
        log.emit(T.ROUND_COMPLETED, round_completed(**figures), round=number)
        episode = episode_completed(params_ratio=value, final_accuracy_pct=-value, final_loss=value)
        log.emit(T.EPISODE_COMPLETED, episode, round=number, env=0, episode=number, epoch=2)
        log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(target_kl=value), round=number)
    history = read_history(replay(tmp_path))
    for chart in (charts.learning_chart, charts.outcome_chart, charts.policy_chart):
        assert "<svg" in (chart(history) or "")
