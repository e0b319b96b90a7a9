"""A client of the relay that does only what a test tells it to."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from iroh.iroh_ffi import SecretKey

from mesh_llm.relay import protocol as protocol
from mesh_llm.relay.server import RelayConfig, RelayServer

ANSWER_S = 15.0
"""For what has to come, on a busy machine."""


def listener(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@asynccontextmanager
async def relay(
    config: RelayConfig | None = None, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[RelayServer]:
    server = RelayServer(config or RelayConfig())
    await server.start(listener(port), tls)
    try:
        yield server
    finally:
        await server.stop()


class RelayPeer:
    """An endpoint's end of the connection, made by `peer` and `stranger`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, secret: Any) -> None:
        self.socket = socket
        self.secret = secret
        self.id: bytes = bytes(secret.public().to_bytes())

    async def receive(self) -> bytes:
        """The next message; b"" when the relay has closed the connection."""
        async with asyncio.timeout(ANSWER_S):
            message = await self.socket.receive()
        return message.data if message.type is aiohttp.WSMsgType.BINARY else b""

    async def closed(self) -> None:
        """Wait for the relay to close the connection, whatever comes before."""
        async with asyncio.timeout(ANSWER_S):
            while await self.receive():
                pass

    async def send(self, frame: bytes) -> None:
        await self.socket.send_bytes(frame)

    async def send_to(self, other: RelayPeer, datagram: bytes) -> None:
        await self.send(send_frame(other.id, datagram))

    def sign(self, challenge: bytes) -> bytes:
        """The answer to the relay's first message."""
        signature = self.secret.sign(protocol.signed_message(challenge[1:]))
        return protocol.authentication(self.id, bytes(signature.to_bytes()))


def send_frame(to: bytes, datagram: bytes) -> bytes:
    return bytes([protocol.FrameKind.SEND]) + to + b"\0" + datagram


def delivered(source: bytes, datagram: bytes) -> bytes:
    return bytes([protocol.FrameKind.DELIVER]) + source + b"\0" + datagram


@asynccontextmanager
async def stranger(
    url: str,
    *,
    secret: Any = None,
    version: str = protocol.VERSIONS[0],
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[RelayPeer]:
    """Connected, and not a word said."""
    headers: Mapping[str, str] = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            url + protocol.PATH,
            protocols=[version],
            headers=headers,
            ssl=tls or True,
            max_msg_size=0,
            timeout=aiohttp.ClientWSTimeout(ws_close=2),
        ) as socket,
    ):
        yield RelayPeer(socket, secret or SecretKey.generate())


@asynccontextmanager
async def peer(url: str, **options: Any) -> AsyncIterator[RelayPeer]:
    """Connected and let in."""
    async with stranger(url, **options) as joined:
        await joined.send(joined.sign(await joined.receive()))
        assert await joined.receive() == protocol.confirmed()
        yield joined


def url(server: RelayServer, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{server.port}"
