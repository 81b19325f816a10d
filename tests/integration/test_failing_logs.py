"""A run whose log cannot be written for a while, or ever again: training finishes, loudly, and nothing is half told."""

import errno
import os
import shlex
import subprocess
import sys

import pytest

from esper.karn.integrity import check_run
from esper.leyline import EVENTS
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.scripts.cli import main
from tests.integration.kills import lines, training_facts
from tests.nissa.events import log_path

ROUNDS = 6
RUN = ("ppo", "--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--rounds", str(ROUNDS),
       "--checkpoint-s", "0", "--run-id", "a")  # fmt: skip
CHILD = """
import os, sys
from esper.nissa import log_file
from esper.scripts.cli import main

code, num_failures = map(int, sys.argv[1:3])
write_all, rounds = log_file.write_all, 0

def write_some(fd, content):
    global rounds, num_failures
    if rounds >= 2 and num_failures > 0:
        num_failures -= 1
        write_all(fd, content[:7])
        raise OSError(code, os.strerror(code))
    write_all(fd, content)
    rounds += bytes(content).count(b"ROUND_COMPLETED")

log_file.write_all = write_some
main(["train", *sys.argv[3:]])
"""
"""After two rounds, writes to the log take a few bytes and fail with this error, this often in a row."""


def train(runs, code, num_failures):
    arguments = [str(code), str(num_failures), *RUN, "--runs", str(runs)]
    return subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def saved(run):
    return {int(path.name.removeprefix("ckpt-")) for path in (run / CHECKPOINTS_DIR).glob("ckpt-*")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    main(["train", *RUN, "--runs", str(runs)])
    return runs / "a"


def test_a_disk_that_is_full_for_a_while_costs_only_what_may_be_lost(tmp_path, undisturbed):
    done = train(tmp_path, errno.ENOSPC, 3)
    assert done.returncode == 3, done.stderr
    assert "the event log cannot be written (OSError: [Errno 28] No space left on device)" in done.stderr
    assert "not saved: the event log cannot be made durable" in done.stderr
    assert "Done. All but a part of the event log is in" in done.stdout
    run = tmp_path / "a"
    assert f"esper: {run}: the event log is not complete; lost: " in done.stderr
    found = check_run(run)
    assert found.problems == ()
    assert 0 < found.num_missing_seq == found.num_dropped
    main(["verify", str(run)])
    drops = [event["data"] for event in lines(run) if event["type"] == "EVENTS_DROPPED"]
    assert {drop["reason"] for drop in drops} == {"write_failed"}
    must = {kind.value for kind, spec in EVENTS.items() if spec.must and spec.training_fact}
    reported = [(event["type"], event["round"], event["env"], event["epoch"]) for event in lines(run)]
    expected = [(event["type"], event["round"], event["env"], event["epoch"]) for event in lines(undisturbed)]
    assert [row for row in reported if row[0] in must] == [row for row in expected if row[0] in must]
    assert max(saved(run)) == ROUNDS


def test_a_log_that_stays_forbidden_ends_with_its_own_exit_code_and_can_be_made_up_for(tmp_path, undisturbed, capsys):
    done = train(tmp_path, errno.EACCES, 10**9)
    run = tmp_path / "a"
    assert done.returncode == 3, done.stderr
    assert "PermissionError: [Errno 13] Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"esper: {run}: the event log is not complete; " in done.stderr
    assert f"round {ROUNDS}/{ROUNDS}" in done.stdout, "training itself finishes"
    kept = max(saved(run))
    assert 0 < kept < ROUNDS
    assert f"Rounds after the first {kept} are not saved" in done.stdout
    content = log_path(run).read_bytes()
    assert content.endswith(b"\n"), "no half line"
    found = check_run(run)
    assert found.problems == ("no end marker: the last event is not RUN_ENDED",)

    main(["train", "--resume", str(run)])
    assert "Done." in capsys.readouterr().out
    assert check_run(run).problems == ()
    assert training_facts(run) == training_facts(undisturbed)


def test_a_run_without_standard_streams_is_reported_in_its_log_alone(tmp_path):
    command = [sys.executable, "-m", "esper.scripts.train", *RUN, "--rounds", "1", "--runs", str(tmp_path)]
    done = subprocess.run(["bash", "-c", f"{shlex.join(command)} <&- >&- 2>&-"], timeout=200, check=False)
    assert done.returncode == 0
    assert check_run(tmp_path / "a").complete
