"""The commands as a user meets them: output, files, errors."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.evidence.host_runs import HostRunner, score_committed, task_with
from esper.kasmina import load_model
from esper.leyline import EpisodeSeed
from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.scripts.cli import main
from esper.tamiyo.controllers import CONTROLLERS

SEED = [EpisodeSeed(env_id=0, episode=0, run_seed=0)]


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


def test_the_policy_that_comes_with_esper_grows_and_leaves_what_it_does_not_know_to_a_rule(tmp_path: Path) -> None:
    growing = ("grow", "--controller", "pretrained", "--budget", "1000", "--out", str(tmp_path / "grown"))
    known = esper(*growing, "--epochs", "10", cwd=tmp_path)
    assert known.returncode == 0, known.stderr
    assert "What grew" in known.stdout
    assert "outside" not in known.stderr
    longer = esper(*growing, "--epochs", "31", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert "episodes of 8 to 30 epochs, and this has 31. The rule 'schedule' decides" in longer.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["grow", "--task", "digit_blind"], "unknown task 'digit_blind'. Known: digits_mlp"),
        (["grow", "--blueprint", "cnn.convv"], "unknown blueprint 'cnn.convv'. Known: mlp.norm"),
        (["grow", "--epochs", "0"], "horizon must be at least 1, got 0"),
        (["grow", "--budget", "0"], "param_budget must be at least 1, got 0"),
        (["grow", "--controller", "heurstic"], "unknown controller 'heurstic'. Known: wait_only"),
        (["grow", "--controller", "wait_only", "--blueprint", "cnn.conv"], "wait_only has no parameters blueprint"),
        (["evaluate", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["evaluate", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["evaluate", "--arms", "weekly"], "unknown arm 'weekly'. Known: wait_only"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    reported = [line for line in capsys.readouterr().err.splitlines() if "loading the native executor" not in line]
    assert len(reported) == 1
    assert message in reported[0]
    assert list(tmp_path.iterdir()) == []


def test_missing_data_names_places_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESPER_CIFAR10", raising=False)
    done = esper("grow", "--task", "cifar_baseline", "--data-dir", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    for words in ("CIFAR-10 not found", str(tmp_path), "Get it:"):
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_leaving_alone_and_growing_start_from_the_same_bits() -> None:
    task = override(get_task_spec("digits_blind"), horizon=8)
    with HostRunner(task, load_task_data(task)) as runner:
        (alone,) = runner.run(runner.controller("wait_only"), SEED)
        (grown,) = runner.run(runner.controller("schedule"), SEED)
    # In the first epoch the seed trains behind the host, which therefore is the same host still.
    assert alone.reports[0].val_loss == grown.reports[0].val_loss
    assert alone.reports[0].train_loss == grown.reports[0].train_loss
    assert alone.reports[-1].val_loss != grown.reports[-1].val_loss


def test_a_budget_holds_in_every_epoch() -> None:
    task = task_with("digits_blind", epochs=16, budget=900)
    with HostRunner(task, load_task_data(task)) as runner:
        (run,) = runner.run(runner.controller("schedule"), SEED)
    assert max(report.total_params for report in run.reports) == 882
    first, second = run.grown_seeds
    assert first.params + second.params <= 900 - run.reports[0].host_params
    assert second.params < first.params, "a second seed like the first does not fit: the largest that does is planted"


@pytest.mark.parametrize("name", [name for name in CONTROLLERS if name != "rate_matched"])
def test_every_fixed_controller_plays_a_real_host(name: str) -> None:
    task = override(get_task_spec("digits_limited"), horizon=12)
    with HostRunner(task, load_task_data(task)) as runner:
        (run,) = runner.run(runner.controller(name), SEED)
    assert len(run.reports) == 12
    assert run.reports[-1].val_accuracy_pct > 60


def test_the_delivered_network_scores_what_validation_measured() -> None:
    task = override(get_task_spec("digits_blind"), horizon=8)
    data = load_task_data(task)
    with HostRunner(task, data) as runner:
        (run,) = runner.run(runner.controller("schedule"), SEED)
    loss, accuracy = score_committed(task, data, run.model, data.val)
    assert accuracy == run.reports[-1].committed_accuracy_pct
    assert loss == pytest.approx(run.reports[-1].committed_loss, rel=1e-6)


# ---- compare


def test_compare_says_whether_a_task_should_be_grown(capsys, tmp_path):
    out = tmp_path / "table.txt"
    main(["compare", "digits_limited", "--epochs", "10", "--seeds", "2", "--out", str(out)])
    shown = capsys.readouterr().out
    for arm in ("grown", "left alone", "the grown network from the start"):
        assert f"\n{arm} " in shown
    assert "training GMACs" in shown
    assert "Do not grow this model" in shown or "Growing " in shown
    assert out.read_text() == shown


def test_compare_says_so_where_nothing_grew(capsys):
    main(["compare", "digits_limited", "--epochs", "2", "--seeds", "1"])
    assert "Nothing grew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "TASK|FILE.py:FUNCTION"),
        (["a.py:b"], "give --data FILE.py:FUNCTION too"),
        (["digits_limited", "--data", "a.py:b"], "A task brings its own"),
        (["digits_limitd"], "digits_limited"),
    ],
)
def test_compare_wants_a_task_or_a_model_with_data(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
