"""An engine of a plan that does not pass its first token on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mesh_llm.engine.spec import EngineSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.errors import EngineFailed
from mesh_llm.host import lane as lanes
from mesh_llm.host.lane import Lane
from mesh_llm.peers.data_links import Link
from mesh_llm.types import LinkKind

LATE_S = 0.2
CAUSE = "MESH1: the other side closed the link"


class Spec:
    key = "key"
    embeddings = rerank = False


class Supervisor:
    """Of an engine that is ready, fails its first request, and says a moment later which worker it lost."""

    def __init__(self, port: int, on_change: Callable[[EngineReport], None]) -> None:
        self.spec, self._on_change = Spec(), on_change
        self.report = EngineReport(state=EngineState.READY, port=port)

    async def run(self) -> None:
        self._on_change(self.report)
        await asyncio.sleep(LATE_S)
        self.report = replace(self.report, failed_links={"MESH1": CAUSE})
        self._on_change(self.report)
        await asyncio.Event().wait()


async def test_a_worker_that_is_lost_at_the_first_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(request: web.Request) -> web.Response:
        return web.Response(status=500, text="it failed")

    async def open_links(stack: object) -> list[Link]:
        return [Link(socket=socket.socket(), kind=LinkKind.LOCAL)]

    app = web.Application()
    app.router.add_post("/completion", fails)
    async with TestServer(app) as server:
        assert server.port is not None
        monkeypatch.setattr(
            lanes, "EngineSupervisor", lambda spec, log, on_change: Supervisor(server.port or 0, on_change)
        )
        lane = Lane(
            1,
            open_links=open_links,
            specify=lambda links: (cast(EngineSpec, Spec()), Path("unused")),
            on_report=lambda lane, report: None,
        )
        with pytest.raises(EngineFailed, match="the split engine fails: it failed"):
            await lane.live(lambda lane: None)
    assert lane.report.failed_links == {"MESH1": CAUSE}


class ShortLived:
    """Of an engine that is ready, and has ended before anybody looks."""

    def __init__(self, on_change: Callable[[EngineReport], None]) -> None:
        self.spec, self._on_change = Spec(), on_change
        self.report = EngineReport()

    async def run(self) -> None:
        for changes in (
            {"state": EngineState.READY, "port": 1},
            {"state": EngineState.FAILED, "reason": "the engine ended: fire", "port": None},
        ):
            self.report = replace(self.report, **changes)
            self._on_change(self.report)
        await asyncio.Event().wait()


async def test_an_engine_that_ends_as_soon_as_it_is_ready_is_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_links(stack: object) -> list[Link]:
        return []

    monkeypatch.setattr(lanes, "EngineSupervisor", lambda spec, log, on_change: ShortLived(on_change))
    lane = Lane(
        1,
        open_links=open_links,
        specify=lambda links: (cast(EngineSpec, Spec()), Path("unused")),
        on_report=lambda lane, report: None,
    )
    ready: list[Lane] = []
    with pytest.raises(EngineFailed, match="the engine ended: fire"):
        async with asyncio.timeout(20):
            await lane.live(ready.append)
    assert not ready
    assert not lane.served
