"""Members that have a model's file, and how it is read from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from mesh_llm.errors import MeshError
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peer_fetch.model_fetch import Source, Wanted
from mesh_llm.peers.mesh import Mesh
from mesh_llm.transport.network import Stream
from mesh_llm.types import Event, EventSink, Fingerprint, HostingMode, NodeId

KNOWN_S = 10.0
"""For one who has just come in to hear of a member that has the model: gossip takes a second or two."""


class PeerSources:
    def __init__(self, mesh: Mesh, tell: EventSink) -> None:
        self._mesh = mesh
        self._tell = tell
        self._wake = asyncio.Event()
        self._unverified: Fingerprint | None = None
        """Of the model that people were told is fetched without a digest: once is enough."""

    def wake(self) -> None:
        """What members have may have changed."""
        self._wake.set()

    def of(self, fingerprint: Fingerprint) -> Sequence[Source]:
        """The closest first, those behind another one last."""
        members = [
            member
            for member in self._mesh.alive()
            if member.id != self._mesh.me and any(m.fingerprint == fingerprint for m in member.facts.models)
        ]
        members.sort(key=lambda member: (not member.connected, member.rtt_s is None, member.rtt_s, member.id))
        # Names may be the same; what fails under one of them must not count for another node.
        return [
            Source(name=f"{member.facts.name} ({member.id[:8]})", open=self._opener(member.id))
            for member in members
        ]

    def hosted_bytes(self, fingerprint: Fingerprint) -> int:
        """The size of a model that another member could host; 0 where none can."""
        sizes = (
            held.size_bytes
            for member in self._mesh.alive()
            if member.id != self._mesh.me and member.facts.hosting is not HostingMode.NEVER
            for held in member.facts.models
            if held.fingerprint == fingerprint
        )
        return max(sizes, default=0)

    async def known(self, fingerprint: Fingerprint) -> None:
        """One who has just come in has yet to hear what the others have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                while not self.of(fingerprint):
                    self._wake.clear()
                    await self._wake.wait()

    def wish(self, settings: ModelSettings) -> Wanted:
        """The mesh's model, in the copy that its owner chose, as far as that is known."""
        if not settings.digest and self._unverified != settings.fingerprint:
            self._unverified = settings.fingerprint
            text = (
                f"{settings.alias} is fetched without verification: its owner has not published a digest yet"
            )
            self._tell(Event(kind="fetch", text=text))
        return Wanted(fingerprint=settings.fingerprint, name=settings.alias, digest=settings.digest)

    def _opener(self, node: NodeId) -> Any:
        @asynccontextmanager
        async def open_stream(request: dict[str, Any]) -> AsyncIterator[Stream]:
            try:
                stream = await self._mesh.open(node, "file", request)
            except MeshError as error:
                raise OSError(error.message) from error
            try:
                yield stream
            finally:
                stream.reset()

        return open_stream
