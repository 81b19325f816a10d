"""Exporters: one set of numbers, one x axis, one row per round, nothing invented for what was not measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import EVENTS, LoggedEvent, TelemetryEvent, TelemetryEventType, make_event
from esper.nissa.exporters import TensorBoardBackend, WandbBackend
from esper.nissa.scalars import RoundCollector, scalars
from tests.karn.logs import episode_completed, head_update, ppo_update, profile, round_completed
from tests.nissa.events import ended, ids_of, open_hub, values
from tests.nissa.test_codec import logged


def log_of(num_rounds: int) -> Iterator[TelemetryEvent]:
    """Two episodes, an update, the round, its profile; ten env steps per round."""
    for index in range(num_rounds):
        for env, earned in enumerate((1.0, 3.0)):
            data = episode_completed(return_raw=earned + index)
            yield make_event(TelemetryEventType.EPISODE_COMPLETED, data, round=index, episode=index, env=env, epoch=4)
        yield make_event(TelemetryEventType.PPO_UPDATE_COMPLETED, ppo_update(), round=index)
        done = round_completed(num_env_steps_total=10 * (index + 1))
        yield make_event(TelemetryEventType.ROUND_COMPLETED, done, round=index)
        yield make_event(TelemetryEventType.PROFILE_MEASURED, profile(), round=index)


@pytest.mark.parametrize("kind", list(EVENTS))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_event_has_scalars_or_none(kind: TelemetryEventType, data: st.DataObject) -> None:
    line = logged(make_event(kind, data.draw(values(EVENTS[kind].payload)), **ids_of(kind)))
    assert all(isinstance(value, float) for value in scalars(line).values())


def test_each_name_has_the_figure_that_others_show_under_it() -> None:
    found: dict[str, float] = {}
    for event in log_of(1):
        found |= scalars(logged(event, mono=7.0))
    rollout = {"ep_rew_mean": 3.0, "ep_len_mean": 3.0}
    time = {"fps": 40.0, "iterations": 1.0, "time_elapsed": 7.0, "total_timesteps": 10.0}
    train = {
        "approx_kl": 0.012,
        "clip_fraction": 0.1,
        "clip_range": 0.2,
        "entropy_loss": 0.9,  # minimised, as there: it rises when entropy falls
        "explained_variance": 0.4,
        "grad_norm": 0.4,
        "learning_rate": 3e-4,
        "loss": 0.2,
        "n_updates": 1.0,
        "policy_gradient_loss": -0.01,
        "value_loss": 0.3,
    }
    charts = {"episodic_return": 3.0, "episodic_length": 3.0, "SPS": 40.0, "learning_rate": 3e-4}
    losses = {
        "value_loss": 0.3,
        "policy_loss": -0.01,
        "entropy": pytest.approx(0.7),
        "approx_kl": 0.012,
        "clipfrac": 0.1,
        "explained_variance": 0.4,
    }
    groups = {"rollout": rollout, "time": time, "train": train, "charts": charts, "losses": losses}
    expected = {f"{group}/{name}": value for group, named in groups.items() for name, value in named.items()}
    assert {name: found.get(name) for name in expected} == expected
    own = {"host/accuracy_mean_pct": 80.0, "growth/params_ratio_mean": 1.2, "heads/op/entropy_share": 0.7}
    own |= {"safety/num_rollbacks": 0.0, "perf/train_ms": 2000.0}
    assert {name: found.get(name) for name in own} == own


def test_a_run_without_updates_counts_none() -> None:
    done = make_event(TelemetryEventType.ROUND_COMPLETED, round_completed(num_env_steps_total=10), round=0)
    found = scalars(logged(done))
    assert found["time/iterations"] == 1.0
    assert not [name for name in found if name.startswith(("train/", "losses/"))]


def test_what_was_not_measured_is_absent_and_zero_is_not() -> None:
    data = ppo_update(approx_kl=None, heads={"blend": head_update(kl=None)})
    found = scalars(logged(make_event(TelemetryEventType.PPO_UPDATE_COMPLETED, data, round=0)))
    assert "train/approx_kl" not in found
    assert found["heads/blend/clip_fraction"] == 0.1
    assert found["safety/num_nonfinite"] == 0.0
    assert "heads/blend/kl" not in found


def test_a_round_is_averaged_and_placed_by_its_env_steps() -> None:
    collector = RoundCollector()
    rounds = [each for event in log_of(3) for each in collector.add(logged(event))]
    rounds += collector.take()
    assert [each.env_steps for each in rounds] == [10, 20, 30]
    assert [each.values["rollout/ep_rew_mean"] for each in rounds] == [2.0, 3.0, 4.0]
    assert all("perf/train_ms" in each.values for each in rounds)
    assert not list(collector.take())


def test_a_flush_between_two_events_of_a_round_loses_neither() -> None:
    collector = RoundCollector()
    *first, last = [logged(event) for event in log_of(1)]
    for line in first:
        assert not list(collector.add(line))
    (early,) = collector.take()
    assert not list(collector.add(last))
    (late,) = collector.take()
    assert early.env_steps == late.env_steps == 10
    assert "time/fps" in late.values
    assert not set(early.values) & set(late.values)


def test_an_unfinished_round_is_not_placed() -> None:
    collector = RoundCollector()
    for event in list(log_of(1))[:3]:
        assert not list(collector.add(logged(event)))
    assert not list(collector.take())


def read_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself sees."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = reader.EventAccumulator(str(folder))
    seen.Reload()
    return {tag: [(point.step, point.value) for point in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}


def test_a_point_has_the_time_of_its_round(tmp_path: Path) -> None:
    """Files that `esper export` makes of an old log would all be of today otherwise."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    backend = TensorBoardBackend(tmp_path)
    backend.start()
    for event in log_of(2):
        backend.write(logged(event, wall=1000.0 + (event.round or 0)))
    backend.close()
    seen = reader.EventAccumulator(str(tmp_path))
    seen.Reload()
    assert [point.wall_time for point in seen.Scalars("rollout/ep_rew_mean")] == [1000.0, 1001.0]


