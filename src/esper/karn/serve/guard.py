"""Who may read: checked before any page is made.

The server listens on the loopback address unless told otherwise, and then wants a token. A page of another site could
reach a server on this machine by a name that it lets point here, so the Host header must be one that this server has.
Nothing can be written: all requests but GET and HEAD are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types default"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
NO_TOKEN = (
    "This server shows runs to those who have its token. Open the address that `esper serve` printed, which ends in "
    "?token=..., or send the header Authorization: Bearer TOKEN.\n"
)


def is_loopback(address: str) -> bool:
    """True for localhost and the addresses that only this machine reaches."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class Guard:
    """Refuses what should not be answered, and tells browsers what pages may do.

    Args:
        app: What answers.
        address: What the server listens on.
        token: Asked for if not None.
        names: Further names of this machine that a Host header may have.
    """

    def __init__(self, app: ASGIApp, *, address: str, token: str | None, names: Iterable[str] = ()) -> None:
        self._app = app
        self._local = is_loopback(address)
        self._token = token
        own = () if self._local else (socket.gethostname().lower(),)
        self._names = {"localhost", address.lower(), *own, *(name.lower() for name in names)}
        digest = hashlib.sha256((token or "").encode()).hexdigest()[:8]
        self._cookie = f"esper_{digest}"  # two servers on one machine share the cookies of its name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refuse(scope)
        answer = self._app if refused is None else refused

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await answer(scope, receive, with_headers)

    def _refuse(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that gets none of its own; None lets it pass."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only reading is possible here.\n", 405, {"Allow": "GET, HEAD"})
        if not self._has_name(headers.get("host", "")):
            return PlainTextResponse("This server does not have that name; see esper serve --help, allow-host.\n", 421)
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"] != "/":
            return PlainTextResponse("Pages of other sites may not read this.\n", 403)
        if self._token is None:
            return None
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if asked and scope["path"] == "/" and self._is_token(asked[0]):
            home = RedirectResponse("/", 303)  # so that the token stays in no history and no link
            home.set_cookie(self._cookie, asked[0], httponly=True, samesite="strict", path="/")
            return home
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_token(given)) or self._is_token(self._from_cookie(headers)):
            return None
        return PlainTextResponse(NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})

    def _has_name(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower().rstrip(".")
        if name in self._names:
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback if self._local else True  # nobody can point a number elsewhere

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    def _from_cookie(self, headers: Headers) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value
