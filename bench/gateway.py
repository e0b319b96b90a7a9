"""A gateway at work: for clients of another node, many at once, small requests, and those who leave."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import psutil

from bench import guests, revision, servers
from bench.guests import Guests
from bench.plan import Plan
from bench.report import Row, Side, added_row, plain_row, ratio_row
from bench.revision import Trees
from bench.servers import ObservedServer
from bench.stats import at_least, at_most
from mesh_llm.bench.client import Client, TimedStream, client, story
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import Server
from mesh_llm.cli.control import call
from mesh_llm.errors import MeshError
from mesh_llm.home import Home
from mesh_llm.results.samples import Sample

TITLE = "A gateway at work"

GATEWAY, ENGINE, ELSEWHERE = "gateway", "engine", "another node's gateway"
STREAMS = 16
TOKENS = 64
LIST_CONNECTIONS = 8
LIST_REQUESTS = 2000
_PAUSE_S = 0.05
_LEAVE_PIECES = 8
_LEAVE_S = 0.2
"""In the middle of a prompt that takes a second or so."""
_POLL_S = 0.002
_IDLE_S = 30.0
_BODY = story(TOKENS)
_OPTIONS = ("--parallel", str(STREAMS), "--ctx-size", "512", "--threads", "1")
"""One thread: nodes and client need a core, too, and threads that wait for each other would all wait."""
_TOGETHER = f"throughput of {STREAMS} streams at once"
_LISTS = "lists of models for a second of CPU time"
_FIRST_TOKENS = 8
"""Of a stream of which only the first counts."""


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    with servers.fresh_home() as home, servers.fresh_home() as other_home:
        async with servers.observed_node(home, *_OPTIONS) as observed, client() as asker:
            join = ("--client", "--join", await _invite(home))
            async with servers.node(other_home, *join) as elsewhere:
                first, first_note = await _first_tokens(asker, observed.engine, elsewhere, plan)
                left = await _cancelled(asker, observed, elsewhere, plan)
            sides = {GATEWAY: observed.node, ENGINE: observed.engine}
            seen, together_note = await _together(asker, sides, plan)
            rates = await _lists({GATEWAY: observed.node}, plan)
    ours, theirs = (Side(name=name, sample=Sample.of(seen[name]), unit="tok/s") for name in sides)
    together = ratio_row(_TOGETHER, (ours, theirs), at_least(0.97))
    side = Side(name=GATEWAY, sample=Sample.of(rates[GATEWAY]), unit="requests/s", digits=0)
    listed = plain_row(_LISTS, side, at_least(1000))
    notes = (
        f"first tokens, {first_note}; {STREAMS} streams at once, {together_note}",
        f"every stream has {TOKENS} tokens and a prompt that its slot already holds",
        f"lists of models: {LIST_REQUESTS} requests a round on {LIST_CONNECTIONS} connections that are kept; "
        "by the node's own CPU time, since client and node share the machine",
        "clients who leave: from then on until the engine says that no slot works; it looks whether somebody "
        "still listens with each token, and with each batch of a prompt",
    )
    return (first, together, listed, *left), notes


async def compare(plan: Plan, trees: Trees) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Nodes of two commits, asked the same by one client in turns."""
    await trees.then.build()
    async with AsyncExitStack() as stack:
        meshes = {
            tree.name: await stack.enter_async_context(guests.guests(tree, *_OPTIONS)) for tree in trees.both
        }
        asker = await stack.enter_async_context(client())
        first, first_note = await _first_tokens_then(asker, meshes, plan)
        ways = await _ways(asker, meshes, plan)
        hosts = {name: mesh.host.node for name, mesh in meshes.items()}
        seen, together_note = await _together(asker, hosts, plan)
        rates = await _lists(hosts, plan)
    together = ratio_row(_TOGETHER, revision.sides(seen, "tok/s", digits=1), None)
    listed = ratio_row(_LISTS, revision.sides(rates, "requests/s", digits=0), None)
    notes = (
        f"first tokens, {first_note}; {STREAMS} streams at once, {together_note}",
        "each commit has a mesh of its own: a host, another node that computes nothing and a lite client; "
        "one client asks all of them, one at a time, a new connection for each request",
        "prompts are held by their slot already: a first token costs one step and the way to the engine",
    )
    return (*first, *ways, together, listed), notes


async def _first_tokens_then(
    asker: Client, meshes: dict[str, Guests], plan: Plan
) -> tuple[tuple[Row, ...], str]:
    body = story(_FIRST_TOKENS) | {"id_slot": 0}
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, mesh in meshes.items():
        # Two commits may compute in other ways and differ; three doors to one engine may not.
        texts = {(await asker.stream(server, "/completion", body)).text for server in mesh.doors.values()}
        if len(texts) != 1:
            raise MeshError(f"the nodes of {name} streamed different texts at temperature 0")
    rounds = plan.rounds(full=100, quick=30, full_s=180.0, quick_s=40.0)
    for number in rounds:
        for door in guests.DOORS:
            for name, mesh in turns(list(meshes.items()), number):
                await asyncio.sleep(_PAUSE_S)
                stream = await asker.stream(mesh.doors[door], "/completion", body)
                seen[door][name].append(1e3 * stream.first_s)
    rows: list[Row] = []
    for door in guests.DOORS:
        sides = revision.sides(seen[door], "ms")
        target = None if door == guests.HOST else at_most(1.0)
        rows.append(added_row(f"added to the first token through {door}", sides, target))
        rows.append(ratio_row(f"first token through {door}", sides, None))
    return tuple(rows), rounds.note()


