"""The servers that are measured. Each belongs to the block that started it and ends with it."""

from __future__ import annotations

import json
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.observed_node import MARK
from bench.revision import Tree
from mesh_llm.bench.servers import ENVIRONMENT, Server, engine_event, following, ready
from mesh_llm.engine.process import module
from mesh_llm.engine.spec import EngineSpec

_FOLDER = Path(__file__).parent


def command() -> Path:
    """The installed `mesh-llm`."""
    return Path(sysconfig.get_path("scripts")) / "mesh-llm"


def environment(tree: Tree | None) -> dict[str, str]:
    return ENVIRONMENT if tree is None else ENVIRONMENT | tree.environment


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
    async with ready(argv, engine_event, stdin=spec.to_line()) as (_, event, ready_s):
        url = f"http://127.0.0.1:{event['port']}"
        yield Server(url=url, key=spec.key, pid=event["pid"], ready_s=ready_s)


@asynccontextmanager
async def node(home: Path, *options: str, tree: Tree | None = None) -> AsyncIterator[Server]:
    """The `mesh-llm` command, with the default model; the installed one, or that of `tree`."""

    def parse(line: str) -> dict[str, Any] | None:
        head, found, url = line.partition("API ready at ")
        return {"url": url.replace("//localhost:", "//127.0.0.1:")} if found and not head else None

    program = [str(command())] if tree is None else tree.command()
    argv = following([*program, "--port", "0", "--home", str(home), *options])
    async with ready(argv, parse, env=environment(tree)) as (child, event, ready_s):
        yield Server(url=event["url"], key="", pid=child.pid, ready_s=ready_s)


@asynccontextmanager
async def observed_node(home: Path, *options: str, tree: Tree | None = None) -> AsyncIterator[ObservedServer]:
    def parse(line: str) -> dict[str, Any] | None:
        document: dict[str, Any] | None = json.loads(line[len(MARK) :]) if line.startswith(MARK) else None
        return document

    script = _FOLDER / "observed_node.py" if tree is None else tree.script("observed_node.py")
    argv = following([sys.executable, "-P", str(script), "--port", "0", "--home", str(home), *options])
    async with ready(argv, parse, env=environment(tree)) as (child, event, ready_s):
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
