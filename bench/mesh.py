"""How long a mesh of three real nodes takes to come up and to heal, and what it says while idle."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench import revision, servers
from bench.plan import Plan
from bench.report import Row, Side, plain_row, ratio_row
from bench.revision import Trees
from bench.stats import at_most, below
from mesh_llm.bench.rounds import turns
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.lab.cluster import Cluster, ClusterSpec, cluster
from mesh_llm.results.samples import Sample

TITLE = "A mesh of three nodes: start, loss of a worker, idle"

_WAIT_S = 60.0
_POLL_S = 0.02
_IDLE_S = 20.0
_SETTLE_S = 3.0
_BODY = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8, "stream": True}


_ONE_ROUND = """
import asyncio, dataclasses, json, pathlib, sys
from bench import mesh
seen = mesh.Seen()
asyncio.run(mesh._round(pathlib.Path(sys.argv[1]), seen, idle=False))
print(json.dumps(dataclasses.asdict(seen)))
"""


@dataclass(slots=True, kw_only=True)
class Seen:
    """By round."""

    joined_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)
    healed_s: list[float] = field(default_factory=list)
    idle_bytes_s: list[float] = field(default_factory=list)
    """Per peer and second, both ways together."""


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    seen = Seen()
    rounds = plan.rounds(full=7, quick=2, full_s=400.0, quick_s=60.0)
    for number in rounds:
        with servers.fresh_home() as home:
            await _round(home, seen, idle=number < plan.choose(full=3, quick=1))
    return _rows(seen), (
        rounds.note(),
        "start: from the first process until the first token of an answer, all three nodes computing",
        "join: from handing the token to the other two nodes until all three serve together, weights on disk",
        "lost: a worker's node is killed (SIGKILL); noticed when the host's plan is no longer the old one "
        "or does not serve, healed when it serves again without the dead node; weights are resident",
        f"idle: bytes of QUIC between two nodes, over {_IDLE_S:g} s, both ways together",
    )


async def compare(plan: Plan, trees: Trees) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """A mesh of each commit, one after the other, by that commit's own bench."""
    await trees.then.build()
    seen: dict[str, list[dict[str, list[float]]]] = {tree.name: [] for tree in trees.both}
    rounds = plan.rounds(full=8, quick=2, full_s=420.0, quick_s=60.0)
    for number in rounds:
        for tree in turns(trees.both, number):
            with servers.fresh_home() as home:
                argv = [sys.executable, "-P", "-c", _ONE_ROUND, str(home)]
                done = await run(argv, timeout_s=4 * _WAIT_S, env=tree.environment, cwd=tree.root)
            if done.status != 0:
                raise MeshError(f"a mesh of {tree.name} did not come up: {' / '.join(done.errors[-3:])}")
            seen[tree.name].append(json.loads(done.output[-1]))

    def row(measure: str, field: str) -> Row:
        figures = {name: [each[field][0] for each in found] for name, found in seen.items()}
        return ratio_row(measure, revision.sides(figures, "s"), at_most(1.1))

    rows = (
        row("start to the first token", "first_token_s"),
        row("join to serving together", "joined_s"),
        row("killed worker noticed", "noticed_s"),
        row("noticed to serving again", "healed_s"),
    )
    return rows, (rounds.note(), "as this bench measures them by itself, without the idle mesh")


async def _round(home: Path, seen: Seen, *, idle: bool) -> None:
    began = time.monotonic()
    async with cluster(ClusterSpec(home=home), tell=_ignore, progress=_ignore) as mesh:
        joining = time.monotonic()
        document = await mesh.until_serving()
        seen.joined_s.append(time.monotonic() - joining)
        await _first_token(document["api"]["url"])
        seen.first_token_s.append(time.monotonic() - began)
        if idle:
            seen.idle_bytes_s += await _idle(mesh)
        await _lose_worker(mesh, document, seen)


async def _first_token(url: str) -> None:
    async with (
        asyncio.timeout(_WAIT_S),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=_BODY) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data:") and b"[DONE]" not in line and _content(line):
                return
    raise MeshError("the answer held no token")


def _content(line: bytes) -> str:
    choices = json.loads(line.removeprefix(b"data:")).get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


async def _idle(mesh: Cluster) -> list[float]:
    await asyncio.sleep(_SETTLE_S)
    before, began = await _bytes(mesh), time.monotonic()
    await asyncio.sleep(_IDLE_S)
    after, took_s = await _bytes(mesh), time.monotonic() - began
    return [(after[node] - before[node]) / took_s for node in before]


async def _bytes(mesh: Cluster) -> dict[str, int]:
    nodes = (await mesh.status())["mesh"]["nodes"]
    return {
        node["id"]: node["link"]["sent_bytes"] + node["link"]["received_bytes"]
        for node in nodes
        if node["link"]["kind"] != "self"
    }


async def _lose_worker(mesh: Cluster, before: dict[str, Any], seen: Seen) -> None:
    child = mesh.members[2].child
    assert child is not None
    epoch = before["plan"]["epoch"]
    killed = time.monotonic()
    child.signal_group(signal.SIGKILL)
    noticed: float | None = None
    async with asyncio.timeout(_WAIT_S):
        while True:
            document = await mesh.status()
            plan, state = document["plan"], document["node"]["state"]
            now = time.monotonic()
            if noticed is None and (state != "serving" or plan is None or plan["epoch"] != epoch):
                noticed = now
            if noticed is not None and state == "serving" and plan and (plan["epoch"] or 0) > epoch:
                break
            await asyncio.sleep(_POLL_S)
    seen.noticed_s.append(noticed - killed)
    seen.healed_s.append(now - noticed)


def _rows(seen: Seen) -> tuple[Row, ...]:
    return (
        plain_row("start to the first token", _side("mesh of 3", seen.first_token_s), at_most(15.0)),
        plain_row("join to serving together", _side("mesh of 3", seen.joined_s), at_most(6.0)),
        plain_row("killed worker noticed", _side("host", seen.noticed_s), at_most(3.0)),
        plain_row("noticed to serving again", _side("host", seen.healed_s), at_most(2.5)),
        plain_row(
            "idle, per peer",
            Side(name="connection", sample=Sample.of(seen.idle_bytes_s), unit="B/s", digits=0),
            below(2000.0),
        ),
    )


def _side(name: str, values: list[float]) -> Side:
    return Side(name=name, sample=Sample.of(values), unit="s", digits=2)


def _ignore(_: object) -> None:
    """What nodes tell is not measured."""
