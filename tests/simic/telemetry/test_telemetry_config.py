"""Levels choose types; every setting is checked, and each reaches the hub."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import EVENTS, TelemetryEventType, TelemetryLevel, TrendDetected, make_event
from esper.leyline.rundir import EVENTS_FILE, METRICS_DIR, STATUS_FILE
from esper.nissa import NullHub, TelemetryHub
from esper.simic.telemetry.opening import open_hub
from esper.simic.telemetry.telemetry_config import TelemetryConfig, enabled


def test_each_level_tells_at_least_what_the_one_below_does() -> None:
    sizes = [len(enabled(level)) for level in TelemetryLevel]
    assert sizes == [0, 18, 22, 22]
    assert enabled(TelemetryLevel.MINIMAL) < enabled(TelemetryLevel.NORMAL) == frozenset(EVENTS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("queue_capacity", 0, r"queue_capacity must be in \[1, 1e\+06\], got 0"),
        ("flush_interval_s", 0.0, "flush_interval_s must be in"),
        ("flush_interval_s", float("nan"), "flush_interval_s must be in"),
        ("rotate_bytes", 10, "rotate_bytes must be in"),
        ("heartbeat_s", 1000.0, "heartbeat_s must be in"),
        ("escalation_epochs", 0, "escalation_epochs must be in"),
        ("level", 7, "level must be one of OFF, MINIMAL, NORMAL, DEBUG, got 7"),
        ("exporters", ("grafana",), "unknown exporter 'grafana'. Known: tensorboard, wandb, trackio"),
        ("exporters", ("wandb", "wandb"), "exporters must differ"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TelemetryConfig(**{field: value})


def test_off_touches_nothing(tmp_path: Path) -> None:
    hub = open_hub(TelemetryConfig(level=TelemetryLevel.OFF), tmp_path / "run")
    assert isinstance(hub, NullHub)
    hub.close()
    assert not (tmp_path / "run").exists()


def trend(round_idx: int | None) -> Any:
    data = TrendDetected(kind="plateau", delta_pp=0.0, rolling_pct=1.0, previous_pct=1.0, window_rounds=10)
    return make_event(TelemetryEventType.TREND_DETECTED, data, round=round_idx)


def test_settings_reach_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    config = TelemetryConfig(rotate_bytes=1024, strict=True, require_complete=True, exporters=("tensorboard",))
    with open_hub(config, tmp_path, run_id="r", group="cohort", first_seq=5) as hub:
        assert isinstance(hub, TelemetryHub)
        assert (hub.run_id, hub.group, hub.next_seq) == ("r", "cohort", 5)
        with pytest.raises(ValueError, match="needs round"):
            hub.emit(trend(None))
        for index in range(12):
            hub.emit(trend(index))
            hub.flush(10)
    assert len(list((tmp_path / "segments").iterdir())) >= 2
    assert list((tmp_path / METRICS_DIR).glob("events.*"))
    assert (tmp_path / EVENTS_FILE).exists()


def test_patience_is_as_long_as_it_was_asked_for(tmp_path: Path) -> None:
    config = TelemetryConfig(flush_interval_s=60.0, heartbeat_s=0.1)
    with open_hub(config, tmp_path) as hub:
        hub.emit(trend(0))
        time.sleep(0.7)
        assert (tmp_path / EVENTS_FILE).read_bytes() == b"", "longer than it would usually wait"
        assert hub.flush(10)
        first = (tmp_path / STATUS_FILE).read_bytes()
        time.sleep(0.2)
        assert hub.flush(10)
        assert (tmp_path / STATUS_FILE).read_bytes() != first, "sooner than it would usually be written again"


def test_a_small_queue_is_a_small_queue(tmp_path: Path) -> None:
    config = TelemetryConfig(queue_capacity=1, require_complete=True)
    hub = open_hub(config, tmp_path)
    assert isinstance(hub, TelemetryHub)
    with hub, hub._changed:  # the writer cannot take anything meanwhile
        hub.emit(trend(0))
        assert not hub.health().must_stop
        hub.emit(trend(1))
        assert hub.health().must_stop
