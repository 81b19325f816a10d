"""Telemetry changes no trained bit: at any level, with alarms at every turn, with listeners that fail or hang."""

import io
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from esper.karn.integrity import check_run
from esper.karn.live import LiveConsole, PatientFile, RunProgress
from esper.leyline import TelemetryLevel
from esper.nissa import HubLimits, TelemetryHub, get_hub
from esper.scripts.cli import main
from esper.simic.run import checkpoint_schedule, recorder
from esper.simic.run import session as sessions
from esper.simic.telemetry import anomaly_detector
from esper.simic.training import vectorized
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, generator_states, open_log, outcome_of, run_with, seed_generators
from tests.telemetry.sessions import play_session

RUN = replace(TINY, task="digits_blind", rounds=2, envs=2, episode_length=4)


@pytest.fixture(scope="module")
def silent():
    return run_with(get_hub(), RUN, TelemetryLevel.OFF)


@pytest.mark.parametrize("level", [TelemetryLevel.MINIMAL, TelemetryLevel.NORMAL, TelemetryLevel.DEBUG])
def test_no_level_changes_a_bit(tmp_path, silent, level):
    with open_log(tmp_path) as hub:
        assert run_with(hub, RUN, level) == silent


@pytest.mark.slow
def test_the_most_talkative_level_changes_nothing_in_other_processes_either(tmp_path, silent):
    with open_log(tmp_path) as hub:
        elsewhere = replace(RUN, worker_kind="process", workers=2)
        assert run_with(hub, elsewhere, TelemetryLevel.DEBUG) == silent


def test_nobody_draws_from_the_generators_of_the_process(silent):
    seed_generators()
    assert generator_states() == silent["generators"]


def test_escalation_at_every_turn_changes_nothing(tmp_path, silent, monkeypatch):
    def always(report, state, clock):
        loud = replace(report, findings=(object(),)) if not report.findings else report
        monkeypatch.setattr(anomaly_detector.AnomalyReport, "raised", property(lambda self: True))
        return anomaly_detector.handle_telemetry_escalation(loud, state, clock)

    monkeypatch.setattr(recorder, "handle_telemetry_escalation", always)
    with open_log(tmp_path) as hub:
        assert run_with(hub, RUN, TelemetryLevel.NORMAL) == silent
    _, second = events_of(tmp_path, "PPO_UPDATE_COMPLETED")
    assert second["data"]["layers"], "escalation must really change what is collected"


class Listener:
    """Misbehaves in the calls it is told to."""

    def __init__(self, name, **calls):
        self.name = name
        self._calls = calls

    def start(self):
        """Nothing to prepare."""

    def write(self, line):
        self._calls.get("write", _calm)()

    def flush(self):
        self._calls.get("flush", _calm)()

    def close(self):
        self._calls.get("close", _calm)()


def _calm():
    """Nothing to do."""


def _fail():
    raise RuntimeError("the exporter is broken")


def test_listeners_that_raise_or_hang_change_nothing(tmp_path, silent):
    never = threading.Event()
    listeners = (Listener("raising", write=_fail), Listener("hanging", write=never.wait))
    hub = open_log(tmp_path, backends=listeners, hang_s=0.5)
    try:
        assert run_with(hub, RUN, TelemetryLevel.NORMAL) == silent
    finally:
        report = hub.close(2.0)
        never.set()
    assert report.complete, "the log itself lacks nothing"


class Held(io.StringIO):
    """A terminal that takes nothing until it is let go."""

    def __init__(self, let_go):
        super().__init__()
        self._let_go = let_go

    def write(self, text):
        self._let_go.wait(60)
        return len(text)


