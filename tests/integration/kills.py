"""Runs that are killed: start, kill, resume until done, and what is left in the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esper.karn.integrity import check_run
from esper.leyline import EVENTS, TIMING_SUFFIXES, TelemetryEventType
from esper.leyline.rundir import CHECKPOINTS_DIR, event_files
from esper.simic.run.checkpoint import load_checkpoint
from esper.simic.run.run_state import STATE_FILE

ROUNDS = 5
NO_END = "no end marker: the last event is not RUN_ENDED"
NO_CHECKSUM = "has no checksum, so that it cannot be shown to be as it was written"
FLAGS = (
    "--preset", "smoke", "--task", "digits_mlp", "--rounds", ROUNDS, "--checkpoint-s", 0, "--keep-checkpoints", 2,
    "--seed", 5,
)  # fmt: skip


def launch(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "esper.scripts.train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_through(runs: Path, name: str, workers: int) -> Path:
    process = launch("ppo", *FLAGS, "--runs", runs, "--run-id", name, "--workers", workers)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return runs / name


def kill_and_resume(run: Path, delays_s: list[float], workers: int) -> int:
    """Starts the run, kills it after its first checkpoint, then resumes and kills it again. Returns the kills."""
    process = launch("ppo", *FLAGS, "--runs", run.parent, "--run-id", run.name, "--workers", workers)
    _await(lambda: bool(checkpoints(run)), process)
    kills = _kill_after(delays_s[0], process)
    check_prefix(run)
    for delay_s in delays_s[1:]:
        started = time.time()
        process = launch("--resume", run, "--workers", workers)
        _await(lambda since=started: _written_since(run, since), process)
        kills += _kill_after(delay_s, process)
        check_prefix(run)
    return kills


def kill_before_checkpoint(run: Path) -> None:
    """Starts a run with long rounds and kills it in the first of them."""
    process = launch(
        "ppo", *FLAGS, "--episode-length", 400, "--runs", run.parent, "--run-id", run.name, "--workers", 1
    )  # fmt: skip
    kill_when(lambda: b"EPOCH_COMPLETED" in _content(run), process)
    assert checkpoints(run) == []


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / CHECKPOINTS_DIR).glob("ckpt-*/manifest.json"))


def check_prefix(run: Path, *, may_be_empty: bool = False) -> None:
    """A kill may leave a log without an end, half a line, or an end without a checksum. Nothing else may be wrong."""
    found = check_run(run)
    wrong = [problem for problem in found.problems if problem != NO_END and NO_CHECKSUM not in problem]
    assert wrong == []
    assert found.num_lines > 0 or may_be_empty


def _content(run: Path) -> bytes:
    return b"".join(file.path.read_bytes() for file in event_files(run))


def _written_since(run: Path, wall: float) -> bool:
    newest = event_files(run)[-1].path.stat()
    return newest.st_size > 0 and newest.st_mtime >= wall


def kill_when(sign: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Kills a run that has come this far."""
    _await(sign, process)
    assert _kill_after(0.0, process) == 1, "it was over before it could be killed"


def _kill_after(delay_s: float, process: subprocess.Popen[str]) -> int:
    time.sleep(delay_s)
    alive = process.poll() is None
    if alive:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return int(alive)


def _await(sign: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until there is a sign of life, or the run is over."""
    for _ in range(12_000):
        if process.poll() is not None or sign():
            return
        time.sleep(0.01)
    raise AssertionError("the run showed no sign of life")


def finish(run: Path, workers: int) -> None:
    process = launch("--resume", run, "--workers", workers)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err


# ---- what is left


def final_bits(run: Path, rounds: int = ROUNDS) -> dict[str, object]:
    """The last checkpoint without what a clock wrote."""
    loaded = load_checkpoint(run / CHECKPOINTS_DIR / f"ckpt-{rounds:08d}")
    files: dict[str, object] = dict(loaded.files)
    state = json.loads(loaded.files[STATE_FILE])
    for row in state["history"]:
        row["duration_s"] = 0.0
    for machine in ("workers", "rounds"):
        state["config"].pop(machine)
    files[STATE_FILE] = state
    return files


def lines(run: Path) -> list[dict[str, object]]:
    """Every complete line of the log, in the order of writing."""
    content = [line for file in event_files(run) for line in file.path.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line) for line in content]


def canonical(run: Path) -> list[dict[str, object]]:
    """The events that count: what a later attempt wrote again appears once."""
    first = {file.attempt: file.first_seq for file in event_files(run)}
    return [
        event
        for event in lines(run)
        if all(event["seq"] < begin for attempt, begin in first.items() if attempt > event["attempt"])
    ]


def training_facts(run: Path) -> list[tuple[object, ...]]:
    """The canonical training facts, without times of the machine."""
    kept = canonical(run)
    numbers = [event["seq"] for event in kept]
    assert numbers == sorted(set(numbers)), "no event twice"
    assert numbers == list(range(len(numbers))), "no event lost"
    return [
        (event["type"], event["round"], event["episode"], event["env"], event["epoch"], _timeless(event["data"]))
        for event in kept
        if EVENTS[TelemetryEventType(event["type"])].training_fact
    ]


def _timeless(value: object) -> object:
    if isinstance(value, dict):
        return {key: _timeless(part) for key, part in value.items() if not key.endswith(TIMING_SUFFIXES)}
    return [_timeless(part) for part in value] if isinstance(value, list) else value
