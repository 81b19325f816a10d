"""`esper watch` as a command: on a real terminal, and where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("textual", reason="esper watch needs the extra `watch`")

from esper.scripts.cli import main
from tests.karn.logs import write_run
from tests.scripts.screens import open_screen, read_more


def test_it_runs_on_a_terminal_and_leaves_with_a_key(tmp_path: Path) -> None:
    write_run(tmp_path, rounds=3)
    ours, theirs = open_screen()
    command = [sys.executable, "-m", "esper.scripts.cli", "watch", str(tmp_path)]
    env = {**os.environ, "TERM": "xterm-256color"}
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    raw = ""
    while "completed after 3 rounds" not in raw:
        more = read_more(ours)
        assert more, raw
        raw += more
    os.write(ours, b"q")
    while read_more(ours):
        pass
    os.close(ours)
    assert running.wait(timeout=60) == 0


def test_without_a_terminal_another_command_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, rounds=1)
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path)])
    assert end.value.code == 2
    assert "esper status RUN --follow" in capsys.readouterr().err


def test_a_folder_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "mine", rounds=1)
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path)])
    assert f"Runs inside it: {tmp_path / 'mine'}" in capsys.readouterr().err
