"""A terminal that closes, `timeout` and job schedulers signal the whole process group, workers included."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from esper.leyline.rundir import STATUS_FILE

RUN = ["--preset", "smoke", "--task", "digits_blind", "--envs", "2", "--workers", "2", "--worker-kind", "process"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups here")
def test_a_request_to_the_whole_group_stops_the_run_at_once(tmp_path):
    command = [sys.executable, "-m", "esper.scripts.train", *RUN, "--episode-length", "400", "--rounds", "50"]
    process = subprocess.Popen(
        [*command, "--runs", str(tmp_path), "--run-id", "a"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    log = tmp_path / "a" / "events" / "a000-s0.jsonl"
    end = time.monotonic() + 240.0  # the native backend may have to be compiled first
    try:
        while not (log.is_file() and "EPOCH_COMPLETED" in log.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "the run did not begin"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert (events[-1]["type"], events[-1]["data"]["status"]) == ("RUN_ENDED", "interrupted")
    assert not [event for event in events if event["type"] == "ROUND_COMPLETED"], "it did not wait for the round"
    assert not [event for event in events if event["type"] == "WORKER_STATE_CHANGED"]
    assert json.loads((tmp_path / "a" / STATUS_FILE).read_text())["closed"]
