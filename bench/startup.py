"""How long people wait: for the command line, for `status`, for a node to serve."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import aiohttp

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, plain_row
from bench.stats import below
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.servers import ENVIRONMENT
from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.home import Home
from mesh_llm.results.samples import Sample

TITLE = "Start-up and the command line"

_COMMAND_S = 30.0


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    commands = await _commands(plan.choose(full=20, quick=20))
    status = await _status(plan.choose(full=20, quick=10))
    rounds = plan.rounds(full=10, quick=3, full_s=120.0, quick_s=25.0)
    ready = await _ready(rounds)
    return (*commands, *status, *ready), (
        f"starts of the node, {rounds.note()}",
        "wall time of the whole process, Python's own start included; modules are compiled already",
        "`python -c pass` is what no Python program can be quicker than on this machine",
        "the node is ready when it prints the API's address: it has read the model, asked the engine for its "
        "devices and fitted memory before the engine starts; the engine alone is told all that",
    )


async def _commands(rounds: int) -> tuple[Row, ...]:
    """The bare interpreter takes its turn with the command, as the floor under it."""
    sides = {
        "--version": [str(servers.command()), "--version"],
        "--help": [str(servers.command()), "--help"],
        "python": [sys.executable, "-c", "pass"],
    }
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, rounds):
        for name, argv in turns(list(sides.items()), number):
            took_s = await _timed(argv)
            # The first round compiles modules and fills the page cache.
            if number >= 0:
                seen[name].append(took_s)
    floor = _side("python -c pass", seen["python"])
    return tuple(
        plain_row(f"mesh-llm {name}", _side(name, seen[name]), below(0.5), theirs=floor)
        for name in ("--version", "--help")
    )


async def _timed(argv: list[str]) -> float:
    started = time.perf_counter()
    finished = await run(argv, timeout_s=_COMMAND_S, env=ENVIRONMENT)
    took_s = time.perf_counter() - started
    if finished.status != 0:
        raise MeshError(f"{Path(argv[0]).name} {argv[-1]} ended with {finished.status}")
    return took_s


async def _status(rounds: int) -> tuple[Row, ...]:
    """The verb as a person types it, beside the bare request that it makes."""
    verb: list[float] = []
    bare: list[float] = []
    with servers.fresh_home() as home:
        argv = [str(servers.command()), "status", "--json", "--home", str(home)]
        async with servers.node(home):
            await _timed(argv)
            for _ in range(rounds):
                verb.append(await _timed(argv))
                bare.append(await _request(home))
    sides = _side("status", verb), _side("request alone", bare, digits=4)
    return (plain_row("mesh-llm status --json", sides[0], None, theirs=sides[1]),)


async def _request(home: Path) -> float:
    connector = aiohttp.UnixConnector(path=str(Home(home).control_socket))
    async with aiohttp.ClientSession(connector=connector) as session:
        started = time.perf_counter()
        async with session.get("http://node/api/status") as answer:
            await answer.read()
        return time.perf_counter() - started


async def _ready(rounds: Rounds) -> tuple[Row, ...]:
    with servers.fresh_home() as home:
        async with servers.observed_node(home) as observed:
            spec = observed.spec
    seen: dict[str, list[float]] = {"node": [], "engine": []}
    for number in rounds:
        for name in turns(list(seen), number):
            if name == "engine":
                async with servers.engine(spec) as server:
                    seen[name].append(server.ready_s)
            else:
                with servers.fresh_home() as home:
                    async with servers.node(home) as server:
                        seen[name].append(server.ready_s)
            await asyncio.sleep(0.1)
    sides = _side("node", seen["node"]), _side("engine alone", seen["engine"])
    return (
        plain_row("start until ready", sides[0], None, theirs=sides[1]),
        added_row("added to the engine's start", sides, None, digits=3),
    )


def _side(name: str, values: list[float], *, digits: int = 3) -> Side:
    return Side(name=name, sample=Sample.of(values), unit="s", digits=digits)
