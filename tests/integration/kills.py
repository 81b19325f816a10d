"""Runs that are killed: start, kill, resume until done, and what is left in the end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from esper.leyline import EVENTS, TIMING_SUFFIXES, TelemetryEventType
from esper.leyline.rundir import CHECKPOINTS_DIR, EVENTS_FILE, SEGMENTS_DIR
from esper.simic.training.checkpoint import load_checkpoint
from esper.simic.training.run_state import STATE_FILE

ROUNDS = 5
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
    _await(lambda: any((run / CHECKPOINTS_DIR).glob("ckpt-*/manifest.json")), process)
    kills = _kill_after(delays_s[0], process)
    for delay_s in delays_s[1:]:
        started = time.time()
        process = launch("--resume", run, "--workers", workers)
        _await(lambda since=started: _written_since(run / EVENTS_FILE, since), process)
        kills += _kill_after(delay_s, process)
    return kills


def _written_since(log: Path, wall: float) -> bool:
    try:
        return log.stat().st_mtime >= wall
    except FileNotFoundError:  # between closing one segment and opening the next
        return False


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


def final_bits(run: Path) -> dict[str, object]:
    """The last checkpoint without what a clock wrote."""
    loaded = load_checkpoint(run / CHECKPOINTS_DIR / f"ckpt-{ROUNDS:08d}")
    files: dict[str, object] = dict(loaded.files)
    state = json.loads(loaded.files[STATE_FILE])
    for row in state["history"]:
        row["phases_ms"], row["duration_s"] = {}, 0.0
    for machine in ("workers", "rounds"):
        state["config"].pop(machine)
    files[STATE_FILE] = state
    return files


def lines(run: Path) -> list[dict[str, object]]:
    """Every complete line of the log, in the order of writing."""
    paths = [*sorted((run / SEGMENTS_DIR).glob("*.jsonl")), run / EVENTS_FILE]
    content = [line for path in paths if path.exists() for line in path.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line) for line in content]


def training_facts(run: Path) -> list[tuple[object, ...]]:
    """The canonical training facts: what a later attempt wrote again counts once, and no time of the machine."""
    written = lines(run)
    manifest = json.loads((run / "manifest.json").read_text())
    first = {entry["attempt"]: entry["first_seq"] for entry in manifest["attempts"]}
    kept = [
        event
        for event in written
        if all(event["seq"] < begin for attempt, begin in first.items() if attempt > event["attempt"])
    ]
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
