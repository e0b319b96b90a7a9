"""What a running node tells as it happens, for those who look on from outside."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from mesh_llm.cli.live import Live
from mesh_llm.defaults import CONTROL_TIMEOUT_S
from mesh_llm.home import Home
from mesh_llm.types import Progress

FEED_FRAME_BYTES = 8 << 20
"""One frame of a node's events; the first holds a hundred nodes and an hour of samples, some 100 KB."""


async def follow(home: Home, live: Live) -> None:
    """Pass on events and progress until the node ends, or where it has no such feed: the rest goes on."""
    timeout = aiohttp.ClientTimeout(total=None, connect=CONTROL_TIMEOUT_S)
    connector = aiohttp.UnixConnector(path=str(home.control_socket))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get("http://node/api/events") as answer,
        ):
            if answer.status == 200:
                async for kind, document in _frames(answer.content):
                    _pass_on(kind, document, live)
    except (aiohttp.ClientError, OSError, ValueError):
        return


async def _frames(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Any]]:
    """Server-sent events: a kind, and a document in one line."""
    pending = b""
    async for piece in content.iter_any():
        pending += piece
        *frames, pending = pending.split(b"\n\n")
        for frame in frames:
            fields = dict(line.split(b": ", 1) for line in frame.split(b"\n") if b": " in line)
            if b"data" in fields:
                yield fields.get(b"event", b"message").decode(), json.loads(fields[b"data"])
        if len(pending) > FEED_FRAME_BYTES:
            return


def _pass_on(kind: str, document: Any, live: Live) -> None:
    match kind:
        case "snapshot":
            for entry in document["events"]:
                live.happened(_line(entry))
            for entry in document["progress"]:
                live.progress(_step(entry))
        case "event":
            live.happened(_line(document))
        case "progress":
            live.progress(_step(document))


def _line(entry: dict[str, Any]) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(entry['t']))}  {entry['text']}"


def _step(entry: dict[str, Any]) -> Progress:
    return Progress(what=entry["what"], done=entry["done"], total=entry["total"], unit=entry["unit"])
