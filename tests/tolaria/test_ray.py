"""Workers in a real Ray cluster: the bits of one process, on two nodes, also when one of them is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from esper.evidence.host_runs import HostRunner
from esper.leyline import wait
from esper.leyline.files import SCRATCH_PREFIX
from esper.runtime.tasks import load_task_data
from esper.simic.training.rollout import episode_seeds
from esper.tolaria import ray_handle
from esper.tolaria.kinds import Workers
from esper.tolaria.pool import EnginePool
from esper.tolaria.worker import PoolFailure, StepCancelled, WorkerError
from tests.growing import module_bits
from tests.tolaria import worlds
from tests.tolaria.conftest import lose_node
from tests.tolaria.test_pool import Facts, ListSink, is_running, is_same, pids
from tests.tolaria.worlds import NAN_IN_ENV_2, NUM_ENVS, Fault, FaultySpec, build_faulty, faulty_spec

psutil = pytest.importorskip("psutil", reason="comes with the extras")
if find_spec("ray") is None:  # it reads its settings when it is imported, so that is left to Esper
    pytest.skip("needs the extra `ray`", allow_module_level=True)


@pytest.fixture(scope="module")
def expected() -> tuple[Facts, dict[int, str]]:
    """A whole round in this process: growth, pruning, a fossil, and a rollback of env 2 in epoch 3."""
    with EnginePool(build_faulty, faulty_spec(NAN_IN_ENV_2)) as pool:
        return worlds.play(pool), worlds.digest(pool)


def actors(cluster: Any, spec: FaultySpec, **options: Any) -> EnginePool:
    return EnginePool(build_faulty, spec, kind="ray", workers=2, options={"address": cluster.address}, **options)


def alive() -> dict[str, int]:
    """Living actors by node."""
    import ray

    found = [actor["Address"]["NodeID"] for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
    return {node: found.count(node) for node in found}


def all_end(processes: list[int]) -> bool:
    """Whether all are gone before long: a cluster of somebody else's ends workers after the pool has left."""
    until = time.monotonic() + 20.0
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_running, processes))


@pytest.mark.slow
def test_two_nodes_give_the_bits_of_one_process_also_when_one_is_lost_in_mid_episode(
    ray_cluster: Any, expected: tuple[Facts, dict[int, str]]
) -> None:
    sink, doomed = ListSink(), next(iter(ray_cluster.worker_nodes))

    def lose(epoch: int) -> None:
        if epoch == 3:
            assert alive() == {ray_cluster.head_node.node_id: 1, doomed.node_id: 1}
            lose_node(ray_cluster, doomed)

    with actors(ray_cluster, faulty_spec(NAN_IN_ENV_2), sink=sink) as pool:
        assert {hello.threads for hello in pool.hellos} == {1}
        assert is_same((worlds.play(pool, before=lose), worlds.digest(pool)), expected)
        assert (pool.num_restarts, pool.num_abandoned) == (1, 0)
        assert list(alive()) == [ray_cluster.head_node.node_id]
    assert sink.states == ["lost", "recovered"]
    assert sink.events[1].data.num_epochs_replayed == 3  # type: ignore[attr-defined]


