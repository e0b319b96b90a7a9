"""The node, as those who watch it see it: its feed, what is told there, and the console's port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mesh_llm.console.api_proxy import Api
from mesh_llm.console.event_feed import Feed
from mesh_llm.console.server import Console
from mesh_llm.defaults import API_LISTEN, CONSOLE_BEAT_S
from mesh_llm.gateway import ports
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.management import Management
from mesh_llm.peers.mesh import Mesh
from mesh_llm.report.events import News
from mesh_llm.report.history import History
from mesh_llm.tasks import task_group
from mesh_llm.types import EventSink, ProgressSink

if TYPE_CHECKING:
    from mesh_llm.node.node import Node


log = logging.getLogger(__name__)


class NodeConsole:
    def __init__(
        self,
        node: Node,
        tell: EventSink,
        progress: ProgressSink,
        *,
        first_tokens_s: Callable[[], list[float]],
    ) -> None:
        self._node = node
        self._news = News()
        self.feed = Feed(node.status, catch_up=self._catch_up)
        self.history = History(node, self.feed, first_tokens_s)
        self.announcements = Announcements(tell, progress, self.feed)
        self._console = Console(Management(node), self.feed, api=self._api, api_key=node.config.api_key)

    @property
    def url(self) -> str | None:
        return self._console.url

    async def run(self) -> None:
        """Returns only by being cancelled."""
        async with task_group() as group:
            group.create_task(_lasting(self.feed.run), name="feed")
            group.create_task(_lasting(self.history.run), name="history")

    async def open(self) -> None:
        """The port, where it was asked for."""
        if (port := self._node.config.console) is not None:
            taken = await asyncio.to_thread(ports.bind, API_LISTEN, port, option="--console")
            await self._console.start(taken)
            self.announcements.say("console", f"Console at {self.url}")

    async def close(self) -> None:
        self.feed.ended.set()
        await self._console.stop()

    def note_news(self, mesh: Mesh) -> None:
        for event in self._news.read(mesh):
            self.announcements.note(event)

    async def _catch_up(self) -> None:
        await self.history.catch_up()

    def _api(self) -> Api | None:
        """The node's own; not before its port is open."""
        url = self._node.url
        return Api(url=url, key=self._node.config.api_key) if url is not None else None


async def _lasting(run: Callable[[], Awaitable[None]]) -> None:
    """Begun again where it fails: the picture is worth no node, and one mistake no picture."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("the console's picture failed")
        await asyncio.sleep(CONSOLE_BEAT_S)
