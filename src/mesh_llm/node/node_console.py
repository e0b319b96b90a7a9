"""The console of a node: its page and port, the feed of what happens, the last minutes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mesh_llm.console.event_feed import Feed
from mesh_llm.console.routes import Managed
from mesh_llm.console.server import Console
from mesh_llm.defaults import API_LISTEN, CONSOLE_BEAT_S
from mesh_llm.gateway import ports
from mesh_llm.node.announcements import Announcements
from mesh_llm.report.history import History
from mesh_llm.report.view import NodeView
from mesh_llm.tasks import task_group

log = logging.getLogger(__name__)


class NodeConsole:
    def __init__(
        self, view: NodeView, feed: Feed, history: History, managed: Managed, announcements: Announcements
    ) -> None:
        self._view = view
        self._feed = feed
        self._history = history
        self._announcements = announcements
        self._console = Console(managed, feed, api_key=view.config.api_key)

    @property
    def url(self) -> str | None:
        return self._console.url

    async def run(self) -> None:
        """Returns only by being cancelled."""
        async with task_group() as group:
            group.create_task(_lasting(self._feed.run), name="feed")
            group.create_task(_lasting(self._history.run), name="history")

    async def open(self) -> None:
        """The port, where it was asked for."""
        if (port := self._view.config.console) is not None:
            taken = await asyncio.to_thread(ports.bind, API_LISTEN, port, option="--console")
            await self._console.start(taken)
            self._announcements.say("console", f"Console at {self.url}")

    async def close(self) -> None:
        self._feed.ended.set()
        await self._console.stop()


async def _lasting(run: Callable[[], Awaitable[None]]) -> None:
    """Begun again where it fails: the picture is worth no node, and one mistake no picture."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("the console's picture failed")
        await asyncio.sleep(CONSOLE_BEAT_S)
