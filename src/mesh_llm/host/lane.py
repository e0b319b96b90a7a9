"""One engine of a plan, over links of its own to the workers that the plan has leased."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from mesh_llm.defaults import PLAN_READY_S
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState, EngineSupervisor
from mesh_llm.engine.telemetry import Gauge
from mesh_llm.errors import EngineFailed
from mesh_llm.peers.data_links import Link
from mesh_llm.tasks import cancelled

PLAN_CHECK_S = 60.0
"""For the first request through all stages."""
EXPLAIN_S = 1.5
"""For an engine to say which worker it lost: it looks once a second."""


def first_request(spec: EngineSpec) -> tuple[str, dict[str, Any]]:
    """Path and body: the smallest that goes through all layers. An encoder makes no token."""
    if spec.rerank:
        return "/rerank", {"query": "1", "documents": ["1"]}
    if spec.embeddings:
        return "/embedding", {"content": "1"}
    return "/completion", {"prompt": "1", "n_predict": 1, "cache_prompt": False}


class Lane:
    """Lives in a task of its own, from its first link to the engine's end."""

    def __init__(
        self,
        number: int,
        *,
        open_links: Callable[[AsyncExitStack], Awaitable[list[Link]]],
        specify: Callable[[Sequence[Link]], tuple[EngineSpec, Path]],
        on_report: Callable[[Lane, EngineReport], None],
    ) -> None:
        self.number = number
        self.supervisor: EngineSupervisor | None = None
        self.gauge = Gauge()
        self.is_ready = False
        """One request has gone through all stages."""
        self.served = False
        """It was ready once."""
        self.ready_at = 0.0
        """When, by the monotonic clock."""
        self.ends = False
        """It takes no more requests."""
        self.port: int | None = None
        """Also after its end, for the sentence why."""
        self.task: asyncio.Task[None] | None = None
        self._open_links = open_links
        self._specify = specify
        self._on_report = on_report
        self._loaded = asyncio.Event()
        self._lost_link = asyncio.Event()

    @property
    def report(self) -> EngineReport:
        return self.supervisor.report if self.supervisor is not None else EngineReport()

    @property
    def url(self) -> str:
        """Also after its end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> tuple[str, str]:
        """URL and key."""
        assert self.supervisor is not None
        return self.url, self.supervisor.spec.key

    async def live(self, on_ready: Callable[[Lane], None]) -> None:
        """Ends only by failing, or by being cancelled."""
        async with AsyncExitStack() as stack:
            links = await self._open_links(stack)
            spec, log_file = self._specify(links)
            supervisor = self.supervisor = EngineSupervisor(spec, log_file, self._on_engine)
            running = asyncio.create_task(supervisor.run(), name=f"engine of lane {self.number}")
            loaded = asyncio.create_task(self._loaded.wait(), name="engine loaded")
            try:
                await asyncio.wait(
                    (running, loaded), timeout=PLAN_READY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if running.done():
                    running.result()
                if not loaded.done():
                    raise EngineFailed(f"the engine was not ready within {PLAN_READY_S:.0f} s")
                # The child has copies of its own. With ours open, workers would not notice that it died.
                for link in links:
                    link.socket.close()
                if links:
                    await self._check(running)
                if running.done():
                    running.result()
                if supervisor.report.state is not EngineState.READY:
                    raise EngineFailed(supervisor.report.reason)
                self.is_ready = self.served = True
                on_ready(self)
                await running
            finally:
                self.is_ready = False
                await cancelled(loaded)
                await cancelled(running)

    def _on_engine(self, report: EngineReport) -> None:
        if report.state is EngineState.READY:
            self.port = report.port
            self._loaded.set()
        if report.failed_links:
            self._lost_link.set()
        self._on_report(self, report)

    async def _check(self, running: asyncio.Task[None]) -> None:
        """One request through every stage, before anybody is told to send requests here."""
        try:
            await self._compute()
        except EngineFailed:
            # Whoever is to blame shows in the report, or by the engine's end.
            told = asyncio.create_task(self._lost_link.wait(), name="link lost")
            await asyncio.wait((running, told), timeout=EXPLAIN_S, return_when=asyncio.FIRST_COMPLETED)
            await cancelled(told)
            if running.done():
                running.result()
            raise

    async def _compute(self) -> None:
        url, key = self.address
        assert self.supervisor is not None
        path, body = first_request(self.supervisor.spec)
        timeout = aiohttp.ClientTimeout(total=PLAN_CHECK_S)
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(url + path, json=body) as answer,
            ):
                if answer.status != 200:
                    raise EngineFailed(f"the split engine fails: {(await answer.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"the split engine does not answer: {error!r}") from error
