"""Ray clusters of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from esper.leyline.files import scratch_folder
from esper.tolaria.ray_handle import PRIVATE, environment

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}
HEAD = {**NODE, "num_cpus": 4, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Has room for all tests that come after the other node was lost."""
QUICK = {"RAY_prestart_worker_first_driver": "0"}
"""Else every CPU starts a process at once, whether it will be used or not."""
NOTICES_SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 2, "health_check_initial_delay_ms": 0}
"""That a node is gone. By default it takes half a minute."""


def lose_node(cluster: Any, node: Any) -> None:
    """All processes of a node at once, as when a machine is switched off; Ray's own way would let workers linger."""
    import psutil

    raylets = [psutil.Process(info.process.pid) for info in node.all_processes["raylet"]]
    for process in [child for raylet in raylets for child in raylet.children(recursive=True)]:
        process.kill()
    cluster.remove_node(node, allow_graceful=False)


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A cluster that nothing outside this machine can reach. What processes started in the block need is set."""
    with scratch_folder() as folder, environment({**PRIVATE, **QUICK, "RAY_TMPDIR": str(folder)}):
        pytest.importorskip("ray", reason="needs the extra `ray`")
        from ray.cluster_utils import Cluster

        system = {"_system_config": dict(NOTICES_SOON)}  # Ray adds to it
        cluster = Cluster(initialize_head=True, head_node_args={**HEAD, **system})
        try:
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One for all tests. Give `options={"address": ray_cluster.address}` to a pool of kind "ray"."""
    with two_nodes() as cluster:
        yield cluster
