"""The servers that are measured. Each belongs to the block that started it and ends with it."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.observed_node import MARK
from bench.revision import Tree
from mesh_llm.engine.process import Child, module, spawn
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.errors import MeshError

READY_S = 120.0
"""For a small model from a cached file, on a machine that others use as well."""
ENVIRONMENT = {
    # As on a person's machine: modules are compiled once, not at each start.
    "PYTHONDONTWRITEBYTECODE": "",
    # Nothing that is measured here leaves this machine.
    "MESH_LLM_BIND_IP": "127.0.0.1",
    "MESH_LLM_NO_RELAY": "1",
}

_FOLDER = Path(__file__).parent


def command() -> Path:
    """The installed `mesh-llm`."""
    return Path(sysconfig.get_path("scripts")) / "mesh-llm"


def environment(tree: Tree | None) -> dict[str, str]:
    return ENVIRONMENT if tree is None else ENVIRONMENT | tree.environment


def following(argv: list[str]) -> list[str]:
    """`argv`, ended by the kernel if nobody else is left to do it."""
    return [sys.executable, "-P", str(_FOLDER / "lifeline.py"), *argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    key: str
    pid: int
    ready_s: float
    """From just before its start until it said that it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedServer:
    """A node, the engine behind it, and how that engine was told to run."""

    node: Server
    engine: Server
    told: dict[str, Any]
    """What it printed about them."""

    @property
    def spec(self) -> EngineSpec:
        # Read when asked for: another commit's may have other fields.
        return EngineSpec.from_line(json.dumps(self.told["spec"]))


@contextmanager
def fresh_home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as folder:
        yield Path(folder)


@asynccontextmanager
async def engine(spec: EngineSpec) -> AsyncIterator[Server]:
    """An engine child as the node starts it, with no node and no gateway."""
    spec = replace(spec, key=secrets.token_urlsafe(32))
    argv = following(module("mesh_llm.engine.children.serve"))
    async with _ready(argv, _engine_event, stdin=spec.to_line()) as (_, event, ready_s):
        url = f"http://127.0.0.1:{event['port']}"
        yield Server(url=url, key=spec.key, pid=event["pid"], ready_s=ready_s)


@asynccontextmanager
async def program(
    script: str, request: dict[str, Any], key: str, *, on_log: Callable[[str], None]
) -> AsyncIterator[Server]:
    """One of the bench's own programs that serve as the engine child does."""
    argv = following([sys.executable, "-P", str(_FOLDER / script)])
    stdin = json.dumps(request).encode() + b"\n"
    async with _ready(argv, _engine_event, stdin=stdin, on_log=on_log) as (_, event, ready_s):
        url = f"http://127.0.0.1:{event['port']}"
        yield Server(url=url, key=key, pid=event["pid"], ready_s=ready_s)


def _engine_event(line: str) -> dict[str, Any] | None:
    event: dict[str, Any] = json.loads(line)
    if event["event"] == "failed":
        raise MeshError(f"the engine failed: {event['cause']}")
    return event if event["event"] == "ready" else None


@asynccontextmanager
async def node(home: Path, *options: str, tree: Tree | None = None) -> AsyncIterator[Server]:
    """The `mesh-llm` command, with the default model; the installed one, or that of `tree`."""

    def parse(line: str) -> dict[str, Any] | None:
        head, found, url = line.partition("API ready at ")
        return {"url": url.replace("//localhost:", "//127.0.0.1:")} if found and not head else None

    program = [str(command())] if tree is None else tree.command()
    argv = following([*program, "--port", "0", "--home", str(home), *options])
    async with _ready(argv, parse, env=environment(tree)) as (child, event, ready_s):
        yield Server(url=event["url"], key="", pid=child.pid, ready_s=ready_s)


@asynccontextmanager
async def observed_node(home: Path, *options: str, tree: Tree | None = None) -> AsyncIterator[ObservedServer]:
    def parse(line: str) -> dict[str, Any] | None:
        document: dict[str, Any] | None = json.loads(line[len(MARK) :]) if line.startswith(MARK) else None
        return document

    script = _FOLDER / "observed_node.py" if tree is None else tree.script("observed_node.py")
    argv = following([sys.executable, "-P", str(script), "--port", "0", "--home", str(home), *options])
    async with _ready(argv, parse, env=environment(tree)) as (child, event, ready_s):
        yield ObservedServer(
            node=Server(url=event["url"], key="", pid=child.pid, ready_s=ready_s),
            engine=Server(
                url=event["engine_url"],
                key=event["engine_key"],
                pid=event["engine_pid"],
                ready_s=ready_s,
            ),
            told=event,
        )


@asynccontextmanager
async def _ready(
    argv: list[str],
    parse: Callable[[str], dict[str, Any] | None],
    *,
    stdin: bytes = b"",
    on_log: Callable[[str], None] = lambda _: None,
    env: dict[str, str] = ENVIRONMENT,
) -> AsyncIterator[tuple[Child, dict[str, Any], float]]:
    """Start `argv` and wait until `parse` finds in a line of its output that it serves."""
    ready: asyncio.Future[tuple[dict[str, Any], float]] = asyncio.get_running_loop().create_future()

    def on_line(line: str) -> None:
        if ready.done():
            return
        try:
            event = parse(line)
        except (MeshError, ValueError, KeyError) as error:
            ready.set_exception(
                error if isinstance(error, MeshError) else MeshError(f"not understood: {line}")
            )
            return
        if event is not None:
            ready.set_result((event, time.perf_counter() - started))

    started = time.perf_counter()
    async with spawn(argv, on_stdout=on_line, on_stderr=on_log, env=env) as child:
        if stdin:
            await child.send(stdin, close=False)
        gone = asyncio.create_task(child.wait(), name=f"end of {child.pid}")
        try:
            await asyncio.wait((ready, gone), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                state = f"ended with {gone.result()}" if gone.done() else f"was not ready in {READY_S:.0f} s"
                raise MeshError(f"{Path(argv[-1]).name} {state}: {' / '.join(list(child.recent)[-3:])}")
            event, ready_s = ready.result()
            yield child, event, ready_s
        finally:
            ready.cancel()
            gone.cancel()
