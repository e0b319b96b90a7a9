"""How long an answer pauses when a node of its mesh is killed in the middle of it."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, plain_row
from bench.stats import at_most
from mesh_llm.cli.control import call
from mesh_llm.errors import MeshError
from mesh_llm.home import Home
from mesh_llm.lab.cluster import Cluster, ClusterSpec, cluster
from mesh_llm.results.samples import Sample

TITLE = "An answer whose mesh loses a node"

_WAIT_S = 240.0
_KILL_AT = 20
_TOKENS = 80
_LONG_TOKENS = 6000
_SHORT: dict[str, Any] = {"prompt": "Once upon a time, in a village between two rivers,"}
_LONG: dict[str, Any] = {"prompt": [1000 + number % 7919 for number in range(_LONG_TOKENS)]}
"""Token ids: exactly so many."""


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    worker_s: list[float] = []
    host_s: list[float] = []
    long_s: list[float] = []
    rounds = plan.rounds(full=12, quick=3, full_s=400.0, quick_s=90.0)
    for _ in rounds:
        worker_s.append(await _round(_SHORT, asks=0, dies=2))
        host_s.append(await _round(_SHORT, asks=1, dies=0))
    long_s.append(await _round(_LONG, asks=0, dies=2))
    rows = (
        plain_row("pause, a worker is killed", _side(worker_s), None),
        plain_row("the same, 95th percentile", _side([_percentile(worker_s, 0.95)]), at_most(4.0)),
        plain_row("pause, the host is killed", _side(host_s), None),
        plain_row("the same, 95th percentile", _side([_percentile(host_s, 0.95)]), None),
        plain_row(f"pause, a worker is killed, {_LONG_TOKENS:,} tokens of context", _side(long_s), None),
    )
    return rows, (
        rounds.note(),
        f"three nodes on this machine, the model split over all; one is killed (SIGKILL, with children) at "
        f"token {_KILL_AT} of {_TOKENS}; the pause is the longest gap between two tokens that the client saw",
        "the host is killed while the client is connected to another node; every answer has all its tokens",
        f"{_LONG_TOKENS:,} tokens have to be computed again by the nodes that are left",
    )


async def _round(asked: dict[str, Any], *, asks: int, dies: int) -> float:
    """The pause that a client of node `asks` saw when node `dies` died."""
    with servers.fresh_home() as home:
        spec = ClusterSpec(home=home)
        async with cluster(spec, tell=_ignore, progress=_ignore) as mesh:
            await mesh.until_serving()
            url = await _url(spec.homes()[asks])
            return await _pause(url, asked, lambda: _kill(mesh, dies))


async def _url(home: Home) -> str:
    """Of a node that serves, too."""
    async with asyncio.timeout(_WAIT_S):
        while True:
            document = await call(home, "GET", "/api/status")
            if document["node"]["state"] == "serving":
                return str(document["api"]["url"])
            await asyncio.sleep(0.05)


def _kill(mesh: Cluster, number: int) -> None:
    child = mesh.members[number].child
    assert child is not None
    child.signal_group(signal.SIGKILL)


async def _pause(url: str, asked: dict[str, Any], kill: Callable[[], None]) -> float:
    body = {**asked, "n_predict": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    timeout = aiohttp.ClientTimeout(total=_WAIT_S)
    tokens, longest_s, last_s = 0, 0.0, math.inf
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/completion", json=body) as answer,
    ):
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line.removeprefix(b"data: "))
            if "error" in data:
                raise MeshError(f"the answer ended: {data['error']['message']}")
            tokens += len(data.get("tokens", ()))
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            if tokens == _KILL_AT and not data.get("stop"):
                kill()
    if tokens != _TOKENS:
        raise MeshError(f"an answer of {_TOKENS} tokens had {tokens}")
    return longest_s


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def _side(values: list[float]) -> Side:
    return Side(name="client", sample=Sample.of(values), unit="s", digits=2)


def _ignore(_: object) -> None:
    """What nodes tell is not measured."""
