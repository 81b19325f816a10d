"""The status file tells how long training has been silent, and how long an epoch usually takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper.leyline.rundir import STATUS_FILE
from esper.nissa import heartbeat
from esper.nissa.heartbeat import HeartbeatWriter


class Clock:
    """Time that passes when it is told to."""

    now_s = 1000.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: 0.0))


def written(heart: HeartbeatWriter, run_dir: Path) -> dict[str, object]:
    heart.beat(last_seq=0, dropped={}, num_held=0, error=None)
    status: dict[str, object] = json.loads((run_dir / STATUS_FILE).read_bytes())
    return status


def test_silence_counts_from_the_last_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    heart = HeartbeatWriter(tmp_path, run_id="r", attempt=0, every_s=0.0)
    clock.now_s += 2.0
    assert written(heart, tmp_path)["silence_s"] == 2.0, "of a run that has not begun"
    heart.progress("play", 0, 0)
    assert written(heart, tmp_path)["silence_s"] == 0.0
    clock.now_s += 30.0
    assert written(heart, tmp_path)["silence_s"] == 30.0
    clock.now_s += 70.0
    assert written(heart, tmp_path)["silence_s"] == 100.0
    heart.progress("save", 1, None)
    clock.now_s += 0.5
    assert written(heart, tmp_path)["silence_s"] == 0.5


def test_the_usual_time_of_an_epoch_is_that_between_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    heart = HeartbeatWriter(tmp_path, run_id="r", attempt=0, every_s=0.0)
    heart.progress("play", 0, 0)
    assert written(heart, tmp_path)["median_epoch_s"] is None
    for epoch, took_s in enumerate((4.0, 2.0, 64.0)):
        clock.now_s += took_s
        heart.progress("play", 0, epoch + 1)
    assert written(heart, tmp_path)["median_epoch_s"] == 4.0


def test_the_status_is_written_once_per_interval_and_once_more_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    heart = HeartbeatWriter(tmp_path, run_id="r", attempt=0, every_s=1.0)
    seen = []
    for seq in range(5):
        heart.beat(last_seq=seq, dropped={}, num_held=0, error=None)
        seen.append(json.loads((tmp_path / STATUS_FILE).read_bytes())["last_seq"])
        clock.now_s += 0.5
    assert seen == [0, 0, 2, 2, 4]
    heart.beat(last_seq=9, dropped={}, num_held=0, error=None, closed=True)
    last = json.loads((tmp_path / STATUS_FILE).read_bytes())
    assert (last["last_seq"], last["closed"]) == (9, True)
