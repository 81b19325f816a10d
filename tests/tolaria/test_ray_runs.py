"""`esper train` on a cluster of two nodes: the policy of one process, also when a node is lost, or the head."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.files import SCRATCH_PREFIX, scratch_folder
from tests.integration.kills import _await, checkpoints, final_bits, launch, lines
from tests.tolaria.conftest import lose_node, two_nodes

psutil = pytest.importorskip("psutil", reason="comes with the extras")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"),
    pytest.mark.timeout(900),
]
ROUNDS = 4
FLAGS = (
    "--task", "digits_blind", "--rounds", ROUNDS, "--envs", 4, "--episode-length", 12, "--calibration-runs", 0,
    "--checkpoint-s", 0, "--keep-checkpoints", ROUNDS, "--seed", 5,
)  # fmt: skip


def bits(run: Path) -> dict[str, object]:
    """The last checkpoint without clocks and without where hosts were trained."""
    files = final_bits(run, ROUNDS)
    for place in ("worker_kind", "ray_address"):
        files["state.json"]["config"].pop(place)  # type: ignore[index]
    return files


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, out + err


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    runs = tmp_path_factory.mktemp("inline")
    code, said = finished(launch("ppo", *FLAGS, "--runs", runs, "--run-id", "run", "--worker-kind", "inline"))
    assert code == 0, said
    return bits(runs / "run")


def lose_in_mid_run(runs: Path, cluster: Any, lose: Callable[[], None]) -> tuple[int, str]:
    """Trains on the cluster and loses a part of it in the second round."""
    flags = ("--worker-kind", "ray", "--ray-address", cluster.address, "--workers", 2)
    process = launch("ppo", *FLAGS, "--runs", runs, "--run-id", "run", *flags)
    _await(lambda: bool(checkpoints(runs / "run")), process)
    assert process.poll() is None, "it was over before anything could be lost"
    lose()
    return finished(process)


def test_a_node_that_is_lost_changes_no_bit(tmp_path: Path, expected: dict[str, object]) -> None:
    with two_nodes() as cluster:
        node = next(iter(cluster.worker_nodes))
        code, said = lose_in_mid_run(tmp_path, cluster, lambda: lose_node(cluster, node))
    assert code == 0, said
    states = [line["data"]["state"] for line in lines(tmp_path / "run") if line["type"] == "WORKER_STATE_CHANGED"]  # type: ignore[index]
    assert states == ["lost", "recovered"]
    assert bits(tmp_path / "run") == expected


def test_without_its_head_a_run_ends_with_a_message_and_goes_on_elsewhere_to_the_same_bits(
    tmp_path: Path, expected: dict[str, object]
) -> None:
    with two_nodes() as cluster:
        address = cluster.address
        head = cluster.head_node
        code, said = lose_in_mid_run(tmp_path, cluster, lambda: lose_node(cluster, head))
    assert code == 7, said
    assert f"the head of the Ray cluster at {address} is gone" in said
    assert "Traceback" not in said
    code, said = finished(launch("--resume", tmp_path / "run", "--worker-kind", "inline"))
    assert code == 0, said
    assert bits(tmp_path / "run") == expected


def test_a_run_that_is_killed_leaves_nothing_of_its_own_cluster(tmp_path: Path) -> None:
    process = launch("ppo", *FLAGS, "--runs", tmp_path, "--run-id", "run", "--worker-kind", "ray", "--workers", 2)
    _await(lambda: bool(checkpoints(tmp_path / "run")), process)
    started = psutil.Process(process.pid).children(recursive=True)
    folders = {Path(part) for child in started for part in _scratch_folders(child)}
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, still_there = psutil.wait_procs(started, timeout=150.0)  # two helpers try to reach the head for a minute
    assert len(started) > 3, "the cluster, and two workers"
    assert not still_there
    with scratch_folder(Path("/tmp")):  # what a killed process left goes with the next one
        assert folders
        assert not any(folder.exists() for folder in folders)


def _scratch_folders(process: Any) -> set[str]:
    """Scratch folders that a process was told of."""
    words = " ".join(process.cmdline()).replace("=", " ").split()
    return {str(Path(*Path(word).parts[:3])) for word in words if word.startswith(f"/tmp/{SCRATCH_PREFIX}")}
