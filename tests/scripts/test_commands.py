"""The commands as a user meets them: output, files, errors."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.kasmina import load_model
from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.scripts.cli import main
from esper.scripts.host_run import build_model, default_schedule, run_host


def esper(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "esper.scripts.cli", *args], cwd=cwd, capture_output=True, text=True)


def test_grow_tells_what_grew_and_leaves_networks_that_load(tmp_path: Path) -> None:
    done = esper("grow", "--epochs", "12", "--out", str(tmp_path / "grown"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "What grew" in done.stdout
    assert "cnn.conv" in done.stdout
    assert "left alone" in done.stdout
    model = load_model(tmp_path / "grown" / "model.safetensors").model.eval()
    network = torch.export.load(tmp_path / "grown" / "network.pt2").module()
    x = load_task_data(get_task_spec("digits_blind")).val.inputs
    assert torch.equal(network(x), model(x))
    assert (tmp_path / "grown" / "growth.png").stat().st_size > 10_000
    with (tmp_path / "grown" / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["alone"] * 12 + ["grown"] * 12


def test_evaluate_goes_on_where_it_stopped_and_refuses_to_mix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    main(["evaluate", "--task", "digits_limited", "--seeds", "1", "--out", str(out)])
    first = (out / "results.csv").read_text()
    main(["evaluate", "--task", "digits_limited", "--seeds", "2", "--out", str(out)])
    assert (out / "results.csv").read_text().startswith(first)
    assert len((out / "results.csv").read_text().splitlines()) == 5
    assert "Paired differences" in (out / "report.md").read_text()
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "--task", "digits_limited", "--blueprint", "mlp.lora", "--out", str(out)])
    assert stopped.value.code == 2
    assert "another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["grow", "--task", "digit_blind"], "unknown task 'digit_blind'. Known: digits_mlp"),
        (["grow", "--blueprint", "cnn.convv"], "unknown blueprint 'cnn.convv'. Known: mlp.norm"),
        (["grow", "--epochs", "0"], "horizon must be at least 1, got 0"),
        (["grow", "--budget", "0"], "param_budget must be at least 1, got 0"),
        (["evaluate", "--seeds", "0"], "--seeds must be at least 1, got 0"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(args: list[str], message: str, tmp_path: Path) -> None:
    done = esper(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_data_names_places_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESPER_CIFAR10", raising=False)
    done = esper("grow", "--task", "cifar_baseline", "--data-dir", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    for words in ("CIFAR-10 not found", str(tmp_path), "Get it:"):
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_leaving_alone_and_growing_start_from_the_same_bits() -> None:
    task = override(get_task_spec("digits_blind"), horizon=1)
    data = load_task_data(task)
    plan = default_schedule(build_model(task, data, 3).layout, 40)
    alone, grown = run_host(task, data, (), 3), run_host(task, data, plan, 3)
    for name, param in alone.model.host_parameters().items():
        assert torch.equal(param, grown.model.host_parameters()[name]), name
    assert alone.history[0].val_loss == grown.history[0].val_loss


def test_a_budget_holds() -> None:
    task = get_task_spec("digits_blind")
    layout = build_model(task, load_task_data(task), 0).layout
    assert len(default_schedule(layout, 40)) == 9
    done = run_within_budget(900)
    assert done <= 900


def run_within_budget(budget: int) -> int:
    from dataclasses import replace

    task = get_task_spec("digits_blind")
    task = override(task, horizon=16, lifecycle=replace(task.lifecycle, param_budget=budget))
    data = load_task_data(task)
    run = run_host(task, data, default_schedule(build_model(task, data, 0).layout, 16), 0)
    assert run.undone, "the second seed cannot have been planted"
    return run.model.param_counts().total
