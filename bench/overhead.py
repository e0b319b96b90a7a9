"""What gateway and node add to a stream: the engine's own port against the API port."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain

import psutil

from bench import revision, servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, added_share_row, plain_row, ratio_row
from bench.revision import Trees
from bench.servers import ObservedServer
from bench.stats import at_most
from mesh_llm.bench.client import Client, TimedStream, client, story
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import Server
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample, differences

TITLE = "What gateway and node add to a stream"

GATEWAY, ENGINE = "gateway", "engine"
TOKENS = 200
FEWER_TOKENS = 64
"""With two commits, and so twice as many to ask: more rounds say more than longer ones."""
_ONE_THREAD = ("--threads", "1")
"""With two commits: what is measured is the way to the engine, and busy threads would wait for each other."""
_PAUSE_S = 0.05
# Always the slot that holds this prompt already: the first token then costs one step, no prefill.
_BODY = {**story(TOKENS), "id_slot": 0}


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen: dict[str, list[TimedStream]] = defaultdict(list)
    with servers.fresh_home() as home:
        async with servers.observed_node(home) as observed, client() as asker:
            sides = {GATEWAY: observed.node, ENGINE: observed.engine}
            for server in sides.values():
                await asker.stream(server, "/completion", _BODY)
            gateway = psutil.Process(observed.node.pid)
            cpu_before = sum(gateway.cpu_times()[:2])
            rounds = plan.rounds(full=60, quick=16, full_s=240.0, quick_s=30.0)
            for number in rounds:
                for name, server in turns(list(sides.items()), number):
                    await asyncio.sleep(_PAUSE_S)
                    stream = await asker.stream(server, "/completion", _BODY)
                    _check(stream, seen)
                    seen[name].append(stream)
            cpu_s = sum(gateway.cpu_times()[:2]) - cpu_before
            light = await _light(asker, sides, plan.choose(full=200, quick=60))
    ours, theirs = (
        Side(name=name, sample=Sample.of(light[name]), unit="ms", digits=2) for name in (GATEWAY, ENGINE)
    )
    rows = (*_rows(seen), added_row("added to /tokenize, whole answer", (ours, theirs), None))
    return rows, (f"streams, {rounds.note()}", *_notes(seen, 1000 * cpu_s / rounds.done))


async def compare(plan: Plan, trees: Trees) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Nodes of two commits, and the engines behind them, asked the same by one client in turns."""
    await trees.then.build()
    body = _BODY | story(FEWER_TOKENS)
    seen: dict[str, dict[str, list[TimedStream]]] = {GATEWAY: defaultdict(list), ENGINE: defaultdict(list)}
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(client())
        nodes: dict[str, ObservedServer] = {}
        for tree in trees.both:
            home = stack.enter_context(servers.fresh_home())
            observed = await stack.enter_async_context(servers.observed_node(home, *_ONE_THREAD, tree=tree))
            nodes[tree.name] = observed
            for server in (observed.node, observed.engine):
                await asker.stream(server, "/completion", body)
        rounds = plan.rounds(full=60, quick=16, full_s=300.0, quick_s=45.0)
        for number in rounds:
            # Each side goes first as often as the other, and gateways as often as engines.
            for part in turns((GATEWAY, ENGINE), number // 2):
                for name, observed in turns(list(nodes.items()), number):
                    await asyncio.sleep(_PAUSE_S)
                    server = observed.node if part == GATEWAY else observed.engine
                    stream = await asker.stream(server, "/completion", body)
                    # Two commits may compute in other ways and differ; a gateway and its engine may not.
                    _check(stream, {part: streams[name] for part, streams in seen.items()}, FEWER_TOKENS)
                    seen[part][name].append(stream)
        gateways = {name: observed.node for name, observed in nodes.items()}
        light = await _light(asker, gateways, plan.choose(full=200, quick=60))
    rows = (*_rows_then(seen), ratio_row("/tokenize, whole answer", revision.sides(light, "ms"), None))
    return rows, (
        f"streams, {rounds.note()}",
        "each commit has a node and an engine of its own; one client asks all of them, one at a time, a new "
        "connection for each request; one thread in each engine; times are the client's",
        "what the gateway adds: its first token less that of its own engine in the same round",
    )


def _rows_then(seen: Mapping[str, Mapping[str, Sequence[TimedStream]]]) -> tuple[Row, ...]:
    def figures(part: str, figure_s: Callable[[TimedStream], float]) -> dict[str, list[float]]:
        return {name: [1e3 * figure_s(s) for s in streams] for name, streams in seen[part].items()}

    first, behind = (figures(part, lambda stream: stream.first_s) for part in (GATEWAY, ENGINE))
    added = {name: differences(first[name], behind[name]).values for name in first}
    firsts = revision.sides(first, "ms")
    return (
        ratio_row("first token", firsts, None),
        replace(
            added_row(
                "what the gateway adds to it, more than then", revision.sides(added, "ms"), at_most(1.0)
            ),
            scale=firsts[1].sample.median,
        ),
        ratio_row(
            f"a {FEWER_TOKENS}-token stream",
            revision.sides(figures(GATEWAY, lambda stream: stream.total_s), "ms", digits=0),
            None,
        ),
        ratio_row(
            "median gap between tokens",
            revision.sides(figures(GATEWAY, lambda stream: Sample.of(stream.gaps_s).median), "ms", digits=3),
            None,
        ),
    )


async def _light(asker: Client, sides: dict[str, Server], rounds: int) -> dict[str, list[float]]:
    """A request that computes next to nothing, in ms: what is added to it is the way alone."""
    seen: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name, server in turns(list(sides.items()), number):
            answer = await asker.ask(server, "/tokenize", {"content": "The sea"})
            seen[name].append(1e3 * answer.wall_s)
    return seen


def _check(stream: TimedStream, seen: dict[str, list[TimedStream]], tokens: int = TOKENS) -> None:
    if len(stream.arrived_s) < tokens // 2:
        raise MeshError(f"a stream of {tokens} tokens had {len(stream.arrived_s)} events")
    texts = {stream.text, *(known.text for streams in seen.values() for known in streams[:1])}
    if len(texts) != 1:
        raise MeshError("gateway and engine streamed different texts at temperature 0")


def _rows(seen: dict[str, list[TimedStream]]) -> tuple[Row, ...]:
    def sides(figure_s: Callable[[TimedStream], float], digits: int) -> tuple[Side, Side]:
        ours, theirs = (
            Side(
                name=name,
                sample=Sample.of([1e3 * figure_s(stream) for stream in seen[name]]),
                unit="ms",
                digits=digits,
            )
            for name in (GATEWAY, ENGINE)
        )
        return ours, theirs

    late = sides(_late_s, 2)
    return (
        added_row("added to the first token", sides(lambda stream: stream.first_s, 2), at_most(3.0)),
        added_share_row(
            f"added to a {TOKENS}-token stream", sides(lambda stream: stream.total_s, 0), at_most(2.0)
        ),
        added_row(
            "added to the median gap between tokens",
            sides(lambda stream: Sample.of(stream.gaps_s).median, 3),
            at_most(0.3),
            digits=3,
        ),
        plain_row("99th percentile of gaps", late[0], None, theirs=late[1]),
    )


def _late_s(stream: TimedStream) -> float:
    gaps = sorted(stream.gaps_s)
    return gaps[min(len(gaps) - 1, round(0.99 * len(gaps)))]


def _notes(seen: dict[str, list[TimedStream]], cpu_ms: float) -> tuple[str, ...]:
    events = sorted({len(stream.arrived_s) for stream in chain.from_iterable(seen.values())})
    together = {
        name: 100 * Sample.of([sum(gap < 5e-5 for gap in s.gaps_s) / len(s.gaps_s) for s in streams]).median
        for name, streams in seen.items()
    }
    return (
        "a new connection per request on both sides, its set-up included; times are the client's; the figure "
        "is the median of the rounds' differences, its spread is a share of the engine's median",
        f"events per stream: {', '.join(map(str, events))}; arriving together with the one before: "
        f"{together[GATEWAY]:.1f} % through the gateway, {together[ENGINE]:.1f} % directly",
        f"the node's own CPU time per stream: {cpu_ms:.0f} ms, {cpu_ms / TOKENS:.2f} ms per token",
    )
