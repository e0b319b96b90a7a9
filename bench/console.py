"""What it costs a busy mesh's host to be watched: by nobody, by one page, by twenty."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, ratio_row
from bench.stats import at_most, below
from mesh_llm.bench.client import Client, client, story
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import ENVIRONMENT, Server
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample
from mesh_llm.tasks import cancelled

TITLE = "What pages that watch cost a busy host"

NOBODY, ONE, MANY = 0, 1, 20
TOKENS = 300
_OTHERS = 2
_COMMAND_S = 30.0
_SETTLE_S = 2.0
_SERVING_S = 90.0
_BODY = story(TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one answer, while so many watched."""

    node_s: float
    """CPU time of the node's own process."""
    all_s: float
    """And of its children: the engine."""
    wall_s: float


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen: dict[int, list[Cost]] = defaultdict(list)
    read: dict[int, int] = defaultdict(int)
    async with _mesh() as (host, page), client() as asker:
        await asker.stream(host, "/completion", _BODY)
        rounds = plan.rounds(full=20, quick=6, full_s=240.0, quick_s=120.0)
        for number in rounds:
            for watchers in turns([NOBODY, ONE, MANY], number):
                cost, bytes_read = await _cost(host, page, asker, watchers)
                seen[watchers].append(cost)
                read[watchers] += bytes_read
        document = len(json.dumps((await _status_of(page)), separators=(",", ":")))
    one_s = sum(cost.wall_s for cost in seen[ONE])
    return _rows(seen), (
        rounds.note(),
        f"three nodes on this machine, the model split over all of them; one answer of {TOKENS} tokens at a "
        "time through the host's API; the pages are connections of the bench, which read and throw away",
        "CPU time is the kernel's, in nanoseconds, of all threads; workers of other nodes are not counted",
        f"a page reads {read[ONE] / one_s / 1e3:.1f} KB/s; the status document has {document / 1e3:.1f} KB",
    )


def _rows(seen: dict[int, list[Cost]]) -> tuple[Row, ...]:
    def whole(watchers: int) -> Side:
        values = [1e3 * cost.all_s / TOKENS for cost in seen[watchers]]
        return Side(name=_named(watchers), sample=Sample.of(values), unit="ms", digits=3)

    def own(watchers: int) -> Side:
        values = [1e3 * cost.node_s / TOKENS for cost in seen[watchers]]
        return Side(name=_named(watchers), sample=Sample.of(values), unit="ms", digits=3)

    def share(watchers: int) -> Side:
        values = [100 * cost.node_s / cost.wall_s for cost in seen[watchers]]
        return Side(name=_named(watchers), sample=Sample.of(values), unit="%", digits=2)

    return (
        added_row("added to the node's share of a core", (share(ONE), share(NOBODY)), below(2.0)),
        added_row("the same by twenty", (share(MANY), share(NOBODY)), None),
        ratio_row("CPU per token, node and engine", (whole(MANY), whole(NOBODY)), at_most(1.05)),
        ratio_row("CPU per token, the node's process alone", (own(MANY), own(NOBODY)), None),
    )


def _named(watchers: int) -> str:
    return {NOBODY: "nobody", ONE: "one page", MANY: f"{MANY} pages"}[watchers]


# -- one measurement ----------------------------------------------------------------------------


async def _cost(host: Server, page: str, asker: Client, watchers: int) -> tuple[Cost, int]:
    async with AsyncExitStack() as stack:
        pages = [await stack.enter_async_context(_watching(page)) for _ in range(watchers)]
        await asyncio.sleep(_SETTLE_S)
        already = sum(counts[0] for counts in pages)
        before, began = _cpu_s(host.pid), time.perf_counter()
        stream = await asker.stream(host, "/completion", _BODY)
        wall_s, after = time.perf_counter() - began, _cpu_s(host.pid)
        if len(stream.arrived_s) < TOKENS // 2:
            raise MeshError(f"a stream of {TOKENS} tokens had {len(stream.arrived_s)} events")
        if any(counts[1] for counts in pages):
            raise MeshError("a page was dropped")
        own, family = (late - early for early, late in zip(before, after, strict=True))
        return Cost(node_s=own, all_s=family, wall_s=wall_s), sum(counts[0] for counts in pages) - already


@asynccontextmanager
async def _watching(page: str) -> AsyncIterator[list[int]]:
    """A page, as far as the node can tell: bytes that it has read, and whether it was dropped."""
    port = urlsplit(page).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /api/events HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise MeshError(f"the console answered {head[:40]!r}")
    counts = [0, 0]

    async def follow() -> None:
        while data := await reader.read(1 << 16):
            counts[0] += len(data)
        counts[1] = 1

    following = asyncio.create_task(follow(), name="page")
    try:
        yield counts
    finally:
        await cancelled(following)
        writer.close()


def _cpu_s(pid: int) -> tuple[float, float]:
    """Of a process, and of it with all its children."""
    process = psutil.Process(pid)
    own = _threads_s(pid)
    return own, own + sum(_threads_s(child.pid) for child in process.children(recursive=True))


def _threads_s(pid: int) -> float:
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


# -- the mesh -----------------------------------------------------------------------------------


@asynccontextmanager
async def _mesh() -> AsyncIterator[tuple[Server, str]]:
    """Its host, and the address of the console there."""
    options = ("--threads", "1")
    async with AsyncExitStack() as stack:
        home = stack.enter_context(servers.fresh_home())
        creating = (
            "--split",
            "--console",
            "0",
            "--ctx-size",
            "2048",
            "--parallel",
            "1",
            "--hosting",
            "prefer",
        )
        host = await stack.enter_async_context(servers.node(home, "--name", "host", *creating, *options))
        token = (await _told("invite", "--json", "--home", str(home)))["token"]
        for number in range(_OTHERS):
            other = stack.enter_context(servers.fresh_home())
            joining = ("--name", f"other{number}", "--join", token, *options)
            await stack.enter_async_context(servers.node(other, *joining))
        page = str((await _told("status", "--json", "--home", str(home)))["console"]["url"])
        async with asyncio.timeout(_SERVING_S):
            while len((await _status_of(page))["plan"]["stages"]) <= _OTHERS:
                await asyncio.sleep(0.5)
        yield host, page


async def _told(*arguments: str) -> dict[str, Any]:
    argv = [str(servers.command()), *arguments]
    finished = await run(argv, timeout_s=_COMMAND_S, env=ENVIRONMENT)
    if finished.status != 0:
        raise MeshError(f"mesh-llm {arguments[0]} ended with {finished.status}")
    document: dict[str, Any] = json.loads("\n".join(finished.output))
    return document


async def _status_of(page: str) -> dict[str, Any]:
    port = urlsplit(page).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"GET /api/status HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
    finally:
        writer.close()
    document: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return document
