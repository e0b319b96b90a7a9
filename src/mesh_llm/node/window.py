"""The node's console, opened where it was asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh_llm.console.chat import Api
from mesh_llm.console.server import Console
from mesh_llm.defaults import API_LISTEN
from mesh_llm.gateway import listen

if TYPE_CHECKING:
    from mesh_llm.node.node import Node


class Window:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._console = Console(node, api=self._api, api_key=node.config.api_key)

    @property
    def url(self) -> str | None:
        return self._console.url

    async def open(self) -> None:
        if (port := self._node.config.console) is not None:
            taken = await asyncio.to_thread(listen.bind, API_LISTEN, port, option="--console")
            await self._console.start(taken)
            self._node.herald.say("console", f"Console at {self.url}")

    async def close(self) -> None:
        await self._console.stop()

    def _api(self) -> Api | None:
        """The node's own; not before its port is open."""
        url = self._node.url
        return Api(url=url, key=self._node.config.api_key) if url is not None else None
