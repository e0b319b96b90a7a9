"""What `mesh-llm relay` costs: CPU time for each datagram, with hundreds of clients that all talk at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import psutil
from iroh.iroh_ffi import SecretKey

from bench.plan import Plan
from bench.report import Row, Side, plain_row
from mesh_llm.bench.servers import ENVIRONMENT, following
from mesh_llm.engine.process import spawn
from mesh_llm.errors import MeshError
from mesh_llm.relay import protocol as protocol
from mesh_llm.results.samples import Sample

TITLE = "What the relay server costs"

CLIENTS = 300
DATAGRAM_BYTES = 1200
"""What QUIC sends until it knows better."""
BATCH = 10
WINDOW = 4
"""Messages of each client under way at once."""
_ROUND_S = 2.0
_QUIET_S = 0.1
_ANSWER_S = 60.0
_MASKED = 0x80
_UPGRADE = (
    f"GET {protocol.PATH} HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    f"Sec-WebSocket-Protocol: {protocol.VERSIONS[0]}\r\n\r\n"
).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    name: str
    datagrams: int
    """In each message."""

    def body(self) -> bytes:
        payload = os.urandom(DATAGRAM_BYTES * self.datagrams)
        size = DATAGRAM_BYTES.to_bytes(2, "big") if self.datagrams > 1 else b""
        return b"\0" + size + payload

    def message(self, destination: bytes) -> bytes:
        kind = protocol.FrameKind.SEND_BATCH if self.datagrams > 1 else protocol.FrameKind.SEND
        return websocket_frame(bytes([kind]) + destination + self.body())


LOADS = (Load(name="single datagrams", datagrams=1), Load(name=f"batches of {BATCH}", datagrams=BATCH))


def websocket_frame(payload: bytes) -> bytes:
    """As a client has to send it; masked with zeros, which leaves it as it is."""
    length = len(payload)
    if length < 126:
        head = bytes([0x82, _MASKED | length])
    else:
        head = bytes([0x82, _MASKED | 126]) + length.to_bytes(2, "big")
    return head + bytes(4) + payload


class LoadClient(asyncio.Protocol):
    """Sends the next message for each that arrives. It only counts bytes, and so costs next to nothing."""

    def __init__(self) -> None:
        self.secret = SecretKey.generate()
        self.id: bytes = bytes(self.secret.public().to_bytes())
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = 0
        self._data = b""
        self._message = b""
        self._size = 0
        self._pending = 0
        self._stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_UPGRADE)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.joined.done():
            self.joined.set_exception(MeshError(f"the relay closed a connection: {self._data[:80]!r}"))

    def data_received(self, data: bytes) -> None:
        if self._size:
            self._pending += len(data)
            count, self._pending = divmod(self._pending, self._size)
            self.received += count
            if count and not self._stopped:
                self._transport.write(self._message * count)
        elif not self.joined.done():
            self._data += data
            self._shake_hands()

    def _shake_hands(self) -> None:
        _, complete, rest = self._data.partition(b"\r\n\r\n")
        challenge_end = 2 + 1 + protocol.CHALLENGE_BYTES
        if not complete or len(rest) < challenge_end:
            return
        if len(rest) == challenge_end:
            signature = self.secret.sign(protocol.signed_message(rest[3:challenge_end]))
            proof = protocol.authentication(self.id, bytes(signature.to_bytes()))
            self._transport.write(websocket_frame(proof))
        elif rest[challenge_end:] == b"\x82\x01" + protocol.confirmed():
            self.joined.set_result(None)

    def start(self, load: Load, destination: LoadClient) -> None:
        self._message = load.message(destination.id)
        # What arrives has two bytes of head less the mask; everybody sends messages of one size.
        self._size = len(self._message) - 4
        self._stopped = False
        self._transport.write(self._message * WINDOW)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._transport.abort()


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[LoadClient]]:
    loop = asyncio.get_running_loop()
    clients: list[LoadClient] = []
    try:
        for _ in range(count):
            _, client = await loop.create_connection(LoadClient, "127.0.0.1", port)
            clients.append(client)
            async with asyncio.timeout(_ANSWER_S):
                await client.joined
        yield clients
    finally:
        for client in clients:
            client.close()


def received(clients: list[LoadClient]) -> int:
    return sum(client.received for client in clients)


def start(clients: list[LoadClient], load: Load) -> None:
    """Everybody talks with its neighbour."""
    for client, neighbour in zip(clients, [*clients[1:], clients[0]], strict=True):
        client.start(load, neighbour)


async def stop(clients: list[LoadClient]) -> None:
    """Nobody says anything more, and what is under way has arrived."""
    for client in clients:
        client.stop()
    seen = -1
    while (now := received(clients)) != seen:
        seen = now
        await asyncio.sleep(_QUIET_S)


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    cost: dict[str, list[float]] = defaultdict(list)
    rate: dict[str, list[float]] = defaultdict(list)
    rounds = plan.rounds(full=15, quick=4, full_s=120.0, quick_s=30.0)
    async with _relay() as (pid, port), connected(port, CLIENTS) as clients:
        process = psutil.Process(pid)
        for _ in rounds:
            for load in LOADS:
                before, cpu_s, started = received(clients), _cpu_s(process), time.monotonic()
                start(clients, load)
                await asyncio.sleep(_ROUND_S)
                in_time, took_s = received(clients) - before, time.monotonic() - started
                await stop(clients)
                in_all = max(1, received(clients) - before)
                cost[load.name].append(1e6 * (_cpu_s(process) - cpu_s) / (in_all * load.datagrams))
                rate[load.name].append(in_time * load.datagrams / took_s)
        memory_mb = process.memory_info().rss / 1e6
    rows = []
    for load in LOADS:
        for what, seen, unit in (("CPU time of a datagram", cost, "µs"), ("relayed", rate, "datagrams/s")):
            side = Side(name="relay", sample=Sample.of(seen[load.name]), unit=unit)
            rows.append(plain_row(f"{what}, {load.name}", side, None))
    return tuple(rows), (
        rounds.note(),
        f"{CLIENTS} clients, {WINDOW} messages of each under way at once, {DATAGRAM_BYTES} bytes a datagram",
        f"memory of the relay at the end: {memory_mb:.0f} MB",
        "clients and relay share the machine: datagrams per second say less than the CPU time of one",
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def _relay() -> AsyncIterator[tuple[int, int]]:
    lines = asyncio.Queue[str]()
    options = ["--listen", "127.0.0.1:0", "--per-address", "0", "--rate", "0", "--max-clients", "2000"]
    argv = following([sys.executable, "-P", "-m", "mesh_llm", "relay", *options])
    async with spawn(argv, on_stdout=lines.put_nowait, on_stderr=lambda _: None, env=ENVIRONMENT) as child:
        async with asyncio.timeout(_ANSWER_S):
            address = await lines.get()
        yield child.pid, int(address.rpartition(":")[2])
