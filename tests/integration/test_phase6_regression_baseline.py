"""Against what is stored: a seeded run has the same bits, and the engine is as fast beside plain PyTorch as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.engine_figures import bench_task, compare
from benchmarks.plain_loops import build_bench_worker
from esper.runtime.tasks import load_task_data
from esper.simic.run.environment import identity, identity_differences
from esper.simic.training.env_factory import make_worker_spec
from esper.tolaria.pool import EnginePool
from tools import replay

THROUGHPUT = Path(__file__).parents[2] / "benchmarks/throughput_baseline.json"


def test_a_seeded_run_over_cifar_shaped_data_has_the_stored_bits(tmp_path: Path) -> None:
    stored = json.loads(replay.STORED.read_text(encoding="utf-8"))
    if differences := identity_differences(stored["identity"], identity()):
        pytest.skip(f"the stored run was made elsewhere: {'; '.join(differences)}")
    replay.write_noise_as_cifar(tmp_path)
    found = replay.play(replay.CIFAR_SHAPED, tmp_path)
    assert {f"cifar {name}": value for name, value in found.items()}.items() <= stored["hashes"].items()


def test_a_run_that_cannot_be_compared_is_not_taken_for_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads(replay.STORED.read_text(encoding="utf-8"))
    monkeypatch.setattr(replay, "play_all", lambda: stored["hashes"])
    monkeypatch.setattr(replay, "identity", lambda: stored["identity"])
    assert (replay.main([]), capsys.readouterr().out) == (0, "same bits\n")
    monkeypatch.setattr(replay, "play_all", lambda: {**stored["hashes"], "history": "other"})
    assert (replay.main([]), capsys.readouterr().out) == (1, "differs in history\n")
    monkeypatch.setattr(replay, "identity", lambda: {**stored["identity"], "torch": "elsewhere"})
    assert replay.main([]) == 2
    assert "not comparable" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "code", "words"), [("--help", 0, "--update"), ("--udpate", 2, "unrecognized")])
def test_what_is_no_order_to_replay_plays_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, code: int, words: str
) -> None:
    monkeypatch.delattr(replay, "play_all")
    with pytest.raises(SystemExit) as stopped:
        replay.main([flag])
    assert stopped.value.code == code
    assert words in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("task_name", ["digits_mlp", "digits_conv"])
def test_the_engine_keeps_its_speed_beside_plain_loops(task_name: str) -> None:
    baseline = json.loads(THROUGHPUT.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    task = bench_task(task_name, None, 12)
    with EnginePool(
        build_bench_worker, make_worker_spec(task, load_task_data(task)), kind="process", workers=1
    ) as pool:
        ratio = compare(pool, 4, 12)["throughput_cpu"]["median"]
    assert ratio >= baseline["ratios"][task_name] - baseline["tolerance"]
