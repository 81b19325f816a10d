"""A disk that refuses: loud, no half or double line, nothing that must not be lost is lost, every gap explained."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.leyline import files as files_module
from esper.leyline.rundir import event_files
from tests.nissa.events import ended, log_path, open_hub, read_lines, trend, unexplained


@contextmanager
def broken_disk(code: int, after_bytes: int = 0) -> Iterator[None]:
    """Every write to any file takes `after_bytes` bytes and then fails."""
    original = os.write

    def write(fd: int, content: bytes) -> int:
        if after_bytes and len(content) > after_bytes:
            original(fd, content[:after_bytes])
        raise OSError(code, os.strerror(code))

    patch = pytest.MonkeyPatch()
    patch.setattr(files_module.os, "write", write)
    try:
        yield
    finally:
        patch.undo()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_what_must_not_be_lost_survives_an_outage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    hub = open_hub(tmp_path, flush_interval_s=60.0, heartbeat_s=1e9)
    hub.emit(trend(0))
    assert hub.flush(10)
    with broken_disk(code, after_bytes=5):
        for tag in range(1, 6):
            hub.emit(trend(tag))
            hub.emit(ended(tag))
            assert not hub.flush(10)
        health = hub.health()
    assert health.log_error is not None
    assert os.strerror(code) in health.log_error
    assert (health.num_held, health.num_dropped) == (5, {"TREND_DETECTED": 5})
    assert len(read_lines(log_path(tmp_path))) == 1  # no half line
    hub.emit(trend(9))
    assert hub.flush(10, fsync=True)
    report = hub.close()
    lines = read_lines(log_path(tmp_path))
    seqs = [line["seq"] for line in lines]
    assert seqs == sorted(set(seqs))
    assert [line["data"]["num_rounds_total"] for line in lines if line["type"] == "RUN_ENDED"] == [1, 2, 3, 4, 5]
    assert [line["data"]["window_rounds"] for line in lines if line["type"] == "TREND_DETECTED"] == [0, 9]
    assert not unexplained(lines, hub.next_seq)
    assert not report.complete
    assert capsys.readouterr().err.count("cannot be written") == 1  # once a minute, not once a try


def test_losses_to_the_disk_and_to_the_queue_are_told_apart(tmp_path: Path) -> None:
    hub = open_hub(tmp_path, queue_capacity=2, flush_interval_s=60.0, heartbeat_s=1e9)
    rng = random.Random(7)
    for _ in range(40):
        broken = rng.random() < 0.5
        with broken_disk(errno.ENOSPC) if broken else open(os.devnull):
            for _ in range(rng.randrange(6)):
                hub.emit(rng.choice([trend(), ended(), trend(round=None)]))
            hub.flush(10)
    hub.close()
    lines = read_lines(log_path(tmp_path))
    assert not unexplained(lines, hub.next_seq)
    reasons = {line["data"]["reason"] for line in lines if line["type"] == "EVENTS_DROPPED"}
    assert reasons == {"queue_full", "invalid", "write_failed"} or reasons == {"invalid", "write_failed"}


def test_writing_resumes_by_itself(tmp_path: Path) -> None:
    hub = open_hub(tmp_path, flush_interval_s=0.01, retry_s=0.01, heartbeat_s=1e9)
    with broken_disk(errno.ENOSPC):
        hub.emit(ended(1))
        wait_for(lambda: hub.health().num_held == 1)
    wait_for(lambda: hub.health().num_held == 0)
    assert len(read_lines(log_path(tmp_path))) == 1
    assert hub.close().complete


def wait_for(condition: object, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_always_full_device(tmp_path: Path) -> None:
    hub = open_hub(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, hub._writer._log._fd)
    os.close(full)
    hub.emit(ended())
    assert not hub.flush(10)
    report = hub.close()
    assert report.log_error is not None
    assert "No space left" in report.log_error
    assert (report.num_unwritten, report.complete) == (1, False)


def test_a_size_limit_of_the_process(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from tests.nissa.events import ended, open_hub, trend
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hub = open_hub(Path(sys.argv[1]), flush_interval_s=60.0, heartbeat_s=1e9)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
for tag in range(40):
    hub.emit(trend(tag)); hub.emit(ended(tag)); hub.flush(10)
held = hub.health().num_held
assert held > 10, held
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
report = hub.close()
assert report.num_unwritten == 0, report
print(hub.next_seq)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stderr
    lines = read_lines(log_path(tmp_path))
    assert [line["data"]["num_rounds_total"] for line in lines if line["type"] == "RUN_ENDED"] == list(range(40))
    assert not unexplained(lines, int(done.stdout))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_forbidden_directory_is_an_error_before_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        open_hub(tmp_path / "run")


def test_a_file_in_the_way_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a directory")
    with pytest.raises(OSError, match="run"):
        open_hub(tmp_path / "run")


WRITING_CHILD = """
import sys
from pathlib import Path
from tests.nissa.events import ended, open_hub, trend
hub = open_hub(Path(sys.argv[1]), first_seq=int(sys.argv[2]), flush_interval_s=0.001)
print("ready", flush=True)
tag = 0
while True:
    hub.emit(trend(tag)); hub.emit(ended(tag)); tag += 1
    if tag % 20 == 0:
        hub.flush(10, fsync=True)
        print(hub.next_seq, flush=True)
"""


def test_killing_the_process_leaves_a_readable_prefix(tmp_path: Path) -> None:
    rng, next_seq = random.Random(), 0
    for attempt in range(4):
        delay_s = rng.uniform(0.0, 0.15)
        child = subprocess.Popen(
            [sys.executable, "-c", WRITING_CHILD, str(tmp_path), str(next_seq)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        reported = [int(word) for word in child.stdout.read().split("\n")[:-1] if word]
        assert child.wait() == -signal.SIGKILL
        file = event_files(tmp_path)[-1]
        assert (file.attempt, file.first_seq) == (attempt, next_seq)
        whole = file.path.read_bytes().rpartition(b"\n")[0]
        seqs = [json.loads(line)["seq"] for line in whole.splitlines()]
        assert seqs == list(range(next_seq, next_seq + len(seqs))), f"delay {delay_s}"
        assert next_seq + len(seqs) >= (reported or [0])[-1], "a durable flush was not durable"
        next_seq = (reported or [next_seq])[-1]