def test_tensorboard_files_hold_one_point_per_round_and_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with open_hub(tmp_path, backends=(TensorBoardBackend(tmp_path / "metrics"),)) as hub:
        for event in log_of(3):
            hub.emit(event)
    assert hub.close().backends["tensorboard"].state == "closed"
    points = read_points(tmp_path / "metrics")
    assert points["rollout/ep_rew_mean"] == [(10, 2.0), (20, 3.0), (30, 4.0)]
    assert {tuple(step for step, _ in curve) for curve in points.values()} == {(10, 20, 30)}


class StubLibrary(ModuleType):
    """Answers like W&B and remembers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define_metric", (name, step_metric)))

    def log(self, row: dict[str, float], **options: Any) -> None:
        assert not options, "a second step counter"
        self.calls.append(("log", row))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_an_exporter_that_fails_on_every_round_is_reported_at_once_and_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two rounds it takes many events that ask nothing of it; they are no sign that it works."""

    class Refusing(StubLibrary):
        def log(self, row: dict[str, float], **options: Any) -> None:
            raise ConnectionError("no quota")

    monkeypatch.setitem(sys.modules, "wandb", Refusing("wandb"))
    backend = WandbBackend("wandb", project="esper", run_id="r1", config={}, folder=tmp_path)
    with open_hub(tmp_path, backends=(backend,)) as hub:
        for event in log_of(6):
            hub.emit(event)
            assert hub.flush(10)
    report = hub.close().backends["wandb"]
    assert (report.state, report.error) == ("failed", "ConnectionError: no quota")
    reported = capsys.readouterr().err
    assert reported.count("wandb failed (ConnectionError: no quota) and is tried again") == 1
    assert reported.count("wandb is switched off") == 1


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_one_row_per_round_with_the_env_steps_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Any
) -> None:
    stub = StubLibrary(library)
    monkeypatch.setitem(sys.modules, library, stub)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    backend = WandbBackend(library, project="esper", run_id="r1", config={"lr": 0.1}, folder=tmp_path)
    with open_hub(tmp_path, backends=(backend,)) as hub:
        for event in log_of(2):
            hub.emit(event)
    assert hub.close().backends[library].error is None
    rows = [row for call, row in stub.calls if call == "log"]
    assert [row["env_steps"] for row in rows] == [10, 20]
    assert not any(math.isnan(value) for row in rows for value in row.values())
    assert stub.calls[-1] == ("finish", None)
    options = stub.calls[0][1]
    assert (options["name"], options["config"]) == ("r1", {"lr": 0.1})
    assert options["resume"] == "allow", "a run that goes on is the same run there"
    if library == "wandb":
        assert (options["id"], options["mode"]) == ("r1", "offline")
        assert options["dir"] == str(tmp_path), "what belongs to a run lies in its directory"
        assert ("define_metric", ("*", "env_steps")) in stub.calls


def test_nothing_leaves_the_machine_unless_the_environment_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubLibrary("wandb")
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setenv("WANDB_MODE", "online")
    with open_hub(
        tmp_path, backends=(WandbBackend("wandb", project="esper", run_id="r1", config={}, folder=tmp_path),)
    ):
        pass
    assert stub.calls[0][1]["mode"] == "online"


def test_a_missing_library_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="wandb is not installed: pip install wandb"):
        open_hub(tmp_path, backends=(WandbBackend("wandb", project="p", run_id="r", config={}, folder=tmp_path),))
    with pytest.raises(ValueError, match=r"pip install 'esper-growth\[metrics\]'"):
        open_hub(tmp_path, backends=(TensorBoardBackend(tmp_path / "metrics"),))


def test_a_line_without_a_round_starts_no_round() -> None:
    collector = RoundCollector()
    lines: list[LoggedEvent] = [logged(event) for event in log_of(1)]
    for line in lines:
        list(collector.add(line))
    assert not list(collector.add(logged(ended())))
    (taken,) = collector.take()
    assert taken.env_steps == 10
