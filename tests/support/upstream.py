"""A small HTTP server in the engine's place, and the node that says where it listens.

It speaks HTTP by hand, so that a test decides every byte and every way to break off.
Without other orders it answers each request with what it has seen of it, as JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mesh_llm.errors import MeshError
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health, ModelDetails, Upstream
from mesh_llm.types import State

KEY = "engine-key"
WAIT_S = 30.0
"""For what takes milliseconds, on a machine that is busy with something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request as it arrived."""

    connection: int
    """Which of the server's connections it came on, counted from 1."""
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass(slots=True, kw_only=True)
class Wire:
    """The way back to the client, for one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def abort(self) -> None:
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Return when the other side has closed its end."""
        while await self.reader.read(1 << 16):
            pass


Script = Callable[[Seen, Wire], Awaitable[None]]

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def plain(body: bytes, *headers: bytes) -> bytes:
    lines = (b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def sends(*parts: bytes, close: bool = False) -> Callable[[Seen, Wire], Awaitable[None]]:
    """A script that sends each part in a segment of its own."""

    async def script(_: Seen, wire: Wire) -> None:
        for part in parts:
            await wire.send(part)
            await asyncio.sleep(0.005)
        if close:
            wire.writer.close()

    return script


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    """Of them, those that have not ended."""
    scripts: dict[str, Script] = field(default_factory=dict)
    """By path; a script may leave the connection open or close it."""

    @property
    def upstream(self) -> Upstream:
        return Upstream(url=f"http://127.0.0.1:{self.port}", key=KEY)

    def on(self, path: str, script: Script) -> None:
        self.scripts[path] = script

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        connection = self.connections
        wire = Wire(reader=reader, writer=writer)
        try:
            while (request := await _read_request(reader, connection)) is not None:
                self.seen.append(request)
                script = self.scripts.get(request.target.partition("?")[0], _echo)
                await script(request, wire)
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


async def _echo(seen: Seen, wire: Wire) -> None:
    facts = {
        "connection": seen.connection,
        "method": seen.method,
        "target": seen.target,
        "headers": seen.headers,
        "size": len(seen.body),
        "body": seen.body[:1000].decode("latin-1"),
    }
    body = json.dumps(facts).encode()
    answer = plain(body, b"Content-Type: application/json", b"Server: llama.cpp")
    await wire.send(answer[: -len(body)] if seen.method == "HEAD" else answer)


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Seen | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("utf-8").removesuffix("\r\n\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    framing = {name.lower(): value for name, value in headers}
    body = b""
    if "content-length" in framing:
        body = await reader.readexactly(int(framing["content-length"]))
    elif framing.get("transfer-encoding") == "chunked":
        while chunk := await read_chunk(reader):
            body += chunk
    return Seen(connection=connection, method=method, target=target, headers=headers, body=body)


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk of a chunked body; empty for the last one."""
    size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    data = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return data


@asynccontextmanager
async def fake_engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(engine.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=WAIT_S)


@dataclass(slots=True, kw_only=True)
class FakeNode:
    """What the gateway asks of the node, to be set by the test."""

    where: Upstream | None = None
    state: Health = field(default_factory=lambda: Health(state=State.SERVING, reason="", model="tiny"))
    sentence: str = "the engine was killed by signal 9"
    asked: list[Upstream] = field(default_factory=list)
    series: bytes = b"mesh_llm_fake 1.0\n"
    engine_series: bytes = b""
    """That it was shown last."""
    remarks: list[tuple[str, str]] = field(default_factory=list)
    turns: SlotQueue | None = None
    names: tuple[str, ...] = ("tiny",)
    managed: list[tuple[str, str]] = field(default_factory=list)
    refusal: MeshError | None = None
    wanted: int = 0
    """How often somebody was seen waiting."""
    others: list[FakeNode] = field(default_factory=list)
    """That serve other models of it."""
    gives: tuple[str, ...] = ("text",)

    def models(self) -> Sequence[FakeNode]:
        return (self, *self.others)

    def slot_queue(self, upstream: Upstream) -> SlotQueue | None:
        return self.turns

    def slot_queues(self) -> Sequence[SlotQueue]:
        return () if self.turns is None else (self.turns,)

    def upstreams(self) -> list[Upstream]:
        return [self.where] if self.where is not None else []

    def upstream(self) -> Upstream | None:
        return self.where

    async def look(self, digests: Sequence[str]) -> dict[str, str]:
        return {}

    def engine(self, epoch: int) -> Upstream | None:
        return self.where

    def health(self) -> Health:
        return self.state

    def metrics(self, engine: bytes) -> bytes:
        self.engine_series = engine
        return self.series

    def remark(self, kind: str, text: str) -> None:
        self.remarks.append((kind, text))

    def details(self) -> ModelDetails:
        return ModelDetails(context=512, gives=self.gives, on_demand=self.state.loads)

    async def load(self, name: str) -> None:
        self.managed.append(("load", name))
        if self.refusal is not None:
            raise self.refusal

    async def unload(self, name: str) -> None:
        self.managed.append(("unload", name))
        if self.refusal is not None:
            raise self.refusal

    def want(self) -> None:
        self.wanted += 1

    async def engine_failure(self, upstream: Upstream) -> str:
        self.asked.append(upstream)
        return self.sentence
