"""Telemetry changes no trained bit: at any level, with alarms at every turn, with listeners that fail or hang."""

import threading
from dataclasses import replace

import pytest

from esper.leyline import TelemetryLevel
from esper.nissa import NULL_HUB
from esper.simic.telemetry import anomaly_detector
from esper.simic.training import run_log
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log, run_with

RUN = replace(TINY, task="digits_blind", rounds=2, envs=2, episode_length=6)


@pytest.fixture(scope="module")
def silent():
    return run_with(NULL_HUB, RUN, TelemetryLevel.OFF)


@pytest.mark.parametrize("level", [TelemetryLevel.MINIMAL, TelemetryLevel.NORMAL, TelemetryLevel.DEBUG])
def test_no_level_changes_a_bit(tmp_path, silent, level):
    with open_log(tmp_path) as hub:
        assert run_with(hub, RUN, level) == silent


def test_escalation_at_every_turn_changes_nothing(tmp_path, silent, monkeypatch):
    def always(report, state, clock):
        loud = replace(report, findings=(object(),)) if not report.findings else report
        monkeypatch.setattr(anomaly_detector.AnomalyReport, "raised", property(lambda self: True))
        return anomaly_detector.handle_telemetry_escalation(loud, state, clock)

    monkeypatch.setattr(run_log, "handle_telemetry_escalation", always)
    with open_log(tmp_path) as hub:
        assert run_with(hub, RUN, TelemetryLevel.NORMAL) == silent
    _, second = events_of(tmp_path, "PPO_UPDATE_COMPLETED")
    assert second["data"]["layers"], "escalation must really change what is collected"


class Listener:
    def __init__(self, name, behaviour):
        self.name = name
        self._behaviour = behaviour

    def start(self):
        """Nothing to prepare."""

    def write(self, line):
        self._behaviour()

    def flush(self):
        """Nothing is held back."""

    def close(self):
        """Nothing to end."""


def _fail():
    raise RuntimeError("the exporter is broken")


def test_listeners_that_raise_or_hang_change_nothing(tmp_path, silent):
    never = threading.Event()
    listeners = (Listener("raising", _fail), Listener("hanging", never.wait))
    hub = open_log(tmp_path, backends=listeners, hang_s=0.5)
    try:
        assert run_with(hub, RUN, TelemetryLevel.NORMAL) == silent
    finally:
        report = hub.close(2.0)
        never.set()
    assert report.complete, "the log itself lacks nothing"
