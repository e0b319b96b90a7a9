"""Two models at hand with memory for one of them: how long a request for the other one waits."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

import aiohttp

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, plain_row
from bench.stats import at_most
from mesh_llm.bench.client import Client, client, story
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.servers import Server
from mesh_llm.engine.process import run
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample
from tests.support import tiny_gguf

TITLE = "Switching between two models at hand"

NAMES = ("one", "two")
_OPTIONS = ("--threads", "2", "--parallel", "1", "--ctx-size", "1024", "--no-draft")
_PLAIN = ("--parallel", "1", "--ctx-size", "1024")
_IDLE_S = 5
"""A model stays for so long after it was loaded, and goes by itself when nobody has asked for so long."""
_STAYED_S = _IDLE_S + 0.5
_RESTS_S = 1.5
"""Since the last answer: a model that has just answered counts as busy for a second."""
_COMMAND_S = 60.0
_NODE, _ENGINE = "node", "engine alone"
_prompts = count()


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    rounds = plan.rounds(full=12, quick=5, full_s=300.0, quick_s=120.0)
    seen: dict[str, list[float]] = {_NODE: [], _ENGINE: []}
    async with AsyncExitStack() as stack, client() as asker:
        folder = stack.enter_context(servers.fresh_home())
        models = await asyncio.to_thread(_twins, folder)
        spec = await _spec(stack.enter_context(servers.fresh_home()), models[0])
        node = await stack.enter_async_context(_node(folder, models))
        await _switch(asker, node, NAMES[0])
        for number in rounds:
            for side in turns([_NODE, _ENGINE], number):
                first_s = _engine(asker, spec) if side == _ENGINE else _next(asker, node, len(seen[_NODE]))
                seen[side].append(await first_s)
    return _rows(seen, rounds)


def _rows(seen: dict[str, list[float]], rounds: Rounds) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    node, engine = (Side(name=name, sample=Sample.of(seen[name]), unit="s") for name in (_NODE, _ENGINE))
    return (
        plain_row("request to first token", node, None, theirs=engine),
        added_row("above the engine's own start", (node, engine), at_most(0.5), digits=3),
    ), (
        rounds.note(),
        "two files with the default model's weights under other names, read from the page cache; the mesh's "
        "default is a third, tiny one",
        "a switch: the model that was used last is ended, the other one loaded, and a prompt of a few "
        "words read",
        "the engine alone: from starting its process, told all that the node tells it, to its first token",
    )


def _twins(folder: Path) -> tuple[Path, Path]:
    """Two models that differ in nothing but their fingerprints."""
    source = default_model()
    paths = folder / f"{NAMES[0]}.gguf", folder / f"{NAMES[1]}.gguf"
    for number, path in enumerate(paths):
        shutil.copyfile(source, path)
        _rename(path, number)
    return paths


def _rename(path: Path, number: int) -> None:
    """The name in its metadata: another one of the same length."""
    with path.open("r+b") as file:
        key = b"general.name"
        head = file.read(1 << 20)
        # The key is followed by a type (four bytes) and a length (eight).
        file.seek(head.index(key) + len(key) + 12)
        file.write(b"%d" % number)


async def _spec(home: Path, model: Path) -> EngineSpec:
    """How a node has an engine run such a model."""
    async with servers.observed_node(home, "--model", str(model), *_OPTIONS) as observed:
        return observed.spec


@asynccontextmanager
async def _node(folder: Path, models: tuple[Path, Path]) -> AsyncIterator[Server]:
    """It has memory for one of the models beside a tiny one, which is always loaded."""
    tiny = tiny_gguf.write(folder / "tiny.gguf", "llama")
    home = folder / "home"
    need = [await _need_bytes(path) for path in (tiny, models[0])]
    most = (need[0] + 3 * need[1] // 2) // 10**6
    options = ("--model", str(tiny), "--max-memory", f"{most}MB", *_OPTIONS)
    async with servers.node(home, *options) as node:
        for path in models:
            await _mesh_llm(
                *("load", str(path), "--on-demand", "--idle", f"{_IDLE_S}s"), *_PLAIN, "--home", str(home)
            )
        yield node


async def _need_bytes(model: Path) -> int:
    told = await _mesh_llm("plan", "--model", str(model), *_PLAIN, "--json")
    return int(json.loads(told)["plan"]["need_bytes"])


async def _mesh_llm(*arguments: str) -> str:
    done = await run([str(servers.command()), *arguments], timeout_s=_COMMAND_S)
    if done.status != 0:
        raise MeshError(f"mesh-llm {arguments[0]}: {' / '.join(done.errors[-3:])}")
    return "".join(done.output)


async def _next(asker: Client, node: Server, switches: int) -> float:
    """Ask for the model that is not loaded, once the other one may go."""
    loaded, other = NAMES[switches % 2], NAMES[1 - switches % 2]
    # It may have gone while the engine alone was measured. Loaded anew, it stays for as long as before.
    await _switch(asker, node, loaded)
    await asyncio.sleep(_STAYED_S - _RESTS_S)
    await _switch(asker, node, loaded)
    await asyncio.sleep(_RESTS_S)
    states = await _states(node)
    if (states[loaded], states[other]) != ("loaded", "unloaded"):
        raise MeshError(f"{loaded} should be loaded, and {other} not: {states}")
    return await _switch(asker, node, other)


async def _switch(asker: Client, node: Server, name: str) -> float:
    return (await asker.stream(node, "/completion", {**_question(), "model": name})).first_s


async def _engine(asker: Client, spec: EngineSpec) -> float:
    async with servers.engine(spec) as engine:
        return engine.ready_s + (await asker.stream(engine, "/completion", _question())).first_s


def _question() -> dict[str, object]:
    return {**story(4), "prompt": f"{next(_prompts)}: once upon a time"}


async def _states(node: Server) -> dict[str, str]:
    async with aiohttp.ClientSession() as session, session.get(node.url + "/v1/models") as reply:
        return {each["id"]: each["status"]["value"] for each in (await reply.json())["data"]}
