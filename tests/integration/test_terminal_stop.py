"""Ctrl-C at a terminal: the answer is seen, although a bar is drawn there."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "esper.scripts.train", "ppo", "--preset", "smoke", "--task", "digits_mlp"]


def output(terminal: int) -> Iterator[str]:
    """What a program writes to a terminal, until it ends."""
    while True:
        try:
            some = os.read(terminal, 4096)
        except OSError:  # how Linux tells that the other side is gone
            return
        if not some:
            return
        yield some.decode(errors="replace")


@pytest.mark.slow
def test_the_answer_to_an_interrupt_is_drawn_with_the_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--workers", "1", "--rounds", "500", "--runs", str(tmp_path), "--run-id", "a"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(theirs)
    before = after = ""
    for some in output(ours):
        if not after and "2/500" in before:
            process.send_signal(signal.SIGINT)
            after = some
        elif after:
            after += some
        else:
            before += some
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert "stopping" not in before
    assert "stopping after this round" in after
    assert "esper: stopping" not in after, "written across the bar, it would be drawn over"
    assert "Go on with: esper train --resume" in after
