"""Workers of any kind and number give the same bits, also after one of them is killed; nothing ever hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import PROTOCOL_VERSION, GovernorState, RollbackReason, TelemetryEvent, wait
from esper.simic.training.env_factory import build_worker
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.handles import InlineHandle
from esper.tolaria.pool import MAX_RESTARTS, EnginePool, _Member, split_evenly
from esper.tolaria.worker import PoolFailure, Request, StepCancelled, WorkerError, WorkerLost
from tests.tolaria import worlds
from tests.tolaria.worlds import HORIZON, NAN_IN_ENV_2, NUM_ENVS, Fault, FaultySpec, build_faulty, faulty_spec

Facts = list[list[object]]


class ListSink:
    def __init__(self) -> None:
        self.events: list[TelemetryEvent] = []

    def emit(self, event: TelemetryEvent) -> None:
        self.events.append(event)

    @property
    def states(self) -> list[str]:
        return [event.data.state for event in self.events]  # type: ignore[attr-defined]


def processes(spec: FaultySpec, workers: int = 2, **options: object) -> EnginePool:
    return EnginePool(build_faulty, spec, kind="process", workers=workers, **options)  # type: ignore[arg-type]


def pids(pool: EnginePool) -> list[int]:
    return [hello.pid for hello in pool.hellos]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def expected() -> tuple[Facts, dict[int, str]]:
    """A whole round in this process: growth, pruning, a fossil, and a rollback of env 2 in epoch 3."""
    with EnginePool(build_faulty, faulty_spec(NAN_IN_ENV_2)) as pool:
        return worlds.play(pool), worlds.digest(pool)


def is_same(seen: tuple[Facts, dict[int, str]], expected: tuple[Facts, dict[int, str]]) -> bool:
    """Compares bits: the text of a float is exact, and unlike the float it also equals itself when not a number."""
    return repr(seen) == repr(expected)


def test_the_round_contains_what_it_should(expected: tuple[Facts, dict[int, str]]) -> None:
    seen, _ = expected
    events = [event.type.value for step in seen for report in step[1] for event in report.events]  # type: ignore[attr-defined]
    assert {"SEED_GERMINATED", "SEED_FOSSILIZED", "SEED_PRUNED", "GOVERNOR_STATE_CHANGED"} <= set(events)
    rolled_back = seen[4][1][2]  # type: ignore[index]
    assert rolled_back.epoch == 3
    assert rolled_back.terminal
    assert rolled_back.rollback_reason is RollbackReason.NONFINITE
    assert rolled_back.governor_state is GovernorState.PANIC


def test_messages_through_pickle_change_nothing(
    expected: tuple[Facts, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.tolaria.handles.InlineHandle", worlds.PickledHandle)
    with EnginePool(build_faulty, faulty_spec(NAN_IN_ENV_2)) as pool:
        assert is_same((worlds.play(pool), worlds.digest(pool)), expected)


def test_one_process_gives_the_same_bits_and_continues_elsewhere(expected: tuple[Facts, dict[int, str]]) -> None:
    """Stopped in the middle of the episode and continued from snapshots by a fresh process."""
    with processes(faulty_spec(NAN_IN_ENV_2), workers=1) as pool:
        first = worlds.play(pool, range(4))
        packed = pool.snapshot()
    with processes(faulty_spec(NAN_IN_ENV_2), workers=1) as pool:
        pool.restore(packed)
        rest = worlds.play(pool, range(4, HORIZON))
        assert is_same((first + rest, worlds.digest(pool)), expected)
        assert pool.hellos[0].threads == 1


def test_two_processes_give_the_same_bits_also_after_kill_9_in_mid_epoch(
    tmp_path: Path, expected: tuple[Facts, dict[int, str]]
) -> None:
    sink = ListSink()
    die = Fault(kind="die", env_id=1, epoch=2, once=tmp_path / "died")
    with processes(faulty_spec(NAN_IN_ENV_2, die), sink=sink) as pool:
        before = pids(pool)
        assert is_same((worlds.play(pool), worlds.digest(pool)), expected)
        assert pool.num_abandoned == 0
    lost, recovered = (event.data for event in sink.events)
    assert (lost.state, lost.exit_code, lost.env_ids) == ("lost", -signal.SIGKILL, (0, 1))  # type: ignore[attr-defined]
    assert (recovered.state, recovered.num_epochs_replayed) == ("recovered", 2)  # type: ignore[attr-defined]
    assert not any(map(is_running, before))


@pytest.mark.slow
def test_a_hung_worker_is_stopped_and_replaced(
    tmp_path: Path, expected: tuple[Facts, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.tolaria.handles.SILENCE_FACTOR", 0.0)
    monkeypatch.setattr("esper.tolaria.handles.MIN_SILENCE_S", 10.0)
    sink = ListSink()
    hang = Fault(kind="stop", env_id=3, epoch=5, once=tmp_path / "hung")
    with processes(faulty_spec(NAN_IN_ENV_2, hang), sink=sink) as pool:
        assert is_same((worlds.play(pool), worlds.digest(pool)), expected)
    assert sink.states == ["lost", "recovered"]
    assert "no sign of life" in sink.events[0].data.error  # type: ignore[attr-defined]


def test_an_exception_in_a_worker_reaches_the_parent_with_its_traceback(tmp_path: Path) -> None:
    fault = Fault(kind="raise", env_id=1, epoch=0, once=None)
    with processes(faulty_spec(fault), workers=1) as pool:
        pool.reset(episode_seeds(7, 3, NUM_ENVS))
        with pytest.raises(WorkerError, match="MemoryError: no more memory") as caught:
            pool.step(worlds.specs_at(0))
        assert "in meet_faults" in str(caught.value)
        assert pool.num_restarts == 0, "a defect is not repeated"
        with pytest.raises(RuntimeError, match="make a new one"):
            pool.step(worlds.specs_at(1))


def test_an_exception_inline_is_raised_as_it_is() -> None:
    with EnginePool(build_faulty, faulty_spec(Fault(kind="raise", env_id=1, epoch=0, once=None))) as pool:
        pool.reset(episode_seeds(7, 3, NUM_ENVS))
        with pytest.raises(MemoryError):
            pool.step(worlds.specs_at(0))


def test_data_that_disappears_does_not_disturb_running_workers_and_stops_new_ones_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.tolaria.batches.INLINE_BYTES", 0)
    scratch = tmp_path / "scratch"
    fault = Fault(kind="die", env_id=0, epoch=1, once=None)
    spec = faulty_spec(fault, scratch=scratch)
    assert all(entry.content is None for entry in spec.spec.only.rows.values())
    inline = EnginePool(build_faulty, faulty_spec(scratch=scratch))
    undisturbed = [inline.reset(episode_seeds(7, 3, 2)), inline.step(worlds.specs_at(0, range(2)))]
    with processes(spec, workers=1) as pool:
        start = pool.reset(episode_seeds(7, 3, 2))
        for file in scratch.iterdir():
            file.unlink()
        step = pool.step(worlds.specs_at(0, range(2)))
        assert [worlds.facts(start), worlds.facts(step)] == [worlds.facts(result) for result in undisturbed]
        with pytest.raises(WorkerError, match="the run's copy of its data is gone"):
            pool.step(worlds.specs_at(1, range(2)))


def test_an_interrupt_in_the_middle_of_a_step_leaves_no_process() -> None:
    spec = faulty_spec(*(Fault(kind="sleep", env_id=i, epoch=0, once=None) for i in range(NUM_ENVS)))
    pool = processes(spec, workers=2)
    pool.reset(episode_seeds(7, 3, NUM_ENVS))
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), pool:
        pool.step(worlds.specs_at(0))
    assert not any(map(is_running, pids(pool)))
    with pytest.raises(RuntimeError, match="make a new one"):
        pool.reset(episode_seeds(7, 3, NUM_ENVS))


def test_cancel_stops_a_step_between_two_batches() -> None:
    spec = faulty_spec(*(Fault(kind="sleep", env_id=i, epoch=0, once=None) for i in range(NUM_ENVS)))
    with EnginePool(build_faulty, spec) as pool:
        pool.reset(episode_seeds(7, 3, NUM_ENVS))
        threading.Timer(0.1, pool.cancel).start()
        with pytest.raises(StepCancelled):
            pool.step(worlds.specs_at(0))


@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    code = f"""
import os
from tests.tolaria import worlds
from esper.tolaria.pool import EnginePool
from esper.simic.training.rollout import episode_seeds
from esper.tolaria.worker import Request
if __name__ == "__main__":
    fault = worlds.Fault(kind="sleep", env_id=0, epoch=0, once=None)
    pool = EnginePool(worlds.build_faulty, worlds.faulty_spec(fault), kind="process", workers=1)
    pool.reset(episode_seeds(7, 3, 2))
    open({str(tmp_path / "pid")!r}, "w").write(str(pool.hellos[0].pid))
    step = Request(request_id=99, call="step", arguments=(tuple(worlds.specs_at(0, range(2))), frozenset()))
    pool._members[0].handle.send(step)
    os.kill(os.getpid(), 9)
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script], cwd=root, env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    )
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_a_script_without_a_guard_is_reported_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from tests.tolaria import worlds\n"
        "from esper.tolaria.pool import EnginePool\n"
        "EnginePool(worlds.build_faulty, worlds.faulty_spec(), kind='process', workers=1)\n"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    done = subprocess.run([sys.executable, script], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "call training under `if __name__ == '__main__':` or use inline workers" in done.stderr


def test_a_worker_that_speaks_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.tolaria.engine.VectorizedEngine.protocol_version", 99)
    with pytest.raises(WorkerError, match=f"speaks protocol 99, this process {PROTOCOL_VERSION}"):
        EnginePool(build_worker, worlds.worker_spec())


def test_five_restarts_are_enough() -> None:
    pool = EnginePool(build_faulty, faulty_spec())
    pool.num_restarts = MAX_RESTARTS
    with pytest.raises(PoolFailure, match="lost 6 times in this run, the limit is 5"):
        pool._collect(
            pool._members[0],
            Request(request_id=1, call="snapshot", arguments=()),
            WorkerLost("worker 0 died (exit code -9)", -9),
        )


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown worker kind 'thread'. Known: inline, process, ray, simulated"):
        EnginePool(build_faulty, faulty_spec(), kind="thread")
    with pytest.raises(ValueError, match="workers must be at least 1 for kind 'process', got 0"):
        EnginePool(build_faulty, faulty_spec(), kind="process", workers=0)
    with EnginePool(build_faulty, faulty_spec()) as pool:
        with pytest.raises(ValueError, match="listed twice"):
            pool.reset([*episode_seeds(7, 3, 2), *episode_seeds(7, 3, 1)])
        pool.reset(episode_seeds(7, 3, 2))
        with pytest.raises(ValueError, match=r"expected one spec for each of the envs \(0, 1\)"):
            pool.step([wait(0)])


def test_envs_are_split_into_contiguous_ranges() -> None:
    assert split_evenly(range(7), 3) == [range(3), range(3, 5), range(5, 7)]
    assert split_evenly([1], 3) == [[1], [], []]


def test_idling_workers_are_mentioned() -> None:
    pool = EnginePool(build_faulty, faulty_spec())
    second = InlineHandle(1, build_faulty, faulty_spec())
    second.start()
    pool._members.append(_Member(second))
    with pytest.warns(UserWarning, match="3 envs on 2 workers"):
        pool.reset(episode_seeds(7, 3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.reset(episode_seeds(7, 3, 4))


def _killed_at_start(spec: object, beat: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves_at_start(spec: object, beat: object) -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("build", "words"),
    [(_killed_at_start, "often for lack of memory; use fewer workers"), (_leaves_at_start, "__main__")],
)
def test_a_worker_that_never_came_up_is_explained_by_how_it_ended(build: Any, words: str) -> None:
    with pytest.raises(PoolFailure, match=f"before its first message; .*{words}"):
        EnginePool(build, None, kind="process", workers=1)
