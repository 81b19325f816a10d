"""Which backend a run takes: native where it can, torch where it must, never silently, and never two in one run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from torch import Tensor, nn

from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline import EpisodeSeed, wait
from esper.runtime.tasks import get_task_spec, load_task_data
from esper.simic.run import session
from esper.simic.run.session import RunStart, start_again, start_new
from esper.simic.training import backend as backends
from esper.simic.training.backend import TORCH, HostBackend, choose_backend
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.native_executor import NativeExecutor
from esper.simic.training.vectorized import open_session, open_trainer
from esper.simic.training.vectorized_trainer import Recorder
from esper.tolaria.executor import available
from esper.tolaria.executor.available import VERSION, backend_version, why_not_native
from esper.tolaria.torch_executor import TorchExecutor
from tests.tolaria.worlds import tiny_task

SMALL = TrainingConfig(rounds=1, envs=2, episode_length=2, calibration_runs=0, worker_kind="inline", console="off")


def chosen(wanted: str, name: str = "digits_blind", **where: str) -> HostBackend:
    task = tiny_task(name)
    return choose_backend(wanted, task, load_task_data(task), **where)


@pytest.mark.parametrize("name", ["digits_blind", "digits_conv", "digits_mlp", "digits_saturated"])
def test_auto_is_native_for_every_image_and_table_task(name):
    assert chosen("auto", name) == HostBackend(name="native", note=None)


def test_auto_leaves_transformers_to_torch_and_says_why():
    assert chosen("auto", "pydoc_lm") == HostBackend(name="torch", note="its inputs are torch.int64")
    with pytest.raises(ValueError, match="native cannot train pydoc_lm here: its inputs are"):
        chosen("native", "pydoc_lm")


def test_torch_when_asked_for_and_other_names_are_refused():
    assert chosen("torch") == TORCH
    with pytest.raises(ValueError, match="backend must be one of auto, native, torch, got 'jax'"):
        chosen("jax")


@pytest.mark.parametrize("where", [{"device": "cuda:0"}, {"amp": "bf16"}])
def test_other_devices_and_mixed_precision_are_torch(where):
    found = chosen("auto", **where)
    assert found.name == "torch"
    assert next(iter(where.values())) in found.note


# ---- machines that lack something


def test_without_numba_torch_runs_and_says_so(monkeypatch):
    monkeypatch.setattr(available, "find_spec", lambda name: None)
    assert chosen("auto") == HostBackend(name="torch", note="numba is not installed")
    with pytest.raises(ValueError, match="numba is not installed"):
        chosen("native")


def test_without_fused_multiply_add_torch_runs_and_says_so(monkeypatch):
    from llvmlite import binding

    monkeypatch.setattr(available.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"fma": False, "avx2": True})
    assert chosen("auto") == HostBackend(name="torch", note="this CPU has no fused multiply-add")


def test_where_compiled_code_cannot_be_kept_a_run_says_so(monkeypatch):
    from esper.tolaria.executor.kernels import run as kernels

    monkeypatch.setattr(kernels, "cache_folder", lambda: None)
    said: list[str] = []
    available.warm_up(said.append)
    assert len(said) == 1
    assert "set NUMBA_CACHE_DIR" in said[0]


def test_on_a_machine_nobody_tried_torch_runs_and_says_so(monkeypatch):
    monkeypatch.setattr(available.platform, "machine", lambda: "riscv64")
    assert why_not_native() == "it is not tried on riscv64 machines"


def test_a_whole_run_without_numba_says_so_on_stderr():
    code = """
import sys
sys.modules["numba"] = None  # importing it raises; find_spec finds nothing
from esper.simic.training.config import TrainingConfig
from esper.simic.training.vectorized import train_ppo_vectorized
train_ppo_vectorized(TrainingConfig(rounds=1, envs=2, episode_length=2, calibration_runs=0, worker_kind="inline"))
assert "esper.tolaria.executor.kernels" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "esper: backend torch: numba is not installed" in done.stderr


# ---- seeds without native operations


