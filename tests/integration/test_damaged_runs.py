"""What happens when the files of a run are damaged, foreign or cannot be written: loud, never a silent restart."""

import errno
import hashlib
import json
import os
import shutil
import signal
import socket

import pytest
from safetensors.torch import load_file, save_file

from esper.leyline import CheckpointError, StorageError
from esper.leyline.rundir import CHECKPOINTS_DIR, MANIFEST_FILE
from esper.runtime import tasks
from esper.scripts.cli import main
from esper.simic.agent import ppo
from esper.simic.client import SimicClient
from esper.simic.run import checkpoint_schedule
from esper.simic.run.run_state import load_policy
from esper.simic.run.session import start_again
from tests.integration.kills import lines
from tests.nissa.events import log_path
from tests.runtime import sines

SMOKE = ["--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--checkpoint-s", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    main(["train", "ppo", *SMOKE, "--rounds", "2", "--runs", str(runs), "--run-id", "a"])
    return runs / "a"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "a")


def newest(run):
    return run / CHECKPOINTS_DIR / "ckpt-00000002"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def wrong_version(path):
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({key: 99 if "format" in key else value for key, value in facts.items()}))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("policy.safetensors", truncate),
        ("policy.safetensors", flip),
        ("optimizer.safetensors", empty),
        ("state.json", flip),
        ("manifest.json", truncate),
        ("manifest.json", wrong_version),
        ("agent.json", lambda path: path.unlink()),
    ],
)
def test_a_damaged_newest_checkpoint_gives_way_to_the_older_one(run, file, damage, capsys):
    damage(newest(run) / file)
    main(["train", "--resume", str(run)])
    reported = capsys.readouterr()
    assert "ckpt-00000002 rejected: " in reported.err
    assert "Using ckpt-00000001" in reported.err
    assert "resumed after round 1" in reported.out
    actions = [event["data"] for event in lines(run) if event["type"] == "CHECKPOINT_RECORDED"]
    assert {"rejected", "loaded", "saved"} <= {data["action"] for data in actions}


def test_when_all_are_damaged_nothing_is_trained(run, capsys):
    for folder in (run / CHECKPOINTS_DIR).iterdir():
        flip(folder / "policy.safetensors")
    before = log_path(run).read_bytes()
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(run)])
    assert caught.value.code == 4
    assert "none of 2 checkpoints is valid" in capsys.readouterr().err
    assert log_path(run).read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path, capsys):
    main(["train", "ppo", *SMOKE, "--rounds", "3", "--runs", str(tmp_path), "--run-id", "b"])
    shutil.copytree(tmp_path / "b" / CHECKPOINTS_DIR / "ckpt-00000003", run / CHECKPOINTS_DIR / "ckpt-00000003")
    start = start_again(run, {})
    assert start.rounds_done == 2
    assert "of run b; expected a round of a" in capsys.readouterr().err
    assert load_policy(run).rounds == 2, "nor is it judged in the place of the run's own policy"
    assert "ckpt-00000003 rejected: it is of run b" in capsys.readouterr().err
    assert load_policy(run / CHECKPOINTS_DIR / "ckpt-00000003").run_id == "b", "unless it is named itself"


def test_a_run_without_checkpoints_cannot_be_resumed(run):
    shutil.rmtree(run / CHECKPOINTS_DIR)
    (run / CHECKPOINTS_DIR).mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        start_again(run, {})


def fail_saves(monkeypatch, which):
    """Makes the saves of these indices fail as on a full disk."""
    real = checkpoint_schedule.save_checkpoint

    def save(run, facts, files, **how):
        if which(facts.index):
            full = OSError(errno.ENOSPC, "No space left on device")
            raise StorageError(f"ckpt-{facts.index:08d}", full, needed_bytes=100, free_bytes=1)
        return real(run, facts, files, **how)

    monkeypatch.setattr(checkpoint_schedule, "save_checkpoint", save)


