"""`esper train` as a person uses it: what it prints, what it leaves behind, and what it says about mistakes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.leyline.rundir import CHECKPOINTS_DIR, CONFIG_FILE, STATUS_FILE
from esper.scripts.cli import main
from esper.simic.agent.ppo import PPOAgent
from esper.simic.run import session
from esper.simic.run.recorder import RunRecorder
from esper.simic.training import vectorized
from tests.nissa.events import log_path
from tests.runtime.data_files import cifar_batches, write_cifar
from tests.telemetry.logs import events_of

SMOKE = ["--preset", "smoke", "--task", "digits_mlp", "--workers", "1"]


def train(*arguments):
    main(["train", *map(str, arguments)])


def test_a_run_leaves_its_directory(tmp_path, capsys):
    train("ppo", *SMOKE, "--telemetry-dir", tmp_path, "--run-id", "a")
    run = tmp_path / "a"
    assert json.loads((run / CONFIG_FILE).read_text())["rounds"] == 2
    assert log_path(run).stat().st_size > 0
    assert (run / STATUS_FILE).is_file()
    assert {path.name for path in (run / CHECKPOINTS_DIR).iterdir()} == {"ckpt-00000001", "ckpt-00000002"}
    shown = capsys.readouterr().out
    assert "round 2/2" in shown
    assert f"Done. Everything is in {run}" in shown


def test_a_fixed_controller_trains_through_the_same_command(tmp_path, capsys):
    train("heuristic", *SMOKE, "--runs", tmp_path, "--run-id", "h")
    assert "heuristic round 2/2" in capsys.readouterr().out


def test_a_finished_run_goes_on_with_more_rounds(tmp_path, capsys):
    train("ppo", *SMOKE, "--runs", tmp_path, "--run-id", "a")
    train("--resume", tmp_path / "a", "--rounds", 3)
    assert "resumed after round 2" in capsys.readouterr().out
    assert (tmp_path / "a" / CHECKPOINTS_DIR / "ckpt-00000003").is_dir()


def test_a_run_that_goes_on_elsewhere_forgets_how_many_workers_it_had(tmp_path):
    train("ppo", *SMOKE, "--rounds", 1, "--worker-kind", "simulated", "--runs", tmp_path, "--run-id", "a")
    assert session.start_again(tmp_path / "a", {"worker_kind": "simulated"}).config.workers == 1
    elsewhere = session.start_again(tmp_path / "a", {"worker_kind": "process"}).config
    assert (elsewhere.worker_kind, elsewhere.workers) == ("process", None)


def test_the_policy_is_updated_as_often_per_round_as_asked_and_a_resume_changes_no_bit(tmp_path):
    twice = ["ppo", *SMOKE, "--ppo-updates-per-batch", 2, "--target-kl", 1e9, "--runs", tmp_path]
    for run in ("whole", "parts"):
        train(*twice, "--run-id", run)
    shutil.rmtree(tmp_path / "parts" / CHECKPOINTS_DIR / "ckpt-00000002")
    train("--resume", tmp_path / "parts")
    whole, parts = (PPOAgent.load(tmp_path / run / CHECKPOINTS_DIR / "ckpt-00000002") for run in ("whole", "parts"))
    assert whole.updates == 4
    assert whole.to_files() == parts.to_files()
    first, again = ([e["data"] for e in events_of(tmp_path / r, "PPO_UPDATE_COMPLETED")] for r in ("whole", "parts"))
    assert (len(first), again) == (2, [*first, first[1]])
    assert [data["metrics"]["num_optimizer_steps"] for data in first] == [2 * 2 * whole.config.ppo_epochs] * 2


def test_a_run_may_be_silent(tmp_path, capsys):
    train("wait_only", *SMOKE, "--rounds", 1, "--runs", tmp_path, "--run-id", "a", "--console", "off")
    shown = capsys.readouterr().out
    assert "round 1/1" not in shown
    assert "Done." in shown


def test_a_file_may_name_the_controller_and_the_command_line_goes_before_it(tmp_path):
    file = tmp_path / "rule.json"
    file.write_text('{"controller": "heuristic"}')
    train(*SMOKE, "--config-json", file, "--rounds", 1, "--runs", tmp_path, "--run-id", "file")
    train("wait_only", *SMOKE, "--config-json", file, "--rounds", 1, "--runs", tmp_path, "--run-id", "word")
    assert json.loads((tmp_path / "file" / CONFIG_FILE).read_text())["controller"] == "heuristic"
    assert json.loads((tmp_path / "word" / CONFIG_FILE).read_text())["controller"] == "wait_only"


def test_a_resumed_side_of_a_comparison_still_needs_its_whole_log(tmp_path):
    train(*SMOKE, "--runs", tmp_path, "--dual-ab", "shaped", "sparse")
    for run in (path for path in tmp_path.iterdir() if (path / CONFIG_FILE).is_file()):
        assert session.start_again(run, {}).config.require_complete


def test_two_configurations_are_compared_on_the_same_hosts(tmp_path, capsys):
    train(*SMOKE, "--runs", tmp_path, "--dual-ab", "shaped", "sparse")
    assert "sparse - shaped" in capsys.readouterr().out
    assert len([path for path in tmp_path.iterdir() if (path / CONFIG_FILE).is_file()]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "digit_cnn"], "unknown task 'digit_cnn'. Known: digits_mlp"),
        (["--gamma", "1.2"], "gamma must be in (0, 1], got 1.2"),
        (["--envs", "4", "--workers", "8"], "at most one worker per env. Lower --workers"),
        (["--preset", "huge"], "unknown preset 'huge'. Known: default"),
        (["--config-json", "none.json"], "configuration file none.json does not exist"),
        (["--reward-mode", "generous"], "unknown reward mode 'generous'"),
        (["--device", "cpu:x"], "malformed device 'cpu:x'"),
        (["--device", "cuda:99"], "is not on this machine"),
        (["--task", "cifar_baseline", "--data-dir", "nowhere"], "CIFAR-10 not found"),
        (["--param-budget", "100"], "below the"),
        (["--run-id", "../outside"], "is not allowed"),
        (["--resume", "nowhere"], "there is no run directory nowhere"),
        (["--dual-ab", "shaped", "nothing"], "is neither a reward mode"),
        (["--dual-ab", "shaped", "shaped"], "nothing to compare"),
        (["--resume", "nowhere", "--run-id", "b"], "--run-id does not go with --resume: a run keeps the name and the"),
        (["--resume", "nowhere", "--group", "main"], "--group does not go with --resume: a run keeps the name and the"),
        (["--resume", "nowhere", "--preset", "smoke"], "--preset does not go with --resume: a run keeps its config"),
        (["--resume", "nowhere", "--config-json", "c"], "--config-json does not go with --resume: a run keeps its"),
        (["--resume", "nowhere", "--runs", "r"], "--telemetry-dir does not go with --resume: it names the run"),
        (["--level", "off", "--require-complete", "True"], "asks for a complete log, but level=off keeps none"),
        (["--dual-ab", "shaped", "sparse", "--run-id", "b"], "--run-id does not go with --dual-ab: it starts two new"),
        (["--dual-ab", "shaped", "sparse", "--group", "g"], "--group does not go with --dual-ab: it starts two new"),
        (["--dual-ab", "shaped", "sparse", "--resume", "a"], "--resume does not go with --dual-ab: it starts two new"),
        (["--console", "loud"], "console must be one of auto, rich, plain, off, got 'loud'"),
        (["--level", "loud"], "level must be one of off, minimal, normal, debug, got 'loud'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESPER_CIFAR10", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        train("ppo", *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_baseline_runs_with_one_env_because_nobody_chose_its_minibatches(tmp_path, monkeypatch, capsys):
    write_cifar(tmp_path / "data", cifar_batches())
    monkeypatch.setenv("ESPER_CIFAR10", str(tmp_path / "data"))
    baseline = ["ppo", "--preset", "cifar_baseline", "--task", "cifar_baseline", "--rounds", 1, "--envs", 1]
    command = [*baseline, "--episode-length", 5, "--telemetry-dir", tmp_path / "runs"]
    done = subprocess.run(
        [sys.executable, "-m", "esper.scripts.train", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Done." in done.stdout
    with pytest.raises(SystemExit):
        train(*baseline, "--minibatches", 4, "--telemetry-dir", tmp_path / "runs")
    assert "envs=1 but minibatches=4" in capsys.readouterr().err


@pytest.mark.parametrize("controller", ["schedule", "ppoo"])
def test_unknown_controllers_are_named(controller, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        train(controller, *SMOKE)
    assert caught.value.code == 2
    assert f"unknown controller '{controller}'. Known: ppo" in capsys.readouterr().err


def test_an_unknown_flag_is_refused_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as caught:
        train("ppo", "--rouns", "3")
    assert caught.value.code == 2
    assert "--rounds" in capsys.readouterr().err


def test_a_name_that_is_taken_is_refused(tmp_path, capsys):
    train("wait_only", *SMOKE, "--runs", tmp_path, "--run-id", "a", "--rounds", 1)
    with pytest.raises(SystemExit) as caught:
        train("wait_only", *SMOKE, "--runs", tmp_path, "--run-id", "a")
    assert caught.value.code == 2
    assert "Resume it, or choose another name" in capsys.readouterr().err


def test_a_resume_may_not_change_the_run(tmp_path, capsys):
    train("ppo", *SMOKE, "--runs", tmp_path, "--run-id", "a", "--rounds", 1)
    with pytest.raises(SystemExit) as caught:
        train("--resume", tmp_path / "a", "--gamma", 0.5)
    assert caught.value.code == 2
    assert "cannot change on resume: gamma None -> 0.5" in capsys.readouterr().err


def test_an_unwritable_folder_is_refused(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SystemExit) as caught:
        train("ppo", *SMOKE, "--runs", blocked)
    assert caught.value.code == 6
    assert "cannot write" in capsys.readouterr().err


def test_help_explains_every_group(capsys):
    with pytest.raises(SystemExit):
        train("--help")
    shown = capsys.readouterr().out
    for words in ("run options", "machine options", "reward options", "policy options", "--episode-length", "Ctrl-C"):
        assert words in shown


# ---- in a process of its own


def start(*arguments, cwd=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "esper.scripts.train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
    )


def wait_for(condition, process, limit_s=120.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def checkpoints(run: Path) -> list[str]:
    folder = run / CHECKPOINTS_DIR
    return sorted(path.name for path in folder.glob("ckpt-*")) if folder.is_dir() else []


def test_the_first_interrupt_stops_after_the_round_and_saves(tmp_path):
    process = start("ppo", *SMOKE, "--runs", tmp_path, "--run-id", "a", "--rounds", 500, "--checkpoint-s", 0)
    wait_for(lambda: checkpoints(tmp_path / "a"), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this round" in err
    assert f"Go on with: esper train --resume {tmp_path / 'a'}" in out
    events = [json.loads(line) for line in log_path(tmp_path / "a").read_text().splitlines()]
    assert events[-1]["type"] == "RUN_ENDED"
    assert events[-1]["data"]["status"] == "interrupted"


def test_a_termination_request_stops_now_and_saves_the_boundary(tmp_path):
    process = start(
        "ppo",
        *SMOKE,
        "--runs",
        tmp_path,
        "--run-id",
        "a",
        "--rounds",
        500,
        "--checkpoint-s",
        1000,
        "--episode-length",
        40,
    )
    wait_for(lambda: checkpoints(tmp_path / "a"), process)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopping now" in err
    done = json.loads(log_path(tmp_path / "a").read_text().splitlines()[-1])["data"]["num_rounds_total"]
    assert checkpoints(tmp_path / "a")[-1] == f"ckpt-{done:08d}"


def test_a_stop_in_the_first_round_shows_the_way_on(tmp_path, monkeypatch, capsys):
    def stored(self, before, specs, after):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunRecorder, "stored", stored)
    with pytest.raises(SystemExit) as caught:
        train(*SMOKE, "--runs", tmp_path, "--run-id", "a")
    assert caught.value.code == 143
    assert (
        f"Stopped before the first round. Go on with: esper train --resume {tmp_path / 'a'}" in capsys.readouterr().out
    )
    assert checkpoints(tmp_path / "a") == ["ckpt-00000000"]
    monkeypatch.undo()
    train("--resume", tmp_path / "a")
    assert "Done." in capsys.readouterr().out


@pytest.mark.slow
def test_a_stop_while_the_scale_is_measured_is_no_crash(tmp_path):
    process = start(
        "ppo", "--task", "digits_blind", "--envs", 4, "--episode-length", 40, "--runs", tmp_path, "--run-id", "a"
    )
    wait_for((tmp_path / "a" / STATUS_FILE).is_file, process)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert "Stopped before the first round; there is nothing to go on from" in out
    last = json.loads(log_path(tmp_path / "a").read_text().splitlines()[-1])
    assert (last["type"], last["data"]["status"]) == ("RUN_ENDED", "interrupted")


def test_a_run_has_the_group_and_the_patience_it_was_given(tmp_path, monkeypatch):
    configs, opened = [], vectorized.open_recorder

    def note(start, hub, telemetry, *rest):
        configs.append(telemetry)
        return opened(start, hub, telemetry, *rest)

    monkeypatch.setattr(vectorized, "open_recorder", note)
    train(*SMOKE, "--runs", tmp_path, "--run-id", "a", "--group", "wide", "--escalation-epochs", "0")
    train(*SMOKE, "--runs", tmp_path, "--run-id", "b", "--escalation-epochs", "3")
    assert [config.escalation_epochs for config in configs] == [0, 3]
    groups = [json.loads(log_path(tmp_path / run).read_text().splitlines()[0])["group"] for run in ("a", "b")]
    assert groups == ["wide", "main"]
