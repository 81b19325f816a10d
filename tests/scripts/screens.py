"""Commands on a terminal of a given width: what a person sees there, as plain text."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def open_screen(columns: int = 80, rows: int = 24) -> tuple[int, int]:
    """Both ends of a terminal of that size: ours and the program's."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return ours, theirs


def start(args: list[str | Path], theirs: int) -> subprocess.Popen[bytes]:
    """`esper` with its output on that terminal. The environment says nothing about its size or kind."""
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "esper.scripts.cli", *map(str, args)]
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    return running


def read_more(ours: int) -> str:
    """What came since the last look, control sequences included; empty once the program is gone."""
    try:
        return os.read(ours, 65_536).decode(errors="replace")
    except OSError:  # the other end is closed
        return ""


def shown(raw: str) -> str:
    """The text without colours and movements of the cursor."""
    return _CONTROL.sub("", raw).replace("\r\n", "\n")


def seen(args: list[str | Path], *, columns: int = 80) -> str:
    """Everything that a command shows until it ends."""
    ours, theirs = open_screen(columns)
    running = start(args, theirs)
    raw = ""
    while more := read_more(ours):
        raw += more
    os.close(ours)
    assert running.wait(timeout=60) == 0, raw
    return shown(raw)
