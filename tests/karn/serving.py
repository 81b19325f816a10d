"""A real server of a folder, in a thread, and requests as anybody could send them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from esper.karn.serve.app import Server, make_app

ADDRESS = "127.0.0.1"
DEADLINE_S = 60.0


class Served:
    """Where a server is, and how to ask it."""

    def __init__(self, port: int, app: Starlette) -> None:
        self.port, self._app = port, app
        self.url = f"http://{ADDRESS}:{port}"

    def num_streams(self) -> int:
        """Streams that are open now."""
        return int(self._app.state.channels.num_streams)

    def ask(
        self, path: str, *, method: str = "GET", host: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of one answer."""
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=DEADLINE_S)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"{ADDRESS}:{self.port}" if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def json(self, path: str) -> Any:
        status, _, content = self.ask(path)
        assert status == 200, content
        return json.loads(content)

    @contextmanager
    def stream(self, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
        """The messages of a stream as they come."""
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=DEADLINE_S)
        connection.request("GET", f"/api/stream{query}")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")

        def messages() -> Iterator[dict[str, Any]]:
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        try:
            yield messages()
        finally:
            connection.close()


@contextmanager
def serving(root: Path, *, token: str | None = None, address: str = ADDRESS) -> Iterator[Served]:
    """Serves a folder until the block ends. `address` is what the guard believes it listens on."""
    app = make_app(root, address=address, token=token)
    listener = socket.create_server((ADDRESS, 0))
    server = Server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield Served(listener.getsockname()[1], app)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
