"""A model that runs twice: streams at once, second turns of conversations, the loss of a host, planning."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, plain_row, ratio_row
from bench.stats import at_least, at_most
from mesh_llm.bench.client import Client, client, story
from mesh_llm.bench.servers import Server
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.planning.decide import decide
from mesh_llm.planning.other_models import without
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.results.samples import Sample
from mesh_llm.types import Plan as ModelPlan
from tests.support import planning

TITLE = "A model that runs twice: streams, conversations, a lost host, planning"

STREAMS = 8
_TOKENS = 32
_TALKS = 4
_OPTIONS = ("--threads", "1", "--parallel", str(STREAMS), "--ctx-size", "1024", "--no-draft")
_WAIT_S = 90.0
_POLL_S = 0.1
_NODES, _MODELS = 50, 6
_KILLED_AT = 24
"""Of the pieces of an answer, about a token each."""
_words = count()


@dataclass(slots=True, kw_only=True)
class _Seen:
    engines_tok_s: list[float] = field(default_factory=list)
    replicas_tok_s: list[float] = field(default_factory=list)
    once_tokens: list[float] = field(default_factory=list)
    twice_tokens: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    """From noticing the loss until the other engine was asked."""
    read_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    """Two nodes that may host, and a lite client."""

    home: Path
    nodes: dict[str, Server]
    """By name."""
    client: Server
    log: Path
    """The lite client's."""

    @property
    def doors(self) -> list[Server]:
        return [*self.nodes.values(), self.client]

    async def run_times(self, times: int) -> None:
        await _mesh_llm("load", "smollm2", "--replicas", str(times), "--home", str(self.home))
        async with asyncio.timeout(_WAIT_S):
            while True:
                status = json.loads(await _mesh_llm("status", "--home", str(self.home), "--json"))
                if len(status["models"][0]["replicas"]) == times:
                    # The others hear of it within a few round trips.
                    await asyncio.sleep(2)
                    return
                await asyncio.sleep(_POLL_S)


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen = _Seen()
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(client())
        mesh, engines = await _sides(stack)
        rounds = plan.rounds(full=7, quick=2, full_s=600.0, quick_s=150.0)
        await mesh.run_times(1)
        seen.once_tokens = [await _second_turns(asker, mesh.doors) for _ in range(plan.choose(5, 2))]
        await mesh.run_times(2)
        seen.twice_tokens = [await _second_turns(asker, mesh.doors) for _ in seen.once_tokens]
        for _ in rounds:
            seen.engines_tok_s.append(await _streams(asker, engines))
            seen.replicas_tok_s.append(await _streams(asker, [mesh.client]))
        print(seen, file=sys.stderr, flush=True)
        await _lose_host(asker, mesh, seen)
    return _rows(seen), (
        rounds.note(),
        f"{STREAMS} streams of {_TOKENS} tokens: through a lite client over two replicas, and half of them "
        "at each of two engines without nodes; one thread each",
        f"second turns: {_TALKS} conversations, each turn through a node or a lite client drawn by lot; "
        "tokens of prompts that engines read for them",
        "a host is killed (SIGKILL) in the middle of an answer that came from it: noticing takes "
        "some 2.6 s of silence, and the other engine reads the prompt and what was said",
        f"planning: {_MODELS} models one after the other over {_NODES} nodes, CPU time, the best of ten",
    )


async def _sides(stack: AsyncExitStack) -> tuple[_Mesh, list[Server]]:
    homes = [stack.enter_context(servers.fresh_home()) for _ in range(4)]
    observed = await stack.enter_async_context(servers.observed_node(homes[3], *_OPTIONS))
    engines = [await stack.enter_async_context(servers.engine(observed.spec)) for _ in range(2)]
    first = await stack.enter_async_context(servers.node(homes[0], "--name", "one", *_OPTIONS))

    async def joined(home: Path, name: str, role: str, *options: str) -> Server:
        invite = json.loads(await _mesh_llm("invite", "--role", role, "--home", str(homes[0]), "--json"))
        joins = ("--join", str(invite["token"]), "--name", name, *options)
        return await stack.enter_async_context(servers.node(home, *joins))

    second = await joined(homes[1], "two", "node", "--threads", "1")
    lite = await joined(homes[2], "lite", "client", "--client")
    log = homes[2] / "logs" / "node.log"
    return _Mesh(home=homes[0], nodes={"one": first, "two": second}, client=lite, log=log), engines


async def _mesh_llm(*arguments: str) -> str:
    done = await run([servers.command(), *arguments], timeout_s=_WAIT_S)
    if done.status != 0:
        raise MeshError(f"mesh-llm {arguments[0]}: {' / '.join(done.errors[-3:])}")
    return "".join(done.output)


