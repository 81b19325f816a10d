"""A Ray cluster of two nodes on this machine, for all tests of a session that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from esper.leyline.files import scratch_folder
from esper.tolaria.ray_handle import PRIVATE, environment

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Give `options={"address": ray_cluster.address}` to a pool of kind "ray". Nothing leaves the machine."""
    with scratch_folder() as folder, environment({**PRIVATE, "RAY_TMPDIR": str(folder)}):
        pytest.importorskip("ray", reason="needs the extra `ray`")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()
