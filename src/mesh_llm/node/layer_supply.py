"""The layers of a model that a worker computes with, without the rest of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from mesh_llm.config import NodeConfig
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import DownloadFailed, LinkRefused
from mesh_llm.home import models_folder
from mesh_llm.local.hardware import at_hand
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.models.layer_ranges import Share
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.peer_sources import PeerSources
from mesh_llm.peer_fetch import layer_fetch
from mesh_llm.peer_fetch.layer_fetch import Held
from mesh_llm.peer_fetch.model_fetch import Wanted
from mesh_llm.peers.mesh import Mesh
from mesh_llm.planning.manual_layers import has_first_layers
from mesh_llm.planning.memory_budget import usable_bytes
from mesh_llm.types import Event, EventSink, Fingerprint, HostingMode, ModelFacts, Progress, ProgressSink
from mesh_llm.worker.lending import Step, Terms, Weights

LAYERS_LEAST_BYTES = 128 << 20
"""Of a model that is fetched in part: a smaller one is here in seconds, and makes one more host."""


class LayerSupply:
    def __init__(
        self,
        *,
        config: NodeConfig,
        settings: Callable[[], ModelSettings | None],
        model_files: ModelFiles,
        offers: ModelOffers,
        mesh: Mesh,
        sources: PeerSources,
        check: Callable[[ModelFacts], None],
        tell: EventSink,
        doing: Callable[[str], None],
        progress: ProgressSink,
    ) -> None:
        """`check` raises where a file is not the mesh's."""
        self._config = config
        self._settings = settings
        self._model_files = model_files
        self._offers = offers
        self._mesh = mesh
        self._sources = sources
        self._check = check
        self._tell = tell
        self._doing = doing
        self._progress = progress
        self._growing = asyncio.Lock()
        self._steps: set[Step] = set()
        """Of leases that wait for layers of theirs, or of another device's before them."""

    async def alone(self, settings: ModelSettings) -> ModelFacts | None:
        """What a worker has to know of the model, its layers to follow; None where it takes all of it."""
        fingerprint = settings.fingerprint
        held = await layer_fetch.find(models_folder(), fingerprint, digest=settings.digest, read=read_gguf)
        await self._sources.known(fingerprint)
        size_bytes = self._sources.hosted_bytes(fingerprint) or (held.size_bytes if held is not None else 0)
        if size_bytes < LAYERS_LEAST_BYTES or not await self._only_works(settings, size_bytes):
            return None
        if held is None:
            self._doing(f"{settings.alias} is being looked up in the mesh")
            try:
                held = await self._fetch_layers(self._sources.wish(settings), None, self._progress)
            except DownloadFailed as error:
                self._tell(Event(kind="model", text=f"{error.message}; fetching all of {settings.alias}"))
                return None
        facts = self._model_files.keep_part(held)
        self._check(facts)
        return facts

    async def _only_works(self, settings: ModelSettings, size_bytes: int) -> bool:
        """Whether this node would be a worker, next to one who hosts."""
        if self._config.hosting is HostingMode.PREFER:
            return False
        if self._config.hosting is HostingMode.NEVER or settings.split or settings.tensor_split is not None:
            return True
        if settings.layers is not None:
            me = self._mesh.me
            return not has_first_layers(settings.layers, me, self._mesh.name_of(me))
        return size_bytes > usable_bytes(await at_hand(self._config))

    async def weights(self, terms: Terms, step: Step) -> Weights:
        """For a lease: the model's files, or its layers of them, fetched where they are not here."""
        fingerprint = terms.fingerprint
        adapters = self._offers.side_files.paths_of(terms.adapters)
        if len(adapters) < len(set(terms.adapters)):
            raise LinkRefused("this node does not have all LoRA adapters of the plan")
        if (files := self._model_files.files(fingerprint)) is not None:
            changed = partial(self._model_files.changed, fingerprint)
            return Weights(files=files, adapters=adapters, changed=changed)
        if (reason := self._model_files.changed(fingerprint)) is not None:
            raise LinkRefused(reason)
        part = self._model_files.part(fingerprint)
        if part is None:
            raise LinkRefused("this node does not have the model file")
        share = Share(first=terms.first, last=terms.last, head=terms.head)
        self._steps.add(step)
        try:
            # One after the other, where several devices are to get layers.
            async with self._growing:
                part = self._model_files.part(fingerprint) or part
                if not part.has(share):
                    part = await self._grow(share, fingerprint)
        finally:
            self._steps.discard(step)
        return Weights(files=part.paths, tensors=part.tensors, adapters=adapters)

    async def _grow(self, share: Share, fingerprint: Fingerprint) -> Held:
        if self._config.no_fetch:
            raise LinkRefused("it does not have all of these layers, and --no-fetch is set")

        def progress(made: Progress) -> None:
            self._progress(made)
            for step in self._steps:
                step(made.done, made.total)

        settings = self._settings()
        # A host may be behind: of a model that is no longer the mesh's there is no digest.
        own = settings is not None and settings.fingerprint == fingerprint
        wish = (
            self._sources.wish(settings)
            if settings and own
            else Wanted(fingerprint=fingerprint, name="the model")
        )
        held = await self._fetch_layers(wish, share, progress)
        self._model_files.keep_part(held)
        self._offers.tell()
        return held

    async def _fetch_layers(self, wish: Wanted, share: Share | None, progress: ProgressSink) -> Held:
        return await layer_fetch.fetch_layers(
            wish,
            share,
            models_folder(),
            sources=lambda: self._sources.of(wish.fingerprint),
            read=read_gguf,
            progress=progress,
            events=self._tell,
        )
