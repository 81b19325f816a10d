"""`esper serve` as a command: where it listens, what it prints, how it ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="esper serve needs the extra `serve`")

from esper.scripts.cli import main
from tests.karn.logs import write_run

TOKEN = "my-own-token-of-mine"


def ask(port: int, path: str = "/api/runs") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize(
    ("words", "printed", "status"),
    [
        ((), r"http://127\.0\.0\.1:(\d+)/$", 200),
        (("--token",), rf"http://127\.0\.0\.1:(\d+)/\?token={TOKEN}$", 401),
        (("--host", "0.0.0.0"), rf"http://localhost:(\d+)/\?token={TOKEN}$", 401),
    ],
)
def test_it_prints_its_address_and_ends_in_good_order(
    words: tuple[str, ...], printed: str, status: int, tmp_path: Path
) -> None:
    write_run(tmp_path / "mine", rounds=1)
    command = [sys.executable, "-m", "esper.scripts.cli", "serve", str(tmp_path), "--port", "0", *words]
    env = {**os.environ, "ESPER_SERVE_TOKEN": TOKEN}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        lines = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            lines.append(server.stdout.readline())
            assert lines[-1], server.stderr.read()
        found = re.search(printed, "".join(lines), re.M)
        assert found is not None, lines
        port = int(found[1])
        assert ask(port)[0] == status
        stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        stream.request("GET", "/api/stream", headers={"Authorization": f"Bearer {TOKEN}"})
        assert stream.getresponse().status == 200  # an open page does not keep it from ending
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--port", "70000"), "--port must be from 0 to 65535, got 70000"),
        (("--host", "203.0.113.7"), "cannot listen on 203.0.113.7 port 8050"),
    ],
)
def test_what_cannot_be_served_is_reported(
    words: tuple[str, ...], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path), *words])
    assert end.value.code == 2
    assert reported in capsys.readouterr().err


def test_a_port_in_use_and_a_weak_token_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        main(["serve", str(tmp_path), "--port", str(taken.getsockname()[1])])
    assert "Try another --port" in capsys.readouterr().err
    monkeypatch.setenv("ESPER_SERVE_TOKEN", "short")
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path), "--token"])
    assert "at least 16" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path / "none")])
    assert "is not a folder" in capsys.readouterr().err
