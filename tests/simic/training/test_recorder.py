"""What the recorder tells about the run's course and about telemetry itself."""

from dataclasses import replace
from types import SimpleNamespace

from esper.leyline import TelemetryLevel
from esper.nissa import Hub
from esper.simic.training import recorder
from tests.simic.training.runs import TINY
from tests.telemetry.logs import run_with

RUN = replace(TINY, controller="wait_only", rounds=3, envs=1, minibatches=1, episode_length=2)


class Meter(Hub):
    """A hub whose writer has worked and waited as long as it is told, by the end of each round."""

    writer_cpu_ms = (100.0, 250.0, 450.0)
    high_water = (3, 9, 9)

    def __init__(self):
        super().__init__()
        self.events = []
        self.moves = []

    def emit(self, event):
        self.events.append(event)

    def progress(self, phase, *, round=None, epoch=None):
        self.moves.append((phase, round, epoch))

    def of(self, kind):
        return [event.data for event in self.events if event.type.value == kind]

    def health(self):
        done = len(self.of("ROUND_COMPLETED"))
        return replace(super().health(), writer_cpu_ms=self.writer_cpu_ms[done], queue_high_water=self.high_water[done])


def test_a_profile_has_the_cost_of_telemetry_in_its_own_round(monkeypatch):
    """On a clock that is a second later at every look: telling takes one for the end of the round before, one for the
    beginning and one per step."""
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(recorder, "time", SimpleNamespace(thread_time=lambda: float(next(ticks))))
    hub = Meter()
    run_with(hub, RUN, TelemetryLevel.NORMAL)
    told_s = (0 + 1 + 2, 1 + 1 + 2, 1 + 1 + 2)
    written_ms = (100.0, 150.0, 200.0)
    expected = [1e3 * told + written for told, written in zip(told_s, written_ms, strict=True)]
    assert [profile.telemetry_cpu_ms for profile in hub.of("PROFILE_MEASURED")] == expected


def test_a_profile_has_the_fullest_the_queue_has_been():
    hub = Meter()
    run_with(hub, RUN, TelemetryLevel.NORMAL)
    assert [profile.queue_high_water for profile in hub.of("PROFILE_MEASURED")] == [3, 9, 9]


def test_every_step_is_progress():
    hub = Meter()
    run_with(hub, RUN, TelemetryLevel.NORMAL)
    played = [("play", number, epoch) for number in range(RUN.rounds) for epoch in range(RUN.episode_length + 1)]
    assert [move for move in hub.moves if move[0] == "play"] == played