def test_a_failed_save_is_loud_and_training_goes_on(tmp_path, monkeypatch, capsys):
    fail_saves(monkeypatch, lambda index: index == 2)
    main(["train", "ppo", *SMOKE, "--rounds", "3", "--runs", str(tmp_path), "--run-id", "a"])
    error = capsys.readouterr().err
    assert "checkpoint of round 2 not saved" in error
    assert "No space left on device (100 bytes needed, 1 bytes free)" in error
    kept = sorted(path.name for path in (tmp_path / "a" / CHECKPOINTS_DIR).iterdir())
    assert kept == ["ckpt-00000001", "ckpt-00000003"]
    actions = [e["data"]["action"] for e in lines(tmp_path / "a") if e["type"] == "CHECKPOINT_RECORDED"]
    assert actions == ["saved", "save_failed", "saved"]


def test_saves_that_keep_failing_end_the_run(tmp_path, monkeypatch, capsys):
    fail_saves(monkeypatch, lambda index: index > 1)
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, "--rounds", "50", "--runs", str(tmp_path), "--run-id", "a"])
    assert caught.value.code == 6
    assert [path.name for path in (tmp_path / "a" / CHECKPOINTS_DIR).iterdir()] == ["ckpt-00000001"]
    ended = lines(tmp_path / "a")[-1]
    assert (ended["type"], ended["data"]["status"]) == ("RUN_ENDED", "failed")
    assert ended["data"]["num_rounds_total"] == 6


def test_a_log_that_cannot_be_made_durable_stops_checkpoints_too(tmp_path, monkeypatch, capsys):
    from esper.nissa import TelemetryHub

    monkeypatch.setattr(TelemetryHub, "flush", lambda self, timeout, *, fsync=False: False)
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, "--rounds", "2", "--runs", str(tmp_path), "--run-id", "a"])
    assert caught.value.code == 6
    assert "event log cannot be made durable" in capsys.readouterr().err
    assert list((tmp_path / "a" / CHECKPOINTS_DIR).iterdir()) == []


def test_a_log_with_gaps_shows_in_the_exit_code(tmp_path, monkeypatch, capsys):
    from dataclasses import replace

    from esper.nissa import TelemetryHub

    close = TelemetryHub.close
    monkeypatch.setattr(TelemetryHub, "close", lambda self, timeout=5.0: replace(close(self, timeout), num_unwritten=1))
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, "--rounds", "1", "--runs", str(tmp_path), "--run-id", "a"])
    assert caught.value.code == 3
    assert "Done." in capsys.readouterr().out, "the training itself is complete"


def test_a_whole_checkpoint_of_another_run_does_not_block_this_one(run, tmp_path, capsys):
    main(["train", "ppo", *SMOKE, "--rounds", "3", "--seed", "2", "--runs", str(tmp_path), "--run-id", "b"])
    intruder = "ckpt-00000003"
    shutil.copytree(tmp_path / "b" / CHECKPOINTS_DIR / intruder, run / CHECKPOINTS_DIR / intruder)
    main(["train", "--resume", str(run), "--rounds", "4"])
    assert start_again(run, {}).rounds_done == 4
    assert (run / CHECKPOINTS_DIR / f"rejected-{intruder}-0").is_dir()


