"""Levels choose types; every setting is checked, and each reaches the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import EVENTS, TelemetryEventType, TelemetryLevel, TrendDetected, make_event
from esper.leyline.rundir import CHECKPOINTS_DIR, CONFIG_FILE, EVENTS_DIR, METRICS_DIR
from esper.nissa import Hub, TelemetryHub
from esper.simic.run.session import start_new
from esper.simic.telemetry.telemetry_config import TelemetryConfig, enabled
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import open_log


def test_each_level_tells_at_least_what_the_one_below_does() -> None:
    sizes = [len(enabled(level)) for level in TelemetryLevel]
    assert sizes == [0, 18, 22, 22]
    assert enabled(TelemetryLevel.MINIMAL) < enabled(TelemetryLevel.NORMAL) == frozenset(EVENTS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("escalation_epochs", -1, r"escalation_epochs must be in \[0, 100000\], got -1"),
        ("level", 7, "level must be one of OFF, MINIMAL, NORMAL, DEBUG, got 7"),
        ("exporters", ("grafana",), "unknown exporter 'grafana'. Known: tensorboard, wandb, trackio"),
        ("exporters", ("wandb", "wandb"), "exporters must differ"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TelemetryConfig(**{field: value})


def opened(tmp_path: Path, **changes: Any) -> Hub:
    start = start_new(replace(TrainingConfig(), **changes), tmp_path, "r", group="cohort")
    assert start.run is not None
    return open_log(start, start.run)[0]


def test_off_touches_nothing(tmp_path: Path) -> None:
    hub = opened(tmp_path, level="off")
    assert not isinstance(hub, TelemetryHub)
    hub.close()
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [CHECKPOINTS_DIR, CONFIG_FILE]


def trend(round_idx: int | None) -> Any:
    data = TrendDetected(kind="plateau", delta_pp=0.0, rolling_pct=1.0, previous_pct=1.0, window_rounds=10)
    return make_event(TelemetryEventType.TREND_DETECTED, data, round=round_idx)


def test_settings_reach_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with opened(tmp_path, require_complete=True, exporters=("tensorboard",)) as hub:
        assert isinstance(hub, TelemetryHub)
        assert (hub.run_id, hub.group, hub.next_seq) == ("r", "cohort", 0)
        hub.emit(trend(0))
        assert not hub.health().must_stop
        hub.emit(trend(None))
        assert hub.health().must_stop
    assert list((tmp_path / "r" / METRICS_DIR).glob("events.*"))
    assert (tmp_path / "r" / EVENTS_DIR / "a000-s0.jsonl").exists()