async def _streams(asker: Client, doors: Sequence[Server]) -> float:
    """Tokens per second of all of them together; no two have a prompt in common."""
    bodies = [{**story(_TOKENS), "prompt": f"{next(_words)}: once upon a time"} for _ in range(STREAMS)]
    began = time.perf_counter()
    asked = (
        asker.stream(doors[number % len(doors)], "/completion", body) for number, body in enumerate(bodies)
    )
    await asyncio.gather(*asked)
    return STREAMS * _TOKENS / (time.perf_counter() - began)


async def _second_turns(asker: Client, doors: Sequence[Server]) -> float:
    """Tokens of prompts that engines read for the second turns of conversations."""
    dice = random.Random(7)
    talks = [
        [_said("user", f"{next(_words)} " + "tell me of the sea and of ships. " * 8)] for _ in range(_TALKS)
    ]

    async def turn(talk: list[dict[str, str]]) -> float:
        body = {"messages": talk, "max_tokens": 12, "temperature": 0, "cache_prompt": True}
        answer = (await asker.ask(dice.choice(doors), "/v1/chat/completions", body)).document
        talk += [
            _said("assistant", answer["choices"][0]["message"]["content"]),
            _said("user", "Go on, please."),
        ]
        return float(answer["timings"]["prompt_n"])

    await asyncio.gather(*map(turn, talks))
    return sum(await asyncio.gather(*map(turn, talks)))


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


async def _lose_host(asker: Client, mesh: _Mesh, seen: _Seen) -> None:
    def prompt() -> str:
        return f"{next(_words)} " + "There was a clockmaker who lived between two rivers. " * 14

    asked = {**story(2 * _KILLED_AT), "prompt": prompt()}
    # It goes again to who has read it.
    victim = mesh.nodes[await _served_by(mesh.client, {**asked, "n_predict": 1})]

    def on_piece(number: int) -> bool:
        if number == _KILLED_AT:
            os.kill(victim.pid, signal.SIGKILL)
        return True

    stream = await asker.stream(mesh.client, "/completion", asked, on_piece=on_piece)
    seen.lost_s.append(max(stream.gaps_s))
    log = mesh.log.read_text("utf-8")
    seen.asked_s.append(_logged_s(log, "request resumed elsewhere") - _logged_s(log, "peer lost"))
    other = await asker.stream(mesh.client, "/completion", {**story(4), "prompt": prompt()})
    seen.read_s.append(other.first_s)
    print(
        f"a host was killed: {seen.lost_s[-1]:.2f} s, of it reading {seen.read_s[-1]:.2f} s", file=sys.stderr
    )


def _logged_s(log: str, words: str) -> float:
    """When they were logged last."""
    line = next(line for line in reversed(log.splitlines()) if words in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


async def _served_by(server: Server, body: dict[str, Any]) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + "/completion", json=body) as reply,
    ):
        await reply.read()
        return reply.headers["x-mesh-llm-served-by"]


def plan_all(mesh: Snapshot, models: int = _MODELS) -> list[ModelPlan]:
    """Models one after the other, each with what those before it leave."""
    plans: list[ModelPlan] = []
    for number in range(models):
        left = without(mesh, plans, before=plans)
        facts = planning.model(layers=30 - 2 * number)
        plans.append(decide(left, facts, planning.settings(), current=None))
    return plans


def crowd(nodes: int = _NODES) -> Snapshot:
    """Machines of different sizes and speeds."""
    each = (planning.node(f"n{number:02}", 14 + number % 5, gb_s=20 + number % 7) for number in range(nodes))
    return Snapshot(nodes=tuple(each))


def _planning_ms() -> float:
    mesh, found = crowd(), []
    for _ in range(10):
        began = time.process_time()
        plan_all(mesh)
        found.append(1e3 * (time.process_time() - began))
    return min(found)


def _rows(seen: _Seen) -> tuple[Row, ...]:
    def side(name: str, values: Sequence[float], unit: str) -> Side:
        return Side(name=name, sample=Sample.of(values), unit=unit)

    streams = (
        side("two replicas", seen.replicas_tok_s, "tok/s"),
        side("two engines", seen.engines_tok_s, "tok/s"),
    )
    turns = side("two replicas", seen.twice_tokens, "tokens"), side("one", seen.once_tokens, "tokens")
    return (
        ratio_row(f"{STREAMS} streams at once", streams, at_least(0.9)),
        ratio_row("prompt tokens of second turns", turns, at_most(1.05)),
        plain_row(
            "host killed: from noticing it to asking the other",
            side("gateway", seen.asked_s, "s"),
            at_most(0.5),
        ),
        plain_row("host killed: longest pause", side("in all", seen.lost_s, "s"), None),
        plain_row("host killed: reading such a prompt", side("the other", seen.read_s, "s"), None),
        plain_row(
            f"planning {_MODELS} models over {_NODES} nodes",
            side("decide", [_planning_ms()], "ms"),
            at_most(50),
        ),
    )
