"""Peers that offer model files over TCP on loopback: honest ones, and such as a test makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mesh_llm.peer_fetch.channel import ByteStream
from mesh_llm.peer_fetch.model_fetch import Source
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.peer_fetch.serve import FileServer
from mesh_llm.peer_fetch.throttle import Throttle
from mesh_llm.types import Fingerprint, NodeId

Answer = Callable[[ByteStream, dict[str, Any]], Awaitable[None]]
PIECE_BYTES = 64 << 10


class SocketStream:
    """A byte stream over a TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self, limit: int) -> bytes:
        return await self.reader.read(limit)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def finish(self) -> None:
        self.writer.write_eof()


class Peer:
    """Listens on a port; keeps what it was asked."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.name = name
        self.requests: list[dict[str, Any]] = []
        self.port = 0
        self._answer = answer

    @property
    def source(self) -> Source:
        return connect(self.name, self.port)

    @property
    def bytes_asked(self) -> int:
        return sum(request["length"] for request in self.requests if request["ask"] == "bytes")

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [(each["file"], each["offset"]) for each in self.requests if each["ask"] == "bytes"]

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            self.requests.append(request)
            await self._answer(SocketStream(reader, writer), request)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()


def connect(name: str, port: int) -> Source:
    @asynccontextmanager
    async def open(request: dict[str, Any]) -> AsyncIterator[ByteStream]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            yield SocketStream(reader, writer)
        finally:
            writer.transport.abort()

    return Source(name=name, open=open)


@asynccontextmanager
async def peer(name: str, answer: Answer) -> AsyncIterator[Peer]:
    """A peer that answers every request by `answer`, for the length of the block."""
    made = Peer(name, answer)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(made.take(reader, writer), name=f"{name} answers")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def honest(
    cache: Path,
    fingerprint: Fingerprint,
    files: tuple[Path, ...],
    *,
    throttle: Throttle | None = None,
    stall_s: float = 30.0,
    origin: Callable[[], NodeId] = lambda: NodeId("joiner"),
) -> Answer:
    offers = FileServer(
        models=lambda: {fingerprint: files},
        digests=PieceHashes(cache, piece_bytes=PIECE_BYTES),
        throttle=throttle or Throttle(busy=lambda: False),
        stall_s=stall_s,
    )

    async def answer(stream: ByteStream, request: dict[str, Any]) -> None:
        await offers.answer(stream, request, origin=origin())

    return answer


class _Meddling:
    """Passes on what an honest peer writes, up to a number of bytes, through `change`."""

    def __init__(
        self, inner: ByteStream, limit: int | None, change: Callable[[int, bytes], bytes], stay: bool
    ) -> None:
        self._inner = inner
        self._limit = limit
        self._change = change
        self._stay = stay
        self._in_body = False
        self._sent = 0

    async def read(self, limit: int) -> bytes:
        return await self._inner.read(limit)

    async def write(self, data: bytes) -> None:
        if not self._in_body:
            self._in_body = data.endswith(b"\n")
            await self._inner.write(data)
            return
        kept = data if self._limit is None else data[: self._limit - self._sent]
        changed = self._change(self._sent, kept)
        self._sent += len(kept)
        if changed:
            await self._inner.write(changed)
        if len(kept) < len(data):
            if self._stay:
                await asyncio.Event().wait()
            await self._inner.finish()
            raise ConnectionResetError

    async def finish(self) -> None:
        await self._inner.finish()


def meddling(
    answer: Answer,
    *,
    limit: int | None = None,
    change: Callable[[int, bytes], bytes] = lambda offset, data: data,
    stay: bool = False,
) -> Answer:
    """The same, but that of each body only `limit` bytes come, and `change` is made to them.

    `change` gets the offset in the body. With `stay` the connection stays open after the limit.
    """

    async def meddle(stream: ByteStream, request: dict[str, Any]) -> None:
        if request["ask"] == "bytes":
            stream = _Meddling(stream, limit, change, stay)
        await answer(stream, request)

    return meddle


def only_once(answer: Answer) -> Answer:
    """The same for one body; after that every connection is reset."""
    dead = False

    async def once(stream: ByteStream, request: dict[str, Any]) -> None:
        nonlocal dead
        if dead:
            raise ConnectionResetError
        dead = request["ask"] == "bytes"
        await answer(stream, request)

    return once
