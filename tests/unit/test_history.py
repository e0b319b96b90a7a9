"""The last minutes, as a node tells them that does not host."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from mesh_llm.console.feed import Feed
from mesh_llm.node.history import History


async def test_pages_that_are_opened_at_once_do_not_double_the_last_point() -> None:
    asked: list[float] = []

    async def samples(since: float) -> list[Any]:
        asked.append(since)
        await asyncio.sleep(0)
        return [{"t": t, "tok_s": 7.0} for t in (10.0, 12.0, 14.0) if t > since]

    async def status() -> dict[str, Any]:
        return {}

    node: Any = SimpleNamespace(
        hosting=SimpleNamespace(serving=None),
        mesh=SimpleNamespace(serving=lambda: ("a" * 64, None)),
        remote=SimpleNamespace(samples=samples),
    )
    history = History(node, Feed(status), lambda: [])
    await asyncio.gather(history.catch_up(), history.catch_up(), history.catch_up())

    assert asked == [0.0, 0.0, 0.0]
    assert [sample["t"] for sample in history.since(0)] == [10.0, 12.0, 14.0]