async def _ways(asker: Client, meshes: dict[str, Guests], plan: Plan) -> tuple[Row, ...]:
    """A request that computes next to nothing shows the way to the engine alone."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(plan.choose(full=200, quick=60)):
        for door in guests.DOORS:
            for name, mesh in turns(list(meshes.items()), number):
                answer = await asker.ask(mesh.doors[door], "/tokenize", {"content": "The sea"})
                seen[door][name].append(1e3 * answer.wall_s)
    return tuple(
        added_row(f"added to /tokenize through {door}", revision.sides(seen[door], "ms"), None)
        for door in guests.DOORS
    )


async def _invite(home: Path) -> str:
    answer = await call(Home(home), "POST", "/api/invite", {"role": "client", "lifetime_s": 3600.0})
    return str(answer["token"])


async def _first_tokens(asker: Client, engine: Server, elsewhere: Server, plan: Plan) -> tuple[Row, str]:
    """Through two nodes and a QUIC connection, against the engine's own port."""
    body = _BODY | {"id_slot": 0}
    sides = {ELSEWHERE: elsewhere, ENGINE: engine}
    seen: dict[str, list[float]] = defaultdict(list)
    for server in sides.values():
        await asker.stream(server, "/completion", body)
    rounds = plan.rounds(full=60, quick=16, full_s=180.0, quick_s=30.0)
    for number in rounds:
        for name, server in turns(list(sides.items()), number):
            await asyncio.sleep(_PAUSE_S)
            seen[name].append(1e3 * _whole(await asker.stream(server, "/completion", body)).first_s)
    ours, theirs = (
        Side(name=name, sample=Sample.of(seen[name]), unit="ms", digits=2) for name in (ELSEWHERE, ENGINE)
    )
    return added_row("added to the first token across nodes", (ours, theirs), at_most(6.0)), rounds.note()


async def _together(
    asker: Client, sides: dict[str, Server], plan: Plan
) -> tuple[dict[str, list[float]], str]:
    """Tokens per second of many streams at once, by side."""
    seen: dict[str, list[float]] = defaultdict(list)
    for server in sides.values():
        await _all_streams(asker, server)
    rounds = plan.rounds(full=20, quick=5, full_s=300.0, quick_s=60.0)
    for number in rounds:
        for name, server in turns(list(sides.items()), number):
            await asyncio.sleep(_PAUSE_S)
            seen[name].append(STREAMS * TOKENS / await _all_streams(asker, server))
    return seen, rounds.note()


async def _all_streams(asker: Client, server: Server) -> float:
    """Seconds until the last one has ended."""
    started = time.perf_counter()
    streams = await asyncio.gather(
        *(asker.stream(server, "/completion", _BODY | {"id_slot": slot}) for slot in range(STREAMS))
    )
    took_s = time.perf_counter() - started
    for stream in streams:
        _whole(stream)
    return took_s


def _whole(stream: TimedStream) -> TimedStream:
    if len(stream.arrived_s) < TOKENS // 2:
        raise MeshError(f"a stream of {TOKENS} tokens had {len(stream.arrived_s)} events")
    return stream


async def _cancelled(
    asker: Client, observed: ObservedServer, elsewhere: Server, plan: Plan
) -> tuple[Row, ...]:
    """How long the engine works for one who has left: in the middle of a text, and of a prompt."""
    sides = {GATEWAY: observed.node, ELSEWHERE: elsewhere}
    text = story(400)
    prompt = text | {"prompt": "A list: " + " ".join(map(str, range(100))), "cache_prompt": False}
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(plan.choose(full=20, quick=5)):
        for name, server in turns(list(sides.items()), number):
            await asker.stream(server, "/completion", text, on_piece=lambda count: count < _LEAVE_PIECES)
            seen["text", name].append(1e3 * await _until_idle(observed.engine))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await asker.stream(server, "/completion", prompt)
            seen["prompt", name].append(1e3 * await _until_idle(observed.engine))

    def side(what: str, name: str) -> Side:
        return Side(name=name, sample=Sample.of(seen[what, name]), unit="ms")

    return tuple(
        plain_row(
            f"engine free after a client left, in the middle of a {what}, {name}", side(what, name), target
        )
        for what, target in (("text", at_most(200.0)), ("prompt", None))
        for name in sides
    )


async def _until_idle(engine: Server) -> float:
    started = time.perf_counter()
    headers = {"Authorization": f"Bearer {engine.key}"}
    async with asyncio.timeout(_IDLE_S), aiohttp.ClientSession(headers=headers) as session:
        while True:
            async with session.get(engine.url + "/slots") as reply:
                busy = [slot for slot in await reply.json() if slot["is_processing"]]
            if not busy:
                return time.perf_counter() - started
            await asyncio.sleep(_POLL_S)


async def _lists(nodes: dict[str, Server], plan: Plan) -> dict[str, list[float]]:
    """Requests for each second of a node's CPU time."""
    seen: dict[str, list[float]] = defaultdict(list)
    connector = aiohttp.TCPConnector(limit=LIST_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(url: str, count: int) -> None:
            for _ in range(count):
                async with session.get(url) as reply:
                    await reply.read()
                    if reply.status != 200:
                        raise MeshError(f"/v1/models was answered with {reply.status}")

        each = LIST_REQUESTS // LIST_CONNECTIONS
        for number in range(plan.choose(full=8, quick=3)):
            for name, node in turns(list(nodes.items()), number):
                process = psutil.Process(node.pid)
                before = sum(process.cpu_times()[:2])
                await asyncio.gather(*(ask(node.url + "/v1/models", each) for _ in range(LIST_CONNECTIONS)))
                seen[name].append(LIST_REQUESTS / (sum(process.cpu_times()[:2]) - before))
    return seen
