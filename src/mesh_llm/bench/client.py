"""One client for every side: the same code, connection for connection, asks node and engine."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from mesh_llm.bench.servers import Server
from mesh_llm.errors import MeshError

ANSWER_S = 180.0
"""No single answer of a bench takes a tenth of it on a quiet machine."""


def story(tokens: int) -> dict[str, Any]:
    """A streamed answer of exactly so many tokens to a short prompt, the same each time."""
    return {
        "prompt": "Once upon a time, in a village between two rivers, there lived a clockmaker who",
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": True,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    document: dict[str, Any]
    wall_s: float

    @property
    def timings(self) -> dict[str, Any]:
        timings: dict[str, Any] = self.document["timings"]
        return timings


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStream:
    """When each event arrived, in seconds after the request was begun."""

    arrived_s: tuple[float, ...]
    """One per token; the closing event is not among them."""
    total_s: float
    text: str
    timings: dict[str, Any] = field(default_factory=dict)
    """The engine's own, where the stream came to its end."""

    @property
    def first_s(self) -> float:
        return self.arrived_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.arrived_s, self.arrived_s[1:], strict=False)]


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, server: Server, path: str, body: dict[str, Any]) -> TimedAnswer:
        started = time.perf_counter()
        async with self._session.post(server.url + path, json=body, headers=_headers(server)) as reply:
            raw = await reply.read()
            wall_s = time.perf_counter() - started
            if reply.status != 200:
                raise MeshError(
                    f"{path} was answered with {reply.status}: {raw[:300].decode(errors='replace')}"
                )
        return TimedAnswer(document=json.loads(raw), wall_s=wall_s)

    async def stream(
        self,
        server: Server,
        path: str,
        body: dict[str, Any],
        *,
        on_piece: Callable[[int], bool] = lambda _: True,
    ) -> TimedStream:
        """What arrives is only stamped and kept here; it is read once the clock has stopped.

        `on_piece` gets the number of pieces that have come; False leaves the rest.
        """
        pieces: list[tuple[float, bytes]] = []
        started = time.perf_counter()
        async with self._session.post(server.url + path, json=body, headers=_headers(server)) as reply:
            async for piece in reply.content.iter_any():
                pieces.append((time.perf_counter() - started, piece))
                if not on_piece(len(pieces)):
                    break
            total_s = time.perf_counter() - started
            if reply.status != 200:
                said = b"".join(piece for _, piece in pieces)[:300].decode(errors="replace")
                raise MeshError(f"{path} was answered with {reply.status}: {said}")
        return read_events(pieces, total_s)


def read_events(pieces: list[tuple[float, bytes]], total_s: float) -> TimedStream:
    """Server-sent events from timed pieces; an event arrives with its last byte."""
    pending = b""
    arrived_s, texts, timings = [], [], {}
    for at_s, piece in pieces:
        *events, pending = (pending + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            # An engine that is long about the next token says so in comments.
            if data == b"[DONE]" or event.startswith(b":"):
                continue
            document = json.loads(data)
            if document.get("stop"):
                timings = document.get("timings", {})
                continue
            arrived_s.append(at_s)
            texts.append(document["content"])
    return TimedStream(arrived_s=tuple(arrived_s), total_s=total_s, text="".join(texts), timings=timings)


def _headers(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.key}"} if server.key else {}


@asynccontextmanager
async def client(answer_s: float = ANSWER_S) -> AsyncIterator[Client]:
    # A connection per request on every side: the engine closes those on which it has streamed, and
    # a comparison in which only one side may keep its own would measure that instead.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=answer_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Client(session)
