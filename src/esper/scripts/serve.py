"""`esper serve`: the runs of a folder in a browser. Only reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import tyro

from esper.scripts.terminal import plain_console
from esper.scripts.watch import LOW_PRIORITY

TOKEN_VARIABLE = "ESPER_SERVE_TOKEN"
MIN_TOKEN = 16


def serve_command(
    runs: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(help="A run directory, or a folder with runs and evaluations somewhere below."),
    ] = Path("runs"),
    host: Annotated[str, tyro.conf.arg(help="Address to listen on. Any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, tyro.conf.arg(help="Port; 0 takes a free one.")] = 8050,
    token: Annotated[bool, tyro.conf.arg(help="Ask for a token on this machine's own address too.")] = False,
    allow_host: Annotated[
        tuple[str, ...], tyro.conf.arg(help="Further names under which browsers reach this server.")
    ] = (),
) -> None:
    """Show runs in a browser, live: verdict, curves, hosts, policy, the life of every seed, events, comparisons.

    Open the address that is printed. The server reads the logs in a process of low priority, so any number of open
    pages leaves the training alone, and it can change nothing: there is no request that writes. It listens on this
    machine only; with another --host it asks for a token, which is part of the printed address (ESPER_SERVE_TOKEN sets
    one of your own, of at least 16 characters). There is no encryption: over a network that is not yours, use
    `ssh -L 8050:localhost:8050 MACHINE` and leave --host alone. Needs the extra `serve`.
    """
    try:
        from esper.karn.serve.app import Server, make_app
        from esper.karn.serve.guard import is_loopback
    except ImportError:
        raise ImportError("esper serve needs Starlette and uvicorn: pip install 'esper-growth[serve]'") from None

    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {port}")
    secret = _token() if token or not is_loopback(host) else None
    app = make_app(runs, address=host, token=secret, names=allow_host)
    listener = _listen(host, port)
    console = plain_console(soft_wrap=True, highlight=False)
    for url in _urls(host, listener.getsockname()[1], secret):
        console.print(f"{runs} on {url}")
    console.print("Ctrl-C ends it; runs are not touched.")
    sys.stdout.flush()
    os.nice(LOW_PRIORITY)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(app).serve(sockets=[listener]))


def _token() -> str:
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < MIN_TOKEN or not given.isascii() or not given.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"{TOKEN_VARIABLE} must have at least {MIN_TOKEN} letters, digits, - or _")
    return given


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()  # whoever is quick waits for the first answer, and is not refused
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}. Try another --port") from None
    return listener


def _urls(host: str, port: int, secret: str | None) -> list[str]:
    """Where a browser finds the server."""
    everywhere = host in ("0.0.0.0", "::")
    names = [socket.gethostname(), "localhost"] if everywhere else [f"[{host}]" if ":" in host else host]
    query = "" if secret is None else f"?token={secret}"
    return [f"http://{name}:{port}/{query}" for name in names]
