"""The engine of another node, as this one's gateway uses it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from mesh_llm.defaults import HISTORY_LIMIT_BYTES, REMOTE_ANSWER_S, REMOTE_RETRY_S
from mesh_llm.errors import MeshError
from mesh_llm.gateway.upstream import Turn, Upstream
from mesh_llm.node import hearsay
from mesh_llm.node.mesh import Mesh
from mesh_llm.node.passage import Passage
from mesh_llm.types import NodeId, State

log = logging.getLogger(__name__)


class Remote:
    """Follows whoever serves, and learns the key of its engine."""

    def __init__(self, mesh: Mesh, passage: Passage) -> None:
        self._mesh = mesh
        self._passage = passage
        self._wake = asyncio.Event()
        self._known: tuple[NodeId, int, str] | None = None

    def wake(self) -> None:
        known = self._known
        if known is not None and (self._target() is None or not self._is_present(known[0])):
            self._known = None
        self._wake.set()

    def _is_present(self, node: NodeId) -> bool:
        member = self._mesh.member(node)
        return member is not None and member.present

    async def run(self, on_change: Callable[[], None]) -> None:
        """Returns only by being cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REMOTE_RETRY_S if self._is_behind() else None):
                    await self._wake.wait()
            self._wake.clear()
            if self._is_behind() and await self._learn():
                on_change()

    def upstream(self) -> Upstream | None:
        """The serving engine on another node; None while there is none, or its key is not known.

        One that was replaced serves until the key of its successor is here: its host lets it.
        """
        if self._known is None or self._target() is None:
            return None
        host, epoch, key = self._known
        return Upstream(
            url=f"http://{host[:16]}:{epoch}",
            key=key,
            served_by=self._mesh.name_of(host),
            connect=partial(self._connect, host, epoch),
        )

    async def about(self) -> dict[str, Any] | None:
        """What the host says of plan, model and engine; None where it does not answer in time."""
        target = self._target()
        if target is None:
            return None
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(REMOTE_ANSWER_S):
                document = await self._ask(*target)
                # Another epoch than the one asked for is one that has just ended.
                return hearsay.about(document) if document.get("epoch") == target[1] else None
        return None

    async def samples(self, since: float) -> list[Any]:
        """The host's points after that time, by its own clock; none where it does not answer in time."""
        target = self._target()
        if target is None:
            return []
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(REMOTE_ANSWER_S):
                told = (await self._ask(*target, samples_since=since)).get("samples")
                return told if isinstance(told, list) else []
        return []

    def _target(self) -> tuple[NodeId, int] | None:
        published = self._mesh.serving()
        if published is None or published[0] == self._mesh.me:
            return None
        member = self._mesh.member(published[0])
        if member is None or member.facts.state is not State.SERVING:
            return None
        return published[0], published[1].epoch

    def _is_behind(self) -> bool:
        target = self._target()
        return target is not None and (self._known is None or self._known[:2] != target)

    async def _learn(self) -> bool:
        target = self._target()
        if target is None:
            return False
        try:
            async with asyncio.timeout(REMOTE_ANSWER_S):
                document = await self._ask(*target)
        except (MeshError, TimeoutError) as error:
            log.info("host does not answer node=%s: %r", target[0][:8], error)
            return False
        if document.get("epoch") != target[1] or not isinstance(document.get("key"), str):
            return False
        self._known = (*target, document["key"])
        return True

    async def _ask(self, host: NodeId, epoch: int, **more: Any) -> dict[str, Any]:
        stream = await self._mesh.open(host, "serving", {"epoch": epoch, **more})
        document = await stream.read_document(HISTORY_LIMIT_BYTES)
        await stream.finish()
        return document

    async def _connect(self, host: NodeId, epoch: int, turn: Turn | None = None) -> socket.socket:
        try:
            return await self._passage.http(host, epoch, turn)
        except MeshError as error:
            raise OSError(error.message) from error