class Full(io.StringIO):
    """A disk without room."""

    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("kind", "terminal", "ends"),
    [
        ("shown", True, "closed"),
        ("shown", False, "closed"),
        ("full", True, "closed"),
        ("full", False, "closed"),
        ("held", False, "hung"),
    ],
)
def test_a_screen_changes_nothing_whatever_happens_to_it(tmp_path, silent, kind, terminal, ends):
    let_go = threading.Event()
    file = {"shown": io.StringIO(), "full": Full(), "held": Held(let_go)}[kind]
    progress = RunProgress(Console(file=PatientFile(file), force_terminal=terminal, width=80))
    screen = LiveConsole(progress, label="ppo", rounds=RUN.rounds, horizon=RUN.episode_length, done=0)
    hub = open_log(tmp_path, backends=(screen,), hang_s=0.5)
    try:
        assert run_with(hub, RUN, TelemetryLevel.NORMAL) == silent
    finally:
        report = hub.close(2.0)
        let_go.set()
    assert report.complete, "the log itself lacks nothing"
    assert report.backends["console"].state == ends


def test_listeners_that_hang_when_a_checkpoint_or_the_end_asks_them_to_finish_change_nothing(
    tmp_path, silent, monkeypatch, capsys
):
    never, asked = threading.Event(), []

    def hang(call):
        asked.append(call)
        never.wait()

    listeners = (
        Listener("flushing", flush=lambda: hang("flush")),
        Listener("closing", close=lambda: hang("close")),
        Listener("failing", flush=_fail, close=_fail),
        Listener("calm"),
    )

    class Heard(TelemetryHub):
        def __init__(self, *given, **named):
            super().__init__(*given, **{**named, "backends": listeners})

    monkeypatch.setattr(vectorized, "TelemetryHub", Heard)
    monkeypatch.setattr(vectorized, "CLOSE_TIMEOUT_S", 2.0)
    seed_generators()
    begun = time.monotonic()
    opened = play_session(sessions.start_new(replace(RUN, checkpoint_s=0.0), tmp_path, "a"))
    never.set()
    assert time.monotonic() - begun < 60.0
    assert sorted(asked) == ["close", "flush"]
    assert outcome_of(opened.trainer) == silent
    assert opened.log_complete
    assert opened.checkpoints.saved_index == RUN.rounds
    assert check_run(tmp_path / "a").complete
    reported = capsys.readouterr().err
    assert "flushing is switched off (did not end in time)" in reported
    assert "closing is switched off (did not end in time)" in reported
    assert "calm" not in reported, "the others are none the worse for it"


def test_a_listener_that_does_not_come_back_keeps_no_step_waiting(tmp_path, monkeypatch):
    """It is inside its first call before the first step, and no patience with it or with the log ever ends: whoever
    waited for it would see it come back."""
    inside, release, returned = threading.Event(), threading.Event(), []

    def hang():
        if not inside.is_set():
            inside.set()
            returned.append(release.wait(60.0))

    monkeypatch.setitem(TelemetryHub.__init__.__kwdefaults__, "limits", HubLimits(hang_s=1e9))
    monkeypatch.setattr(checkpoint_schedule, "FLUSH_TIMEOUT_S", 1e6)
    start = sessions.start_new(replace(TINY, rounds=3, checkpoint_s=0.0), tmp_path, "a")
    with vectorized.open_session(start, None, (Listener("hanging", write=hang),)) as opened:
        assert inside.wait(60.0)
        opened.trainer.run()
        reported = Counter(event["type"] for event in events_of(tmp_path / "a"))
        in_time = not returned
        release.set()
    assert in_time, "all was done while it was inside its first call"
    assert opened.trainer.next_round == opened.checkpoints.saved_index == 3
    assert (reported["ROUND_COMPLETED"], reported["EPOCH_COMPLETED"]) == (3, 3 * 2 * 4), "and was in the log by then"
    assert check_run(tmp_path / "a").complete


def test_an_exporter_that_never_starts_is_an_error_before_training(tmp_path, monkeypatch, capsys):
    never = threading.Event()
    library = ModuleType("wandb")
    library.init = lambda **options: never.wait()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setitem(TelemetryHub.__init__.__kwdefaults__, "limits", HubLimits(hang_s=0.2))
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", "--preset", "smoke", "--workers", "1", "--exporters", "wandb", "--runs", str(tmp_path)])
    never.set()
    assert caught.value.code == 2
    assert "wandb did not start within 0.2 s" in capsys.readouterr().err