class Flipped(nn.Module):
    """An operation that has no native one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


@pytest.fixture
def with_flip(monkeypatch):
    """A task with a blueprint that only torch can run, and its data."""
    row = replace(BLUEPRINTS["cnn.se"], key="cnn.flip", body=lambda *args: Flipped(), params=lambda channels: channels)
    monkeypatch.setitem(BLUEPRINTS, "cnn.flip", row)
    task = replace(tiny_task("digits_blind"), blueprints=("cnn.se", "cnn.flip"))
    return task, load_task_data(task)


def test_a_blueprint_without_native_operation_makes_auto_torch_and_native_mixed(with_flip):
    found = choose_backend("auto", *with_flip)
    assert found.name == "torch"
    assert "cnn.flip: torch operator aten.flip.default" in found.note
    found = choose_backend("native", *with_flip)
    assert found.name == "native"
    assert found.note.startswith("left to torch: cnn.flip")


def test_a_native_worker_trains_such_a_seed_by_torch(with_flip, monkeypatch):
    worker = build_worker(make_worker_spec(*with_flip, backend="native"), lambda epoch, batch: None)
    worker.reset([EpisodeSeed(env_id=env_id, episode=0, run_seed=0) for env_id in range(2)])
    ran: list[tuple[str, int]] = []
    for kind in (NativeExecutor, TorchExecutor):

        def train(self, envs, rows, real=kind.train):
            ran.extend((type(self).__name__, env.env_id) for env in envs)
            real(self, envs, rows)

        monkeypatch.setattr(kind, "train", train)
    env = worker.envs[1]
    env.model.germinate("r0c0", "cnn.flip", "linear", 0)
    worker.step([wait(0), wait(1)])
    assert sorted(ran) == [("NativeExecutor", 0), ("TorchExecutor", 1)]


def test_a_module_that_looks_at_values_is_left_to_torch():
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

    worker = build_worker(
        make_worker_spec(tiny_task("digits_blind"), load_task_data(get_task_spec("digits_blind"))), _beat
    )
    worker.reset([EpisodeSeed(env_id=0, episode=0, run_seed=0)])
    env = worker.envs[0]
    env.model.host.segments[0].append(Looks())
    why = NativeExecutor().why_not(env)
    assert why is not None


def _beat(epoch, batch):
    return None


# ---- the identity of a run


def _backend_of(config: TrainingConfig, **more) -> tuple[str, str]:
    with open_trainer(config, lambda parts: Recorder(), **more) as trainer:
        (executor, *_) = trainer.pool._members[0].handle._worker._ops.executors
        return trainer.config.backend, type(executor).__name__


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("auto", ("native", "NativeExecutor")),
        ("torch", ("torch", "TorchExecutor")),
        ("native", ("native", "NativeExecutor")),
    ],
)
def test_a_run_knows_its_backend(wanted, found):
    assert _backend_of(replace(SMALL, backend=wanted)) == found


def _trained(tmp_path, backend: str) -> RunStart:
    start = start_new(replace(SMALL, backend=backend, rounds=2), tmp_path, f"run-{backend}")
    with open_session(start) as opened:
        opened.trainer.run_round()
        opened.trainer.offer_checkpoint(last=True)
    return start


def test_a_resume_goes_on_with_the_backend_it_began_with_and_refuses_another(tmp_path, monkeypatch):
    path = _trained(tmp_path, "auto").path
    assert start_again(path, {}).config.backend == "native"
    assert start_again(path, {"backend": "auto"}).config.backend == "native"
    with pytest.raises(ValueError, match="cannot change on resume: backend native -> torch"):
        start_again(path, {"backend": "torch"})
    monkeypatch.setattr(session, "VERSION", VERSION + 1)
    with pytest.raises(ValueError, match=f"was trained by version {VERSION} of the native backend"):
        start_again(path, {})
    monkeypatch.setattr(backends, "why_not_native", lambda: "numba is not installed")
    with (
        pytest.raises(ValueError, match="numba is not installed"),
        open_session(RunStart(config=replace(SMALL, backend="native"))),
    ):
        pass


def test_a_torch_run_stays_torch(tmp_path):
    path = _trained(tmp_path, "torch").path
    assert start_again(path, {}).config.backend == "torch"


def test_versions_are_named():
    assert backend_version("native") == f"native {VERSION}"
    assert backend_version("torch") == "torch"
