"""Read-only HTTP server of a view: the page, ``/status`` as JSON, ``/metrics`` for Prometheus.

The server runs in its own thread and event loop, so readers never delay training or exchanges. ``snapshot`` is called
at most once per ``FRESH_S`` for any number of readers.

====================  =====================================================================================
127.0.0.1 (default)   open to every local user; ``Host`` must be a loopback name (against DNS rebinding)
any other address     needs a token: ``?token=…``, which sets a cookie, or ``Authorization: Bearer …``
``hosts`` given       ``Host`` must be one of them; needed if the token is public, as in a compose file
``is_public``         also ``/run`` and its files without a token, at any address (``page.public``)
====================  =====================================================================================

A request without a token gets one answer per connection, and connections are limited, because they take file
descriptors from training. No request can change anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

from p2ptrain.page.listen_address import LOOPBACK, LOOPBACK_NAMES, ListenAddress, check_installed, listener_at
from p2ptrain.page.public import PATH, public_document, public_page

FRESH_S = 0.5
"""Maximum age of an answer; faster than a person reads. Guess: readers' impressions of other values would settle it."""
MOST_CONNECTIONS = 128
"""Maximum simultaneous connections; further ones are closed unread. Guess: connections of busy pages
would settle it."""
BACKLOG = 64
"""Connections that may wait to be accepted, by which a burst may exceed the limit: six from each of ten browsers.
Guess: bursts on real pages would settle it."""
IDLE_S = 30.0
"""Timeout for a connection's next complete request, including the first; the page asks every 2 s. Guess: request times
on slow lines would settle it."""
WRITE_S = 60.0
"""Timeout for a reader to accept what is written: the largest document, about 1 MB, at 15 kB/s. Guess: rates of slow
readers would settle it."""
STOP_S = 3.0
"""Timeout for requests in progress at shutdown; aiohttp applies it twice. Guess: request times on slow lines would
settle it."""
_EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}
"""Local addresses by which to open a page that listens on all interfaces: browsers cannot open the keys."""
COOKIE = "p2ptrain-token"
"""Prefix of the cookie's name, before the port: browsers send a cookie to every port of a host."""
SCRIPTS = ("theme", "units", "live", "charts", "gossip", "people", "contributors", "samples", "news", "page")
PUBLIC_SCRIPTS = ("theme", "units", "contributors", "samples", "run")
ASSETS = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    **{f"{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
    "uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript"),
    "uPlot.min.css": ("uPlot.min.css", "text/css"),
}
"""Paths, files of ``static`` and their types. No other file is ever read."""
PUBLIC_ASSETS = {
    "page.css": ASSETS["page.css"],
    **{f"{name}.js": (f"{name}.js", "text/javascript") for name in PUBLIC_SCRIPTS},
}
"""Files of the public page, as ``ASSETS``."""
PUBLIC_STATUS = f"{PATH}/status"
PUBLIC_AGES_S = {PATH: 60, PUBLIC_STATUS: 5} | dict.fromkeys(PUBLIC_ASSETS, 300)
"""Seconds for which browsers and proxies may keep each public path: less than readers wait for news, and than an
upgrade takes."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline';"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every response. uPlot sets widths by style attributes; text from strangers is only set as text."""

