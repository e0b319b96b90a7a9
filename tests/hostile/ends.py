"""Ends of connections that belong to a member which keeps to no rules."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mesh_llm.errors import MeshError, PeerLost
from mesh_llm.transport import handshake
from mesh_llm.transport.close_codes import Code, close
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.endpoint import address_of, bind
from mesh_llm.transport.framing import LENGTH, FrameError, FrameType, encode_document
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.network import NetworkConfig, Peer, Stream
from mesh_llm.types import Address, NodeId, Role
from tests.support.background import WITHIN_S, Background

READ_BYTES = 1 << 16

Serve = Callable[[NodeId, dict[str, Any], Stream], Awaitable[None]]
Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""To a ping."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream that an adversary opened."""

    loop: Background
    stream: Stream

    def write(self, data: bytes) -> None:
        """Where the stream is not over already."""
        with suppress(PeerLost):
            self.loop.run(self.stream.write(data))

    def say(self, document: dict[str, Any]) -> None:
        text = encode_document(document)
        self.write(LENGTH.pack(len(text)) + text)

    def document(self, *, within_s: float = WITHIN_S) -> dict[str, Any] | None:
        """What it is answered; None where the stream is refused, or ends without a word."""
        try:
            return self.loop.run(self.stream.read_document(1 << 20), within_s=within_s)
        except PeerLost:
            return None

    def some(self, *, within_s: float = WITHIN_S) -> bytes:
        """The next bytes."""
        return self.loop.run(self.stream.read(READ_BYTES), within_s=within_s)

    def all(self, *, within_s: float = WITHIN_S) -> bytes | None:
        """All bytes that come back; None where the stream is refused."""

        async def read() -> bytes:
            parts = []
            while part := await self.stream.read(READ_BYTES):
                parts.append(part)
            return b"".join(parts)

        try:
            return self.loop.run(read(), within_s=within_s)
        except PeerLost:
            return None

    def reset(self) -> None:
        self.loop.call(self.stream.reset)


class Ear:
    """Writes down what it is told, and answers pings: who is silent is no member for long."""

    def __init__(self, ack: Answer) -> None:
        self._ack = ack
        self.messages: list[tuple[NodeId, dict[str, Any]]] = []
        self.records: dict[NodeId, dict[str, Any]] = {}
        """The last that its node has signed."""
        self.settings: dict[str, dict[str, Any]] = {}
        """The last that each owner has signed, by its credential."""
        self.acks: set[int] = set()
        self.lost: list[tuple[NodeId, str]] = []
        """Who closed a connection, and why."""
        self.streams: list[tuple[NodeId, str, dict[str, Any]]] = []
        self.services: dict[str, Serve] = {}
        self.silent = threading.Event()
        """Set: pings are not answered."""

    def on_peer(self, peer: Peer) -> None:
        pass

    def on_lost(self, peer: Peer, reason: str) -> None:
        self.lost.append((peer.id, reason))

    def on_message(self, peer: Peer, body: dict[str, Any]) -> None:
        self.messages.append((peer.id, body))
        match body.get("kind"):
            case "ping" if not self.silent.is_set():
                peer.send(self._ack(body))
            case "ack":
                self.acks.add(body["n"])
            case "update":
                self.records |= {record["id"]: record for record in body["records"] if "text" in record}
            case "claims":
                for signed in body.get("settings", ()):
                    self._settings(signed)

    def _settings(self, signed: dict[str, Any]) -> None:
        known = self.settings.get(signed["credential"])
        if known is None or _version(signed) >= _version(known):
            self.settings[signed["credential"]] = signed

    def on_duplicate(self) -> None:
        pass

    def on_refused(self, node: NodeId, reason: str) -> None:
        pass

    def on_address(self) -> None:
        pass

    def kinds_for(self, role: Role) -> list[str]:
        return list(self.services)

    def welcome(self, node: NodeId, role: Role) -> dict[str, Any]:
        return {}

    async def on_stream(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        self.streams.append((peer.id, kind, header))
        with suppress(MeshError):
            await self.services[kind](peer.id, header, stream)


def _version(signed: dict[str, Any]) -> int:
    return int(json.loads(signed["text"])["settings"]["version"])


class Door:
    """An endpoint that takes every connection and closes it with one code, instead of a handshake.

    Before, where it has something to `show`, it says that the other one was expelled, and shows one of that.
    """

    def __init__(self, config: NetworkConfig, code: Code, show: Sequence[dict[str, Any]]) -> None:
        self._config = config
        self._code = code
        self._show = show
        self._endpoint: Any = None
        self._task: asyncio.Task[None] | None = None
        self.address = Address()
        self.dialled = 0

    async def open(self) -> None:
        self._endpoint = await bind(self._config)
        self.address = address_of(self._endpoint, self._config)
        self._task = asyncio.create_task(self._refuse(), name="refuse all")

    async def _refuse(self) -> None:
        while (incoming := await self._endpoint.accept_next()) is not None:
            with suppress(iroh().IrohError, FrameError, TimeoutError):
                connection = await (await incoming.accept()).connect()
                # The one that dials is in its handshake when it has opened the first stream.
                pair = await connection.accept_bi()
                if self._show:
                    async with asyncio.timeout(WITHIN_S):
                        await self._say(ControlStream(pair), self._show[self.dialled % len(self._show)])
                close(connection, self._code)
                self.dialled += 1

    async def _say(self, control: ControlStream, shown: dict[str, Any]) -> None:
        await control.expect(FrameType.HELLO)
        await control.write(FrameType.HELLO, handshake._hello(secrets.token_bytes(handshake.NONCE_BYTES)))
        await control.expect(FrameType.PROVE)
        await control.write(FrameType.EXPELLED, shown)
        # Until the other side has read it: it ends the connection then.
        with suppress(iroh().IrohError):
            await control.read()

    async def close(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))
        with suppress(TimeoutError, iroh().IrohError):
            async with asyncio.timeout(2.0):
                await self._endpoint.close()
