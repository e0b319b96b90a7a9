"""The console's port: the page, its events, its calls."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from mesh_llm.console.access import ConsoleAccess, Refused
from mesh_llm.console.event_feed import Feed
from mesh_llm.console.page import get_file
from mesh_llm.console.routes import Managed, add_management, refusal
from mesh_llm.defaults import CONSOLE_BODY_LIMIT_BYTES

CONSOLE_CONNECTIONS = 256
"""Of all of them, idle ones included: some for each, and a quarter of the descriptors that a process has."""
CONSOLE_STOP_S = 1.0
"""For connections to end with the node."""


log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Server": "mesh-llm",
}
_OPEN_TO_READERS = ("/api/status", "/api/events", "/api/session")
"""Nothing secret is told there; every other call needs the page's token."""


class Console:
    """Answers on one port of this machine from `start` until `stop`."""

    def __init__(self, node: Managed, feed: Feed, *, api_key: str | None) -> None:
        self._guard = ConsoleAccess(api_key=api_key)
        self._app = web.Application(client_max_size=CONSOLE_BODY_LIMIT_BYTES, middlewares=[self._middleware])
        self._app.on_response_prepare.append(_add_headers)
        add_management(self._app, node, feed)
        self._app.router.add_get("/api/session", self._session)
        self._app.router.add_get("/{name:(?!api/).*}", get_file)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._port = 0

    @property
    def url(self) -> str | None:
        """None while it is not open."""
        return f"http://localhost:{self._port}" if self._port else None

    async def start(self, taken: socket.socket) -> None:
        """On a socket that listens already."""
        self._port = taken.getsockname()[1]
        self._runner = web.AppRunner(
            self._app, access_log=None, shutdown_timeout=CONSOLE_STOP_S, handler_cancellation=True
        )
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._protocol, sock=taken)
        log.info("console listening url=%s", self.url)

    async def stop(self) -> None:
        self._port = 0
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _protocol(self) -> asyncio.Protocol:
        """For one more connection: any user of this machine may make some, and the node needs files, too."""
        server = self._runner.server if self._runner is not None else None
        if server is None or len(server.connections) >= CONSOLE_CONNECTIONS:
            return _TurnedAway()
        return server()

    async def _session(self, request: web.Request) -> web.Response:
        return web.json_response(self._guard.session(request), headers={"Cache-Control": "no-store"})

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The top of every request: whatever happens below, somebody is answered."""
        try:
            self._guard.check_origin(request)
            if request.path.startswith("/api/") and request.path not in _OPEN_TO_READERS:
                self._guard.check_page(request)
            return await handler(request)
        except Refused as error:
            return _refused(request, error)
        except web.HTTPException as error:
            # Of the router: no such path, or not by this method.
            return _refused(request, Refused(error.status, error.reason.lower(), code="not_found"))
        except Exception:
            log.exception("console request failed method=%s path=%r", request.method, request.path)
            return _refused(request, Refused(500, "an unexpected error; see the node's log", code="internal"))


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _refused(request: web.Request, error: Refused) -> web.Response:
    return refusal(error.status, error.message, error.hint, code=error.code)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
