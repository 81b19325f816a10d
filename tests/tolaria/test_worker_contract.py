"""What every kind of worker promises, kind by kind over the table: a new row is tested by being there.

Hosts are formulas here, of two tasks and with growth, pruning, a fossil and a rollback; one test trains real ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from esper.leyline import PROTOCOL_VERSION, ActionSpec, EpisodeSeed, IllegalOperation, RollbackReason, SeedStage, wait
from esper.leyline.actions import LifecycleOp
from esper.simic.training.env_factory import build_worker
from esper.simic.training.simulated import build_simulated_worker
from esper.tamiyo.simulation import SimulatedWorker
from esper.tolaria.engine import Beat
from esper.tolaria.kinds import WORKER_KINDS
from esper.tolaria.pool import EnginePool
from esper.tolaria.worker import StepCancelled, WorkerError
from tests.fakes import act_on, germinate, world
from tests.tolaria import worlds
from tests.tolaria.test_pool import is_running
from tests.tolaria.worlds import digest, facts

WORLDS = (world(3, name="three", rollback_epoch=8), world(1, name="one"))
NAMES = ("three", "one", "three", "one")
STEPS = 10
SCRIPT: dict[tuple[int, int], ActionSpec] = {
    (0, 0): germinate("r0c0", "good", env_id=0),
    (0, 1): act_on(LifecycleOp.ADVANCE, "r0c0", env_id=0),
    (0, 4): act_on(LifecycleOp.FOSSILIZE, "r0c0", env_id=0),
    (0, 5): germinate("r0c2", "inert", env_id=0),
    (1, 0): germinate("r0c0", "bad", env_id=1),
    (1, 1): act_on(LifecycleOp.ADVANCE, "r0c0", env_id=1),
    (1, 3): act_on(LifecycleOp.PRUNE, "r0c0", env_id=1),
}

Open = Callable[..., EnginePool]


@pytest.fixture(params=list(WORKER_KINDS), scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ray" and find_spec("ray") is None:
        pytest.skip("needs the extra `ray`")
    return str(request.param)


@pytest.fixture(scope="module")
def open_pool(kind: str, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Pools of the kind; closed in the end."""
    options = {"address": request.getfixturevalue("ray_cluster").address} if kind == "ray" else {}
    with ExitStack() as opened:

        def make(build: Any = build_simulated_worker, spec: Any = WORLDS, workers: int = 1) -> EnginePool:
            count = workers if WORKER_KINDS[kind].several else 1
            return opened.enter_context(EnginePool(build, spec, kind=kind, workers=count, options=options))

        yield make


@pytest.fixture(scope="module")
def pool(open_pool: Open) -> EnginePool:
    """Two workers where there can be several, for tests after which they can go on."""
    return open_pool(workers=2)


def starts(episode: int = 0) -> list[EpisodeSeed]:
    return [EpisodeSeed(env_id=i, episode=episode, run_seed=5, task=name) for i, name in enumerate(NAMES)]


def specs_at(epoch: int) -> list[ActionSpec]:
    return [SCRIPT.get((i, epoch), wait(i)) for i in range(len(NAMES))]


def play(pool: EnginePool, epochs: Sequence[int] = range(STEPS)) -> list[Any]:
    seen = [facts(pool.reset(starts()))] if 0 in epochs else []
    return seen + [facts(pool.step(specs_at(epoch), worlds.ALL_EVENTS)) for epoch in epochs]


@pytest.fixture(scope="module")
def expected() -> tuple[str, dict[int, str]]:
    with EnginePool(build_simulated_worker, WORLDS) as pool:
        return repr(play(pool)), digest(pool)


def test_growth_pruning_a_fossil_and_a_rollback_are_the_same_bits_as_inline(
    pool: EnginePool, expected: tuple[str, dict[int, str]]
) -> None:
    seen = play(pool)
    assert (repr(seen), digest(pool)) == expected
    stages = [[slot.stage for slot in step[1][0].slots] for step in seen]
    assert [SeedStage.FOSSILIZED in row for row in stages].count(True) > 1
    assert any(event.type.value == "SEED_PRUNED" for step in seen for event in step[1][1].events)
    assert any(step[1][2].rollback_reason is RollbackReason.DIVERGENCE for step in seen)


