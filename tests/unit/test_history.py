"""The last minutes, as a node tells them that does not host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from mesh_llm.console.event_feed import Feed
from mesh_llm.report.history import History

HOST = "a" * 64


async def status() -> dict[str, Any]:
    return {}


def times(feed: Feed) -> list[float]:
    """Of the points that a page begins with."""
    return [json.loads(sample)["t"] for sample in feed._samples]


def watching(samples: Callable[[float], Awaitable[list[Any]]]) -> tuple[Any, History]:
    """A node that does not host, and what it knows of the one that does."""
    node: Any = SimpleNamespace(
        hosting=SimpleNamespace(serving=None),
        mesh=SimpleNamespace(serving=lambda: (HOST, None)),
        remote_engine=SimpleNamespace(samples=samples),
    )
    return node, History(node, Feed(status), lambda: [])


async def test_pages_that_are_opened_at_once_do_not_double_the_last_point() -> None:
    asked: list[float] = []

    async def samples(since: float) -> list[Any]:
        asked.append(since)
        await asyncio.sleep(0)
        return [{"t": t, "tok_s": 7.0} for t in (10.0, 12.0, 14.0) if t > since]

    _, history = watching(samples)
    await asyncio.gather(history.catch_up(), history.catch_up(), history.catch_up())

    assert asked == [0.0, 0.0, 0.0]
    assert [sample["t"] for sample in history.since(0)] == [10.0, 12.0, 14.0]


async def test_the_host_knows_better_for_as_long_as_it_has_looked() -> None:
    """However many points this node has made of its own, while nobody served or another one did."""
    told = {HOST: (10.0, 12.0, 14.0), "b" * 64: (13.0, 15.0)}

    async def samples(since: float) -> list[Any]:
        host, _ = node.mesh.serving()
        return [{"t": t, "tok_s": 7.0} for t in told[host] if t > since]

    node, history = watching(samples)
    for t in (6.0, 8.0, 11.0, 13.0, 13.5):
        history._add({"t": t, "tok_s": 0.0})

    await history.catch_up()
    assert [(sample["t"], sample["tok_s"]) for sample in history.since(0)] == [
        *((6.0, 0.0), (8.0, 0.0)),
        *((10.0, 7.0), (12.0, 7.0), (14.0, 7.0)),
    ]
    node.mesh.serving = lambda: ("b" * 64, None)
    await history.catch_up()
    assert [sample["t"] for sample in history.since(0)] == [6.0, 8.0, 10.0, 12.0, 13.0, 15.0]


async def test_points_of_an_hour_ago_make_room_for_new_ones() -> None:
    """A node that was suspended, or that nobody watched, goes on after the gap."""

    async def samples(since: float) -> list[Any]:
        return [{"t": t, "tok_s": 7.0} for t in (3602.0, 3604.0) if t > since]

    _, history = watching(samples)
    for t in (0.0, 2.0, 3000.0, 3600.0):
        history._add({"t": t, "tok_s": 0.0})
    assert [sample["t"] for sample in history.since(-1)] == times(history._feed) == [3000.0, 3600.0]

    await history.catch_up()

    left = [sample["t"] for sample in history.since(-1)]
    assert left == times(history._feed) == [3600.0, 3602.0, 3604.0]


async def test_joined_points_are_of_the_last_minutes() -> None:
    async def samples(since: float) -> list[Any]:
        return [{"t": t, "tok_s": 7.0} for t in (1.0, 3602.0, 3604.0) if t > since]

    _, history = watching(samples)
    await history.catch_up()

    left = [sample["t"] for sample in history.since(-1)]
    assert left == times(history._feed) == [3602.0, 3604.0]