@pytest.mark.slow
def test_workers_that_die_hang_or_fail_are_replaced_or_reported(
    ray_cluster: Any, tmp_path: Path, expected: tuple[Facts, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_handle, "MIN_SILENCE_S", 10.0)
    monkeypatch.setattr(ray_handle, "SILENCE_FACTOR", 0.0)
    faults = [
        Fault(kind="die", env_id=1, epoch=2, once=tmp_path / "died"),
        Fault(kind="stop", env_id=3, epoch=4, once=tmp_path / "stopped"),
        Fault(kind="raise", env_id=0, epoch=7, once=tmp_path / "raised"),
    ]
    sink = ListSink()
    with actors(ray_cluster, faulty_spec(NAN_IN_ENV_2, *faults), sink=sink) as pool:
        before = pids(pool)
        assert repr(worlds.play(pool, range(7))) == repr(expected[0][:8])
        assert sink.states == ["lost", "recovered", "lost", "recovered"]
        with pytest.raises(WorkerError, match=r"(?s)MemoryError: no more memory for this host.*Traceback"):
            worlds.play(pool, [7])
        assert pool.num_restarts == 2
    assert all_end(before), "also the one that was stopped: Ray kills it when it has not answered for five seconds"


@pytest.mark.slow
def test_a_busy_worker_says_where_it_is_and_a_cancelled_step_ends_at_once(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_handle, "PULSE_S", 0.0)
    slow = [Fault(kind="sleep", env_id=env_id, epoch=1, once=None) for env_id in range(NUM_ENVS)] * 40
    with actors(ray_cluster, faulty_spec(*slow)) as pool:
        pool.reset(episode_seeds(7, 3, NUM_ENVS))
        pool.step([wait(i) for i in range(NUM_ENVS)])

        def cancel() -> None:
            until = time.monotonic() + 20.0
            while time.monotonic() < until and pool.progress()[0].epoch != 1:
                time.sleep(0.05)
            seen.extend(pool.progress())
            pool.cancel()

        seen: list[Any] = []
        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(StepCancelled):
            pool.step([wait(i) for i in range(NUM_ENVS)])
        thread.join()
        left = pids(pool)
    assert (seen[0].worker_id, seen[0].env_ids, seen[0].epoch) == (0, (0, 1), 1)
    assert all_end(left)


@pytest.mark.slow
def test_a_second_pool_does_not_wait_for_the_cpus_of_the_first(ray_cluster: Any, expected: Any) -> None:
    four: dict[str, Any] = {
        "kind": "ray",
        "workers": 4,
        "options": {"address": ray_cluster.address},
    }  # of the six CPUs there are
    spec = faulty_spec(NAN_IN_ENV_2)
    with EnginePool(build_faulty, spec, **four), EnginePool(build_faulty, spec, **four) as second:
        assert is_same((worlds.play(second), worlds.digest(second)), expected)


def test_rows_lie_once_in_the_memory_of_a_node(ray_cluster: Any) -> None:
    spec = worlds.worker_spec()
    with ray_handle._connection(ray_cluster.address, 2) as (connected, _):
        stored = connected.put(spec)
        first, second = (connected.get(stored).only.rows["train_inputs"].open() for _ in range(2))
        assert first.data_ptr() == second.data_ptr(), "mapped, not copied"
        assert first.equal(spec.only.rows["train_inputs"].open())


def test_what_cannot_work_is_said_before_anything_starts(ray_cluster: Any) -> None:
    with pytest.raises(PoolFailure, match=r"has \d CPUs, 99 workers need one each. Lower --workers"):
        EnginePool(build_faulty, faulty_spec(), kind="ray", workers=99, options={"address": ray_cluster.address})
    import ray

    assert not ray.is_initialized()


# ---- a cluster of one's own


def listening(processes: list[Any]) -> set[str]:
    """Addresses at which processes can be reached."""
    return {c.laddr.ip for process in processes for c in process.net_connections("inet") if c.status == "LISTEN"}


@pytest.mark.slow
def test_a_cluster_of_its_own_is_open_to_nobody_and_leaves_nothing(
    tmp_path: Path, expected: tuple[Facts, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before, handler = psutil.Process().children(recursive=True), signal.getsignal(signal.SIGTERM)
    environment = dict(os.environ)
    with EnginePool(build_faulty, faulty_spec(NAN_IN_ENV_2), kind="ray", workers=2) as pool:
        import ray

        folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
        assert folder.name.startswith(SCRATCH_PREFIX)
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        assert {address.removeprefix("::ffff:") for address in listening(started)} == {"127.0.0.1"}
        assert is_same((worlds.play(pool), worlds.digest(pool)), expected)
    gone, still_there = psutil.wait_procs(started, timeout=20.0)
    assert gone
    assert not still_there
    assert not folder.exists()
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is handler, "a run has its own way to stop"
    assert dict(os.environ) == environment


def test_an_address_where_nothing_is_ends_with_a_message() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(PoolFailure, match=rf"no Ray cluster answers at 127.0.0.1:{port}. Start one with `ray start"):
        EnginePool(build_faulty, faulty_spec(), kind="ray", options={"address": f"127.0.0.1:{port}"})
    with pytest.raises(PoolFailure, match=r"used at nowhere: Invalid address format: nowhere. Expected HOST:PORT of a"):
        EnginePool(build_faulty, faulty_spec(), kind="ray", options={"address": "nowhere"})


@pytest.mark.slow
def test_hosts_of_an_evaluation_are_the_same_on_a_cluster(ray_cluster: Any) -> None:
    task = worlds.tiny_task()
    data, seeds = load_task_data(task), episode_seeds(3, 0, 2)
    with HostRunner(task, data) as here:
        expected = here.run(here.controller("schedule"), seeds)
    place = Workers(count=2, kind="ray", ray_address=ray_cluster.address)
    with HostRunner(task, data, workers=place) as there:
        found = there.run(there.controller("schedule"), seeds)
    for one, other in zip(expected, found, strict=True):
        assert [worlds.without_times(report) for report in one.reports] == [
            worlds.without_times(report) for report in other.reports
        ]
        assert module_bits(one.model) == module_bits(other.model)
