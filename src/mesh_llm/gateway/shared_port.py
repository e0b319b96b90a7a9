"""The API's second port, for the local network: encrypted, and for holders of named keys alone."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from mesh_llm.defaults import GATEWAY_STOP_S
from mesh_llm.gateway.client_connection import ClientServer
from mesh_llm.gateway.limits import Limits

SHARE_HANDSHAKE_S = 10.0
"""For a phone on a bad network; whoever takes longer holds a connection that nobody counts."""

log = logging.getLogger(__name__)


class SharedPort:
    """From `open` until `close`. Strangers crowd out each other there, not programs of this machine."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: Limits
    ) -> None:
        self._runner = web.ServerRunner(ClientServer(handler, limits), shutdown_timeout=GATEWAY_STOP_S)
        self._listener: asyncio.Server | None = None
        self.address: tuple[str, int] = ("", 0)

    async def open(self, taken: socket.socket, context: ssl.SSLContext) -> None:
        """On a socket that listens already."""
        await self._runner.setup()
        assert self._runner.server is not None
        self.address = taken.getsockname()[:2]
        self._listener = await asyncio.get_running_loop().create_server(
            self._runner.server, sock=taken, ssl=context, ssl_handshake_timeout=SHARE_HANDSHAKE_S
        )
        log.info("shared with the local network address=%s port=%d", *self.address)

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Connections with it."""
        self.stop_listening()
        await self._runner.cleanup()
