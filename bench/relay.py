"""What it costs to relay: the gateway's CPU time, beside a relay that only copies bytes."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.plan import Plan
from bench.relay_programs import BODY, GAP_S, LAST_CHUNK, STREAM, TOKENS, WHOLE
from bench.report import Row, Side, plain_row
from bench.stats import at_most
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import ENVIRONMENT, following
from mesh_llm.engine.process import Child, spawn
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "What relaying costs in CPU time"

GATEWAY, BARE = "gateway", "bare relay"
TOKEN_LIMIT_US = 90.0
"""2 % of a token of the default model, which takes some 4.5 ms on two cores that the engine has to itself."""
_REQUESTS = 50
_ANSWER_S = 30.0


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    tokens: dict[str, list[float]] = defaultdict(list)
    requests: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(_program("engine"))
        sides = [
            (name, await stack.enter_async_context(_program(role, str(engine.port))))
            for name, role in ((GATEWAY, "gateway"), (BARE, "bare"))
        ]
        for _, relay in sides:
            await _stream(relay.port)
        rounds = plan.rounds(full=40, quick=8, full_s=120.0, quick_s=25.0)
        for number in rounds:
            for name, relay in turns(sides, number):
                before = await relay.cpu_s()
                await _stream(relay.port)
                streamed = await relay.cpu_s()
                for _ in range(_REQUESTS):
                    await _whole(relay.port)
                answered = await relay.cpu_s()
                tokens[name].append(1e6 * (streamed - before) / TOKENS)
                requests[name].append(1e6 * (answered - streamed) / _REQUESTS)
    return _rows(tokens, requests), (
        rounds.note(),
        f"tokens: streams of {TOKENS} events, {1000 * GAP_S:g} ms apart, the set-up of one request included",
        f"requests: {_REQUESTS} small answers, each on a new connection of the client's own",
        f"{BARE}: two sockets joined by callbacks on the same loop, which reads nothing of what it copies",
    )


def _rows(tokens: dict[str, list[float]], requests: dict[str, list[float]]) -> tuple[Row, ...]:
    def side(seen: dict[str, list[float]], name: str) -> Side:
        return Side(name=name, sample=Sample.of(seen[name]), unit="µs")

    return (
        plain_row(
            "CPU time of a token", side(tokens, GATEWAY), at_most(TOKEN_LIMIT_US), theirs=side(tokens, BARE)
        ),
        plain_row("CPU time of a request", side(requests, GATEWAY), None, theirs=side(requests, BARE)),
    )


class _Program:
    def __init__(self, child: Child, lines: asyncio.Queue[str]) -> None:
        self._child = child
        self._lines = lines
        self.port = 0

    async def line(self) -> str:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._lines.get()
        except TimeoutError:
            said = " / ".join(list(self._child.recent)[-3:])
            raise MeshError(f"a part of the bench says nothing: {said}") from None

    async def cpu_s(self) -> float:
        await self._child.send(b"\n", close=False)
        return float(await self.line())


@asynccontextmanager
async def _program(*arguments: str) -> AsyncIterator[_Program]:
    lines = asyncio.Queue[str]()
    program = Path(__file__).with_name("relay_programs.py")
    argv = following([sys.executable, "-P", str(program), *arguments])
    async with spawn(argv, on_stdout=lines.put_nowait, on_stderr=lambda _: None, env=ENVIRONMENT) as child:
        started = _Program(child, lines)
        started.port = int(await started.line())
        yield started


async def _stream(port: int) -> None:
    received = await _exchange(port, STREAM, until=LAST_CHUNK)
    if received.count(b"data: ") != TOKENS:
        raise MeshError(f"a stream of {TOKENS} events had {received.count(b'data: ')}")


async def _whole(port: int) -> None:
    await _exchange(port, WHOLE, until=b"}")


async def _exchange(port: int, path: str, *, until: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    received = b""
    async with asyncio.timeout(_ANSWER_S):
        while not received.endswith(until):
            data = await reader.read(1 << 16)
            if not data:
                raise MeshError(f"an answer on {path} broke off")
            received += data
    writer.close()
    return received