def test_a_linked_lock_costs_the_reader_nothing(run, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    (run / "run.lock").unlink()
    (run / "run.lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(run), "--rounds", "3"])
    assert caught.value.code == 6
    assert "run.lock is a link; Esper opens regular files only" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"


# ---- contents that are wrong although every hash fits


def rehash(folder):
    """Makes sizes and hashes of a checkpoint fit what is in it now."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sign(folder, manifest)


def sign(folder, manifest):
    def canonical(values):
        return json.dumps(values, indent=1, sort_keys=True).encode()

    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    rest["sha256"] = hashlib.sha256(canonical(rest)).hexdigest()
    (folder / MANIFEST_FILE).write_bytes(canonical(rest).replace(b"Infinity", b"1e400"))


def change(folder, file, value, *path):
    content = json.loads((folder / file).read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if file == MANIFEST_FILE:
        sign(folder, content)
    else:
        (folder / file).write_text(json.dumps(content))
        rehash(folder)


@pytest.mark.parametrize(
    ("file", "value", "path"),
    [
        (MANIFEST_FILE, float("nan"), ("facts", "score")),
        (MANIFEST_FILE, float("inf"), ("facts", "score")),
        (MANIFEST_FILE, float("nan"), ("facts", "next_seq")),
        (MANIFEST_FILE, -1, ("facts", "next_seq")),
        (MANIFEST_FILE, 2**62, ("facts", "next_seq")),
        (MANIFEST_FILE, -1, ("facts", "attempt")),
        (MANIFEST_FILE, "2", ("facts", "index")),
        (MANIFEST_FILE, "12", ("files", "state.json", "size")),
        (MANIFEST_FILE, 2**31, ("files", "state.json", "size")),
        (MANIFEST_FILE, [], ("files",)),
        (MANIFEST_FILE, "\ud800", ("facts", "run_id")),
        ("agent.json", [], ("shape",)),
        ("agent.json", "wide", ("config", "width")),
        ("agent.json", 2**31, ("config", "width")),
        ("agent.json", 4096, ("config", "width")),
        ("agent.json", True, ("updates",)),
        ("agent.json", -5, ("env_steps",)),
        ("agent.json", 7, ("run_seed",)),
        ("agent.json", ["x"], ("shape", "global_columns")),
        ("agent.json", "cnn.moon", ("shape", "blueprints", 0)),
        ("agent.json", "mlp.lora", ("shape", "blueprints", 0)),  # it is there already
        ("agent.json", 0.5, ("config", "lr")),  # not the run's
        ("agent.json", 1, ("extra",)),
        ("state.json", 1, ("extra",)),
        ("state.json", 1, ("counters", "extra")),
        ("state.json", 1, ("history", 0, "extra")),
        ("state.json", 2**53 + 1, ("config", "checkpoint_s")),  # would be rounded
        ("state.json", [], ("counters",)),
        ("state.json", "2", ("counters", "next_round")),
        ("state.json", 1, ("counters", "next_round")),
        ("state.json", [], ("history",)),
        ("state.json", float("nan"), ("history", 0, "return_mean")),
        ("state.json", {}, ("history", 0, "num_ops")),
        ("state.json", -1, ("history", 0, "num_ops", "PRUNE")),
        ("state.json", {"mean": "a"}, ("reward_scale",)),
        ("state.json", None, ("reward_scale",)),
        ("state.json", {}, ("log",)),
        ("state.json", [[0]], ("log", "detector", "alarms")),
        ("state.json", [[0, "x", 1, None, "much"]], ("log", "detector", "alarms")),
        ("state.json", 10**12, ("config", "width")),
        ("state.json", "no such task", ("config", "task")),
        ("state.json", "nobody", ("config", "controller")),
        ("state.json", {"family": "loss", "floor": 0, "ceiling": 1, "reference": [1.0]}, ("calibration",)),
    ],
)
def test_wrong_contents_give_way_to_the_older_checkpoint(run, file, value, path, capsys):
    change(newest(run), file, value, *path)
    assert start_again(run, {}).rounds_done == 1
    assert "ckpt-00000002 rejected: " in capsys.readouterr().err


def test_code_that_a_checkpoint_names_is_not_run(run, tmp_path):
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w')\ndef make(): pass\n")
    change(newest(run), "state.json", f"{tmp_path}/theirs.py:make", "config", "task")
    assert start_again(run, {}).rounds_done == 1
    assert load_policy(run).rounds == 1
    assert not (tmp_path / "done").exists()


def test_a_run_on_code_of_ones_own_goes_on_when_that_code_is_named(tmp_path, monkeypatch, capsys):
    mine, run = f"{sines.__file__}:make_task", tmp_path / "a"
    small = ["--envs", "2", "--minibatches", "2", "--worker-kind", "inline", "--calibration-runs", "0"]
    main(["train", "ppo", "--task", mine, *small, "--rounds", "1", "--runs", str(tmp_path), "--run-id", "a"])
    monkeypatch.setattr(tasks, "_ASKED_FOR", set())
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(run), "--rounds", "2"])
    assert caught.value.code == 4
    assert f"If you trust that code, name it yourself: --task {mine}" in capsys.readouterr().err
    main(["train", "--resume", str(run), "--rounds", "2", "--task", mine])
    assert load_policy(run).rounds == 2


def test_a_run_folder_does_not_choose_the_machines_that_go_on_with_it(run):
    for checkpoint in (run / CHECKPOINTS_DIR).iterdir():
        change(checkpoint, "state.json", "ray", "config", "worker_kind")
        change(checkpoint, "state.json", "evil.example:6379", "config", "ray_address")
    with pytest.raises(ValueError, match=r"Name it again, --ray-address evil\.example:6379, or other workers"):
        start_again(run, {})
    assert start_again(run, {"ray_address": "10.0.0.1:6379"}).config.ray_address == "10.0.0.1:6379"
    assert start_again(run, {"worker_kind": "inline"}).config.ray_address is None


def test_a_configuration_that_lacks_a_field_is_not_completed_with_a_default(run, capsys):
    state = json.loads((newest(run) / "state.json").read_text())
    del state["config"]["epsilon_op"]
    (newest(run) / "state.json").write_text(json.dumps(state))
    rehash(newest(run))
    assert start_again(run, {}).rounds_done == 1
    assert "a field is missing, unknown or not of its type" in capsys.readouterr().err


def test_a_network_is_not_built_before_its_width_is_known_to_be_that_of_the_weights(run, monkeypatch):
    build = ppo.TamiyoNetwork

    def usual(shape, *, width, **rest):
        assert width == 128, "it may take all memory"
        return build(shape, width=width, **rest)

    change(newest(run), "agent.json", 4096, "config", "width")
    change(newest(run), "state.json", 4096, "config", "width")
    monkeypatch.setattr(ppo, "TamiyoNetwork", usual)
    assert start_again(run, {}).rounds_done == 1


@pytest.mark.parametrize("name", ["trunk.0.bias:exp_avg_sq", "trunk.0.bias:step", None])
def test_moments_that_are_lost_or_impossible_give_way_to_the_older_checkpoint(run, name):
    file = newest(run) / "optimizer.safetensors"
    tensors = load_file(file)
    if name is None:
        tensors = {}
    else:
        tensors[name] -= 1e6
    save_file(tensors, file)
    rehash(newest(run))
    assert start_again(run, {}).rounds_done == 1


@pytest.mark.parametrize("damage", ["nan", "double", "renamed", "negative"])
def test_wrong_tensors_give_way_to_the_older_checkpoint(run, damage):
    file = newest(run) / "policy.safetensors"
    tensors = load_file(file)
    name = "trunk.0.bias"
    if damage == "nan":
        tensors[name][0] = float("nan")
    elif damage == "negative":
        tensors["value.returns.var"] -= 1e6
    elif damage == "double":
        tensors[name] = tensors[name].double()
    else:
        tensors["other"] = tensors.pop(name)
    save_file(tensors, file)
    rehash(newest(run))
    assert start_again(run, {}).rounds_done == 1


def test_a_rejected_checkpoint_of_this_run_does_not_block_it(run):
    change(newest(run), "agent.json", [], "shape")
    main(["train", "--resume", str(run)])
    assert start_again(run, {}).rounds_done == 2


# ---- numbers that are wrong


@pytest.mark.parametrize("lr", ["1e30", "1e6", "1e3"])
def test_a_policy_that_diverged_is_not_saved(lr, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, "--rounds", "6", "--lr", lr, "--runs", str(tmp_path), "--run-id", "a"])
    assert caught.value.code == 5
    error = capsys.readouterr().err
    assert "the policy has diverged" in error or "has scores that are not numbers" in error
    for folder in (tmp_path / "a" / CHECKPOINTS_DIR).iterdir():
        tensors = load_file(folder / "policy.safetensors")
        assert all(bool(tensor.float().isfinite().all()) for tensor in tensors.values())
    if any((tmp_path / "a" / CHECKPOINTS_DIR).iterdir()):
        assert "The earlier ones are intact" in error
        assert start_again(tmp_path / "a", {}).rounds_done >= 1
    else:
        assert "There is no earlier one" in error
    assert lines(tmp_path / "a")[-1]["data"]["error_type"] == "NumericFailure"


def test_a_policy_that_diverges_later_keeps_what_was_saved_before(tmp_path, monkeypatch, capsys):
    end_round = SimicClient.end_round

    def diverge(self):
        end_round(self)
        if self.agent.updates == 3:
            next(self.agent.network.parameters()).data.fill_(float("inf"))

    monkeypatch.setattr(SimicClient, "end_round", diverge)
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, "--rounds", "6", "--runs", str(tmp_path), "--run-id", "a"])
    assert caught.value.code == 5
    assert "checkpoint of round 3 not saved" in (reported := capsys.readouterr().err)
    assert "The earlier ones are intact" in reported
    monkeypatch.undo()
    main(["train", "--resume", str(tmp_path / "a"), "--rounds", "4"])
    assert start_again(tmp_path / "a", {}).rounds_done == 4


@pytest.mark.parametrize(
    ("flag", "value"),
    [("episode-length", 10**9), ("envs", 10**6), ("rounds", 10**12), ("width", 10**12), ("ppo-epochs", 10**9)],
)
def test_sizes_beyond_all_sense_are_refused_at_once(flag, value, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, f"--{flag}", str(value), "--runs", str(tmp_path)])
    assert caught.value.code == 2
    assert f"{flag.replace('-', '_')} must be a whole number of at least 1 and at most" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read(capsys):
    """Runs one reading command: exit code and what it printed. A hang is an error after a minute."""

    def hang(*_):
        raise AssertionError("a reader hangs")

    def run_command(run, command):
        rest = {"query": ["from events"], "export": ["parquet"]}.get(command, [])
        signal.signal(signal.SIGALRM, hang)
        signal.alarm(60)
        code = 0
        try:
            main([command, str(run), *rest])
        except SystemExit as stopped:
            code = stopped.code
        finally:
            signal.alarm(0)
        reported = capsys.readouterr()
        return code, reported.out + reported.err

    return run_command


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zeros(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def unix_socket(path):
    path.unlink(missing_ok=True)
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


@pytest.mark.parametrize("replace", [fifo, zeros, folder, unix_socket])
@pytest.mark.parametrize("command", ["status", "verify", "report", "query"])
def test_what_is_no_file_in_place_of_the_log_is_refused_in_a_sentence(run, read, command, replace):
    replace(log_path(run))
    code, reported = read(run, command)
    assert code == 2
    assert "is not a regular file" in reported


@pytest.mark.parametrize("replace", [fifo, zeros])
@pytest.mark.parametrize("command", ["status", "verify", "report"])
def test_what_is_no_file_in_place_of_the_small_ones_is_not_read(run, read, command, replace):
    for path in (run / "status.json", run / "config.json"):
        replace(path)
    assert read(run, command)[0] == 0
    replace(log_path(run).with_suffix(".jsonl.sha256"))
    code, reported = read(run, command)
    assert code == (1 if command == "verify" else 0)
    assert command != "verify" or "regular file" in reported or "is a link" in reported


def test_what_links_in_a_run_folder_name_is_neither_shown_nor_written(run, read, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("SECRET")
    for name in (".report.html.tmp", "report.html", "config.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "secret")
    (run / "tables").symlink_to(outside)
    assert read(run, "report")[0] == 0
    page = (run / "report.html").read_text()
    assert "SECRET" not in page
    assert "config.json is a link" in page
    code, reported = read(run, "export")
    assert code == 2
    assert "tables is a link" in reported
    (run / "tables").unlink()
    (run / "tables").symlink_to(outside / "new")
    assert read(run, "export")[0] == 2
    shutil.move(run / "events", tmp_path / "events")
    (run / "events").symlink_to(tmp_path / "events")
    code, reported = read(run, "verify")
    assert code == 2
    assert "events is a link" in reported
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "SECRET"


def test_a_report_is_written_over_a_pipe_in_the_run_folder(run, read):
    fifo(run / "report.html")
    assert read(run, "report")[0] == 0
    assert (run / "report.html").is_file()
