"""Programs that `relay` starts: an engine that only keeps time, and the two relays in front of it.

    relay_programs.py engine | gateway PORT | bare PORT

Each prints its port. A relay answers every line on its stdin with the CPU time it has used so far.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import cast

import uvloop

from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health, ModelDetails, Upstream
from mesh_llm.types import State

TOKENS = 500
GAP_S = 0.002
"""Between two tokens: slower than any relay, so that none is handed on together with the next one."""
STREAM, WHOLE = "/completion", "/tokenize"
BODY = b'{"prompt": "The sea", "stream": true}'
LAST_CHUNK = b"0\r\n\r\n"

_EVENT = (
    b'data: {"index":0,"content":" hello","tokens":[123],"stop":false,"id_slot":0,'
    b'"tokens_predicted":12,"tokens_evaluated":17}\n\n'
)
_END = b'data: {"index":0,"content":"","stop":true}\n\n'
_LAST_EVENT = b"%x\r\n%b\r\n" % (len(_END), _END)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nKeep-Alive: timeout=5, max=100\r\n"
_STREAM_HEAD = _HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WHOLE_BODY = b'{"tokens":[504,3516]}'
_WHOLE_HEAD = _HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_WHOLE_BODY)


# -- the engine ---------------------------------------------------------------------------------


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As llama-server does: a stream ends with its connection, other answers keep it."""
    try:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\nContent-Length: ([0-9]+)\r\n", request)
            assert length is not None
            await reader.readexactly(int(length[1]))
            if request.startswith(f"POST {STREAM} ".encode()):
                break
            writer.write(_WHOLE_HEAD + _WHOLE_BODY)
        writer.write(_STREAM_HEAD)
        for _ in range(TOKENS - 1):
            writer.write(_CHUNK)
            await asyncio.sleep(GAP_S)
        writer.write(_LAST_EVENT + LAST_CHUNK)
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _engine() -> int:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


# -- the relays ---------------------------------------------------------------------------------


class _Node:
    """What the gateway asks of the node behind it."""

    def __init__(self, port: int) -> None:
        self._upstream = Upstream(url=f"http://127.0.0.1:{port}", key="engine-key")

    names = ("none",)

    def models(self) -> Sequence[_Node]:
        return (self,)

    def slot_queue(self, upstream: Upstream) -> None: ...

    def slot_queues(self) -> Sequence[SlotQueue]:
        return ()

    def upstreams(self) -> Sequence[Upstream]:
        return (self._upstream,)

    def upstream(self) -> Upstream:
        return self._upstream

    async def look(self, digests: Sequence[str]) -> dict[str, str]:
        return {}

    def engine(self, epoch: int) -> Upstream | None:
        return None

    def health(self) -> Health:
        return Health(state=State.SERVING, reason="", model="none")

    def metrics(self, engine: bytes) -> bytes:
        return b""

    def remark(self, kind: str, text: str) -> None: ...

    def want(self) -> None: ...

    def details(self) -> ModelDetails:
        return ModelDetails()

    async def load(self, name: str) -> None: ...

    async def unload(self, name: str) -> None: ...

    async def engine_failure(self, upstream: Upstream) -> str:
        return "the engine of a bench failed"


async def _gateway(engine_port: int) -> int:
    gateway = Gateway(GatewayConfig(port=0), _Node(engine_port))
    await gateway.start()
    return gateway.port


class _BareClient(asyncio.Protocol):
    """Bytes from one socket to another, unread: no relay on this loop can do with less."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._asking = asyncio.create_task(self._ask(data))

    async def _ask(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: _BareEngine(self.transport), "127.0.0.1", self._engine_port
        )
        transport.write(data)


class _BareEngine(asyncio.Protocol):
    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


async def _bare(engine_port: int) -> int:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _BareClient(engine_port), "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


# -- programs -----------------------------------------------------------------------------------


async def _serve(starting: Awaitable[int]) -> None:
    port = await starting
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    print(port, flush=True)
    while await reader.readline():
        print(time.process_time(), flush=True)


def main() -> None:
    role, *ports = sys.argv[1:]
    if role == "engine":
        asyncio.run(_serve(_engine()))
        return
    start = {"gateway": _gateway, "bare": _bare}[role]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(start(int(ports[0]))))


if __name__ == "__main__":
    main()
