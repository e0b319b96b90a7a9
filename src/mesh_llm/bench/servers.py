"""Servers that are measured. Each belongs to the block that started it and ends with it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_llm.engine.process import Child, module, spawn
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


def following(argv: list[str]) -> list[str]:
    """`argv`, ended by the kernel if nobody else is left to do it."""
    return [sys.executable, "-P", str(Path(__file__).with_name("lifeline.py")), *argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    key: str
    pid: int
    ready_s: float
    """From just before its start until it said that it serves."""


@asynccontextmanager
async def program(
    name: str, request: dict[str, Any], key: str, *, on_log: Callable[[str], None]
) -> AsyncIterator[Server]:
    """One of our own modules that serves as the engine child does."""
    argv = following(module(name))
    stdin = json.dumps(request).encode() + b"\n"
    async with ready(argv, engine_event, stdin=stdin, on_log=on_log) as (_, event, ready_s):
        url = f"http://127.0.0.1:{event['port']}"
        yield Server(url=url, key=key, pid=event["pid"], ready_s=ready_s)


def engine_event(line: str) -> dict[str, Any] | None:
    event: dict[str, Any] = json.loads(line)
    if event["event"] == "failed":
        raise MeshError(f"the engine failed: {event['cause']}")
    return event if event["event"] == "ready" else None


@asynccontextmanager
async def ready(
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
