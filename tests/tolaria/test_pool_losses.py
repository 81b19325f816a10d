"""What the pool does when workers are lost: replay, give up, count, stop. Workers here are simulated and die on cue."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from esper.leyline import PROTOCOL_VERSION, TelemetryEvent, wait
from esper.simic.training.rollout import episode_seeds
from esper.tamiyo.simulation import SimulatedWorker, SimulationSpec
from esper.tolaria import pool as pool_module
from esper.tolaria.engine import Beat
from esper.tolaria.handles import ProcessHandle
from esper.tolaria.pool import MAX_RESTARTS, EnginePool
from esper.tolaria.worker import PoolFailure, Request, WorkerLost
from tests.fakes import world
from tests.tolaria.worlds import PickledHandle, facts

NUM_ENVS = 4


def build_simulated(spec: SimulationSpec, beat: Beat) -> SimulatedWorker:
    return SimulatedWorker(spec)


class Mortal(PickledHandle):
    """Dies whenever the next answer is on the list: (worker, how many answers it has ever given)."""

    deaths: ClassVar[set[tuple[int, int]]] = set()
    answered: ClassVar[dict[int, int]] = {}

    def start(self) -> Any:
        if (self.worker_id, -1) in self.deaths and self.worker_id in self.answered:
            raise WorkerLost(f"worker {self.worker_id} never came up", 1)
        self.answered.setdefault(self.worker_id, 0)
        return super().start()

    def receive(self, request: Request) -> Any:
        count = self.answered[self.worker_id]
        self.answered[self.worker_id] = count + 1
        if (self.worker_id, count) in self.deaths:
            raise WorkerLost(f"worker {self.worker_id} died (exit code -9)", -9)
        return super().receive(request)


class ListSink:
    def __init__(self) -> None:
        self.events: list[TelemetryEvent] = []

    def emit(self, event: TelemetryEvent) -> None:
        self.events.append(event)

    @property
    def states(self) -> list[tuple[int, str, int]]:
        return [(e.data.worker_id, e.data.state, e.data.num_epochs_replayed) for e in self.events]  # type: ignore[attr-defined]


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Two mortal workers stand in for processes."""
    Mortal.deaths, Mortal.answered = set(), {}
    monkeypatch.setattr("esper.tolaria.handles.ProcessHandle", Mortal)
    monkeypatch.setattr(
        pool_module.EnginePool, "_start_all", lambda pool: tuple(x.handle.start() for x in pool._members)
    )
    return Mortal.deaths


@pytest.fixture
def half_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_LOST_SHARE", 0.5)


def pool(sink: ListSink | None = None) -> EnginePool:
    return EnginePool(build_simulated, world(), kind="process", workers=2, sink=sink)


def play(pool: EnginePool, steps: int) -> str:
    seen = [facts(pool.reset(episode_seeds(7, 3, NUM_ENVS)))]
    seen += [facts(pool.step([wait(i) for i in range(NUM_ENVS)])) for _ in range(steps)]
    return repr(seen)


def test_a_death_at_any_answer_is_replayed_to_the_same_facts(deaths: set[tuple[int, int]]) -> None:
    expected = play(pool(), 4)
    for answer in range(5):
        for worker in range(2):
            Mortal.answered = {}
            deaths.clear()
            deaths.add((worker, answer))
            sink = ListSink()
            again = pool(sink)
            assert play(again, 4) == expected
            assert sink.states == [(worker, "lost", 0), (worker, "recovered", max(0, answer - 1))]
            assert again.num_abandoned == 0