Snapshot = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class PageServer:
    """HTTP server of a page: ``bind`` it, and then ``serve`` it in a loop."""

    place: ListenAddress
    snapshot: Snapshot
    is_public: bool = False
    """Whether everybody may read the public page of a bootstrap."""
    hidden: Sequence[str] = ()
    """What the public page leaves out, as ``public_document`` takes it."""
    url: str = ""
    """Address to open, including the token if one is needed: only for the owner."""
    address: str = ""
    _token: str = ""
    _cookie: str = ""
    _listener: socket.socket = field(init=False)
    _made_at: float = float("-inf")
    _made: bytes = b""
    _document: dict[str, Any] = field(default_factory=dict)
    _public: dict[str, Any] = field(default_factory=dict)

    def bind(self) -> None:
        """Listen. Raises UserError if that is impossible, or if the extra ``page`` is missing."""
        check_installed()
        if not self.place.is_loopback:
            self._token = self.place.token or secrets.token_urlsafe(18)
        self._listener = listener_at(self.place)
        host, port = self._listener.getsockname()[:2]
        host = _EVERYWHERE.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        self.address, self._cookie = f"http://{shown}:{port}/", f"{COOKIE}-{port}"
        self.url = self.address + (f"?token={quote(self._token, safe='')}" if self._token else "")

    async def serve(self) -> None:
        """Serve the page until cancelled."""
        from aiohttp import web

        loop = asyncio.get_running_loop()
        application = web.Application(middlewares=[self._guard()], client_max_size=1024)
        for path in ASSETS:
            application.router.add_get(f"/{path}", self._asset)
        if self.is_public:
            application.router.add_get(f"/{PATH}", self._public_page)
            application.router.add_get(f"/{PUBLIC_STATUS}", self._public_status)
            application.router.add_get("/run.js", self._asset)
        application.router.add_get("/status", self._status)
        application.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=STOP_S, keepalive_timeout=IDLE_S)
        await runner.setup()
        listening = await loop.create_server(_limited(runner.server), sock=self._listener, backlog=BACKLOG)
        try:
            await loop.create_future()
        finally:
            listening.close()
            await runner.cleanup()

    def _guard(self) -> Any:
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            if (objection := self._objection(request)) is not None:
                status, text = objection
                refused = _response(status=status, text=text, headers=HEADERS)
                refused.force_close()
                return refused
            response = await handler(request)
            if self._is_public(request):  # no cookie: a proxy may give the answer to others
                age_s = PUBLIC_AGES_S[request.path.lstrip("/")]
                response.headers.update({**HEADERS, "Cache-Control": f"public, max-age={age_s}"})
                if not self._is_owner(request):
                    response.force_close()
            elif not response.prepared:
                response.headers.update(HEADERS)
                if "token" in request.query:
                    known = quote(self._token, safe="")
                    response.set_cookie(self._cookie, known, httponly=True, samesite="Strict")
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await _taken(request, response.write_eof())
            return response

        return guard

    def _objection(self, request: Any) -> tuple[int, str] | None:
        """Return an HTTP status and text if this request is refused; None if it is allowed."""
        name = _name_in(request.host)
        is_public = self._is_public(request)
        if self.place.hosts and name not in self.place.hosts:
            return 403, "This host name is not allowed for this page.\n"
        if is_public:
            return None
        if self._token:
            why = "A token is required: open the complete address that was printed."
            return None if self._knows(request) else (401, f"{why}\n")
        if not self.place.hosts and name not in LOOPBACK_NAMES:
            return 403, "This page is only available on this computer.\n"
        return None

    def _is_public(self, request: Any) -> bool:
        return self.is_public and request.path.lstrip("/") in PUBLIC_AGES_S

    def _is_owner(self, request: Any) -> bool:
        return self._knows(request) if self._token else _name_in(request.host) in LOOPBACK_NAMES

    def _knows(self, request: Any) -> bool:
        shown = (
            request.query.get("token", ""),
            unquote(request.cookies.get(self._cookie, "")),
            request.headers.get("Authorization", "").removeprefix("Bearer "),
        )
        # Headers may hold bytes that are not text, which aiohttp passes on as surrogates.
        return any(hmac.compare_digest(each.encode(errors="replace"), self._token.encode()) for each in shown)

    async def _asset(self, request: Any) -> Any:
        path = request.path.lstrip("/")
        name, kind = PUBLIC_ASSETS[path] if path not in ASSETS else ASSETS[path]
        return _response(body=_static(name), content_type=kind, charset="utf-8")

    async def _public_page(self, request: Any) -> Any:
        self._refresh()
        run, index = (_static(name) for name in ("run.html", "index.html"))
        return _response(body=public_page(run, index, self._public), content_type="text/html", charset="utf-8")

    async def _public_status(self, request: Any) -> Any:
        self._refresh()
        body = json.dumps(self._public, allow_nan=False, separators=(",", ":")).encode()
        return _response(body=body, content_type="application/json", charset="utf-8")

    async def _status(self, request: Any) -> Any:
        self._refresh()
        response = _response(body=self._made, content_type="application/json", charset="utf-8")
        if not self.place.is_loopback:  # on a loopback, compression would only cost CPU time
            response.enable_compression()  # if the client accepts it
        return response

    async def _metrics(self, request: Any) -> Any:
        from p2ptrain.page.metrics import CONTENT_TYPE, exposition

        self._refresh()
        return _response(body=exposition(self._document), headers={"Content-Type": CONTENT_TYPE})

    def _refresh(self) -> None:
        if time.monotonic() - self._made_at >= FRESH_S:
            self._document = self.snapshot()
            self._public = public_document(self._document, self.hidden) if self.is_public else {}
            self._made = json.dumps(self._document, allow_nan=False, separators=(",", ":")).encode()
            self._made_at = time.monotonic()


def _static(name: str) -> bytes:
    return (files("p2ptrain.page") / "static" / name).read_bytes()


def _response(**options: Any) -> Any:
    from aiohttp import web

    return web.Response(**options)


async def _taken(request: Any, writing: Awaitable[None]) -> None:
    """Wait until the reader has accepted what is written. Raises ConnectionError if it is gone or stopped reading."""
    try:
        async with asyncio.timeout(WRITE_S):
            await writing
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # closing would wait for the reader
        raise ConnectionResetError("the reader has stopped reading") from None


def _limited(server: Any) -> Callable[[], asyncio.BaseProtocol]:
    """Return a factory of aiohttp's protocols that limits the number of connections."""
    return lambda: server() if len(server.connections) < MOST_CONNECTIONS else _Abort()


class _Abort(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _name_in(host: str) -> str:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    return name.strip("[]").lower()