def test_a_worker_says_what_it_is_and_whose_hosts_it_has(pool: EnginePool) -> None:
    assert all(hello.protocol_version == PROTOCOL_VERSION for hello in pool.hellos)
    assert {name: context.layout.slot_ids for name, context in pool.tasks.items()} == {
        "three": ("r0c0", "r0c1", "r0c2"),
        "one": ("r0c0",),
    }
    found = pool.reset(starts()).contexts
    assert [found[i].task for i in range(4)] == list(NAMES)
    after = pool.step(specs_at(0)).contexts
    assert after == found


def test_calls_that_make_no_sense_are_refused_before_they_reach_a_worker(pool: EnginePool) -> None:
    with pytest.raises(ValueError, match="listed twice"):
        pool.reset([*starts(), *starts()])
    pool.reset(starts())
    with pytest.raises(ValueError, match=r"expected one spec for each of the envs \(0, 1, 2, 3\)"):
        pool.step([wait(0)])


def test_a_lost_worker_is_rebuilt_to_the_same_bits(pool: EnginePool, expected: tuple[str, dict[int, str]]) -> None:
    if os.getpid() in {hello.pid for hello in pool.hellos}:
        pytest.skip("its workers are this process, and cannot be lost without it")
    seen = play(pool, range(4))
    os.kill(pool.hellos[-1].pid, 9)
    seen += play(pool, range(4, STEPS))
    assert (repr(seen), digest(pool)) == expected
    assert (pool.num_restarts, pool.num_abandoned) == (1, 0)


def test_a_snapshot_goes_on_in_a_fresh_worker_and_a_cancelled_step_stops_it(
    pool: EnginePool, open_pool: Open, expected: tuple[str, dict[int, str]]
) -> None:
    seen = play(pool, range(3))
    fresh = open_pool()
    fresh.restore(pool.snapshot())
    seen += play(fresh, range(3, STEPS))
    assert (repr(seen), digest(fresh)) == expected
    fresh.reset(starts())
    fresh.cancel()
    with pytest.raises(StepCancelled):
        play(fresh, range(1, STEPS))
    fresh.close()
    processes = {hello.pid for hello in fresh.hellos} - {os.getpid()}
    deadline = time.monotonic() + 60.0
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, processes)), "closing leaves no process"


def test_an_op_whose_gate_is_closed_is_an_error_with_words(open_pool: Open) -> None:
    pool = open_pool()
    pool.reset(starts())
    with pytest.raises((IllegalOperation, WorkerError), match="PRUNE"):
        pool.step([act_on(LifecycleOp.PRUNE, "r0c0", env_id=0), wait(1), wait(2), wait(3)])


def build_other_version(spec: Any, beat: Beat) -> SimulatedWorker:
    worker = SimulatedWorker(spec, beat)
    worker.protocol_version = 99
    return worker


def build_nothing(spec: Any, beat: Beat) -> SimulatedWorker:
    raise OSError("there is no room here")


def test_a_worker_of_another_version_or_one_that_cannot_be_built_is_refused(open_pool: Open) -> None:
    with pytest.raises(WorkerError, match=f"speaks protocol 99, this process {PROTOCOL_VERSION}"):
        open_pool(build_other_version)
    with pytest.raises((OSError, WorkerError), match="there is no room here"):
        open_pool(build_nothing)


def test_real_hosts_get_the_same_bits(kind: str, open_pool: Open) -> None:
    if kind == "simulated":
        pytest.skip("trains no hosts")
    task = worlds.tiny_task(horizon=3)
    with EnginePool(build_worker, worlds.worker_spec(task)) as pool:
        reference = worlds.play(pool, range(3)), digest(pool)
    other = open_pool(build_worker, worlds.worker_spec(task))
    assert repr((worlds.play(other, range(3)), digest(other))) == repr(reference)
