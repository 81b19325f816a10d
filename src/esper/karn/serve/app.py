"""The web server of a folder of runs: static files, plain JSON and one stream of events. Nothing here writes.

| path | answer |
|---|---|
| `/`, `/*.js`, `/*.css` | the page |
| `/api/runs` | runs and evaluations below the folder |
| `/api/run?run=ID` | all sections of one run |
| `/api/host?run=ID&env=N` | one host of it |
| `/api/compare?run=ID&run=ID...` | curves of several |
| `/api/evaluation?id=ID`, `/api/picture?id=ID&name=NAME` | an evaluation and its figures |
| `/api/stream?run=ID&run=ID...` | server-sent events: sections of these runs as they change, and the list of all |
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import socket
from collections.abc import AsyncIterator, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from esper.karn.serve.catalogue import EVALUATION_FILE, MAX_EVALUATION_BYTES, Catalogue
from esper.karn.serve.channels import MAX_RUNS_PER_STREAM, MAX_STREAMS, Channel, Channels, to_json, whole
from esper.karn.serve.compare import MAX_COMPARED, CurveCache
from esper.karn.serve.guard import Guard
from esper.leyline.files import loads_json, read_regular
from esper.leyline.rundir import EVALUATION_PICTURES, MAX_PICTURE_BYTES


class RequestFailed(Exception):
    """A request that cannot be answered, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Pages:
    """The answers. Ids are looked up in the catalogue; no part of a request ever becomes a path."""

    def __init__(self, root: Path) -> None:
        self.channels = Channels(Catalogue(root))
        self.comparison = CurveCache()
        folder = resources.files("esper.karn.serve") / "static"
        self.static = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self.static:
            raise RequestFailed(404, "there is no such page")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(self.static[name], media_type=kind)

    async def runs(self, request: Request) -> Response:
        return _json(await self.channels.listing())

    async def run(self, request: Request) -> Response:
        channel = await self._channel(request)
        await channel.refresh()
        return _json(whole(channel.sections))

    async def host(self, request: Request) -> Response:
        channel = await self._channel(request)
        await channel.refresh()
        env = request.query_params.get("env", "")
        found = await channel.host(int(env)) if env.isascii() and env.isdigit() and len(env) < 10 else None
        if found is None:
            raise RequestFailed(404, f"expected the number of a host of this run, got {env!r}")
        return _json(to_json(found))

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 0 < len(names) <= MAX_COMPARED:
            raise RequestFailed(400, f"expected 1 to {MAX_COMPARED} runs to compare, got {len(names)}")
        return _json(to_json(await asyncio.to_thread(self._curves, names)))

    def _curves(self, names: Iterable[str]) -> list[dict[str, Any]]:
        found = ((name, self.channels.catalogue.run_dir(name)) for name in names)
        return [self.comparison.curves(name, path) for name, path in found if path is not None]

    async def evaluation(self, request: Request) -> Response:
        path = await self._evaluation_dir(request)
        try:
            summary = loads_json(await asyncio.to_thread(read_regular, path / EVALUATION_FILE, MAX_EVALUATION_BYTES))
        except (OSError, ValueError) as error:
            raise RequestFailed(404, f"the summary cannot be read: {error}") from None
        drawn = [name for name in EVALUATION_PICTURES if (path / name).is_file()]
        return _json(to_json({"summary": summary, "pictures": drawn, "folder": str(path)}))

    async def picture(self, request: Request) -> Response:
        path, name = await self._evaluation_dir(request), request.query_params.get("name", "")
        if name not in EVALUATION_PICTURES:
            raise RequestFailed(404, f"expected one of {', '.join(EVALUATION_PICTURES)}, got {name!r}")
        try:
            content = await asyncio.to_thread(read_regular, path / name, MAX_PICTURE_BYTES)
        except OSError:
            raise RequestFailed(404, f"this evaluation has no {name}") from None
        return Response(content, media_type="image/png")

    async def stream(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        if len(names) > MAX_RUNS_PER_STREAM:
            raise RequestFailed(400, f"expected at most {MAX_RUNS_PER_STREAM} runs in one stream, got {len(names)}")
        if self.channels.num_streams >= MAX_STREAMS:
            raise RequestFailed(503, f"{MAX_STREAMS} pages are open already; close some")
        return StreamingResponse(self.channels.stream(names), media_type="text/event-stream")

    async def _channel(self, request: Request) -> Channel:
        name = request.query_params.get("run", "")
        channel = await self.channels.get(name)
        if channel is None:
            raise RequestFailed(404, f"there is no run {name!r} below the served folder")
        return channel

    async def _evaluation_dir(self, request: Request) -> Path:
        name = request.query_params.get("id", "")
        path = await asyncio.to_thread(self.channels.catalogue.evaluation_dir, name)
        if path is None:
            raise RequestFailed(404, f"there is no evaluation {name!r} below the served folder")
        return path


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


async def _explain(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, RequestFailed)
    return Response(msgspec.json.encode({"error": str(failure)}), failure.status, media_type="application/json")


def make_app(root: Path, *, address: str, token: str | None, names: Iterable[str] = ()) -> Starlette:
    """The server of a folder.

    Args:
        root: A run directory, or a folder with runs and evaluations somewhere below.
        address: What it will listen on.
        token: What a reader has to know; None asks for nothing.
        names: Names of this machine that readers may use beside its own.

    Raises:
        ValueError: The folder does not exist.
    """
    pages = Pages(root)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(pages.channels.follow())
        yield
        following.cancel()
        await pages.channels.close()

    app = Starlette(
        routes=[
            Route("/", pages.file),
            Route("/api/runs", pages.runs),
            Route("/api/run", pages.run),
            Route("/api/host", pages.host),
            Route("/api/compare", pages.compare),
            Route("/api/evaluation", pages.evaluation),
            Route("/api/picture", pages.picture),
            Route("/api/stream", pages.stream),
            Route("/{name}", pages.file),
        ],
        middleware=[Middleware(Guard, address=address, token=token, names=names)],
        exception_handlers={RequestFailed: _explain},
        lifespan=lifespan,
    )
    app.state.channels = pages.channels
    return app


class Server(uvicorn.Server):
    """Runs the app until asked to stop; then it ends the streams first, since an open page would keep it waiting."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=2
            )
        )
        self._channels: Channels = app.state.channels

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._channels.close()
        await super().shutdown(sockets)