@pytest.mark.usefixtures("half_may_be_lost")
def test_a_worker_lost_twice_at_one_step_is_given_up_and_its_envs_end_visibly(deaths: set[tuple[int, int]]) -> None:
    deaths.update({(1, 2), (1, 4)})  # at the second step, and when that step is asked for again
    sink = ListSink()
    lossy = pool(sink)
    lossy.reset(episode_seeds(7, 3, NUM_ENVS))
    lossy.step([wait(i) for i in range(NUM_ENVS)])
    result = lossy.step([wait(i) for i in range(NUM_ENVS)])
    assert [result.outcomes[i].applied for i in range(NUM_ENVS)] == [True, True, False, False]
    assert [result.reports[i].terminal for i in range(NUM_ENVS)] == [False, False, True, True]
    assert [result.reports[i].epoch for i in range(NUM_ENVS)] == [1, 1, 0, 0]
    assert lossy.lost_envs == {2, 3}
    assert lossy.num_abandoned == 2
    assert not lossy.bitwise
    assert [state for _, state, _ in sink.states] == ["lost", "abandoned"]
    assert sorted(lossy.snapshot()) == [0, 1]


@pytest.mark.usefixtures("half_may_be_lost")
def test_a_new_round_starts_with_a_fresh_worker(deaths: set[tuple[int, int]]) -> None:
    deaths.update({(1, 1), (1, 3)})
    lossy = pool()
    play(lossy, 2)
    assert lossy.lost_envs
    lossy.reset(episode_seeds(7, 4, NUM_ENVS))
    assert not lossy.lost_envs
    result = lossy.step([wait(i) for i in range(NUM_ENVS)])
    assert all(outcome.applied for outcome in result.outcomes.values())
    assert lossy.num_abandoned == 2, "the run stays marked"


def test_too_many_lost_envs_stop_the_run(deaths: set[tuple[int, int]]) -> None:
    deaths.update({(1, 1), (1, 3)})
    with pytest.raises(PoolFailure, match=r"twice at the same step. 50% of the envs .* the limit is 10%"):
        play(pool(), 2)


@pytest.mark.usefixtures("half_may_be_lost")
def test_a_worker_lost_before_its_first_report_stops_the_run(deaths: set[tuple[int, int]]) -> None:
    deaths.update({(0, 0), (0, 1)})
    with pytest.raises(PoolFailure, match="worker 0 died"):
        play(pool(), 1)


@pytest.mark.usefixtures("half_may_be_lost")
def test_a_worker_that_does_not_come_back_is_given_up(deaths: set[tuple[int, int]]) -> None:
    deaths.update({(1, 1), (1, -1)})
    lossy = pool()
    play(lossy, 2)
    assert lossy.lost_envs == {2, 3}
    with pytest.raises(PoolFailure, match="never came up when it was started again"):
        lossy.reset(episode_seeds(7, 4, NUM_ENVS))


def test_six_losses_in_a_run_are_too_many(deaths: set[tuple[int, int]]) -> None:
    # Each loss at a later step; the replay after loss k answers the reset, k steps and the step itself.
    answer, at = 1, 1
    for _ in range(MAX_RESTARTS + 1):
        deaths.add((0, answer))
        answer += at + 3
        at += 1
    with pytest.raises(PoolFailure, match=f"lost {MAX_RESTARTS + 1} times in this run, the limit is {MAX_RESTARTS}"):
        play(pool(), 9)


class DeafConnection:
    """A pipe on which nothing arrives."""

    def __init__(self) -> None:
        self.closed = False

    def poll(self, timeout: float) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class FakeProcess:
    exitcode = -9

    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    def join(self, timeout: float) -> None:
        assert self.killed


def test_silence_beyond_the_limit_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.tolaria.handles.MIN_SILENCE_S", 30.0)
    handle = ProcessHandle(3, build_simulated, world())
    handle._connection, handle._process = DeafConnection(), FakeProcess()  # type: ignore[assignment]
    handle._slowest_s = 2.0  # twenty times that is more than the least patience
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr("esper.tolaria.handles.time.monotonic", lambda: float(next(clock)))
    with pytest.raises(WorkerLost, match="worker 3 gave no sign of life for 45 s and was stopped"):
        handle.receive(Request(request_id=1, call="step", arguments=()))
    assert handle._process.killed  # type: ignore[union-attr]


def test_the_protocol_has_a_version() -> None:
    assert EnginePool(build_simulated, world()).protocol_version == PROTOCOL_VERSION
