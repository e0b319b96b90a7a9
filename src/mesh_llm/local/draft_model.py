"""The draft model: which one the mesh's creator chooses, and where its file lies on this machine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_SLOTS
from mesh_llm.engine.inspect import vocabularies_differ
from mesh_llm.errors import MeshError, ModelError
from mesh_llm.home import Home
from mesh_llm.local import model_names
from mesh_llm.local.model_files import ModelFiles, file_stem
from mesh_llm.mesh_settings import Draft, ModelSettings
from mesh_llm.models import catalog, draft_pairs, eagle3
from mesh_llm.models.names import Here
from mesh_llm.models.stores import LocalModel, Places, find_all
from mesh_llm.planning.fit import CONTEXT_STEP, CacheSettings, cache_bytes, compute_bytes
from mesh_llm.planning.speculation import kept_input_bytes
from mesh_llm.types import Event, EventSink, ModelFacts

log = logging.getLogger(__name__)

_INNER_DRAFTS = frozenset({"dflash", "gemma4-assistant"})
"""Architectures of drafts other than EAGLE3 that read the layers of their model."""


class DraftModels:
    def __init__(self, *, config: NodeConfig, model_files: ModelFiles, tell: EventSink) -> None:
        self._config = config
        self._home = Home(config.home)
        self._model_files = model_files
        self._tell = tell
        self._files = model_files.drafts

    def file(self, settings: ModelSettings) -> Path | None:
        return self._files.get(settings.draft.fingerprint) if settings.draft is not None else None

    async def check(self) -> None:
        """That --draft names a file here, before anything is started for it."""
        if self._config.draft is not None:
            await self._named(self._config.draft)

    async def choose(self, model: ModelFacts) -> Draft | None:
        """For a mesh of this model: the draft that was named, or the one paired with it, if it is here."""
        config = self._config
        if config.draft is not None:
            return await self._chosen(model, await self._named(config.draft))
        if config.no_draft or config.bin_dir is not None:
            return None
        found = await asyncio.to_thread(self._paired, model)
        if found is None:
            if config.draft_max is not None:
                text = f"--draft-max has no effect: {file_stem(model)} has no draft model here"
                self._tell(Event(kind="draft", text=text))
            return None
        try:
            draft = await self._chosen(model, found.path)
        except MeshError as error:
            self._tell(Event(kind="draft", text=f"The draft model {found.path} is not used: {error.message}"))
            return None
        self._tell(Event(kind="draft", text=f"Auto-detected draft model: {found.path}"))
        return draft

    async def find(self, settings: ModelSettings | None) -> bool:
        """Look for the file of the mesh's draft, once. Tells whether it was found by that."""
        draft = settings.draft if settings is not None else None
        if draft is None or draft.fingerprint in self._files:
            return False
        self._files[draft.fingerprint] = None
        key = catalog.key_of(draft.name)
        for found in await asyncio.to_thread(lambda: list(find_all(Places.from_environment()))):
            # The title as well: Ollama's files are called by it in the mesh.
            if key in map(catalog.key_of, (*found.names, found.title)) and not found.missing:
                try:
                    facts = await self._model_files.look(found.path)
                except MeshError as error:
                    log.info("not the mesh's draft file=%s: %s", found.path, error.message)
                    continue
                if facts.fingerprint == draft.fingerprint:
                    self._files[draft.fingerprint] = found.path
                    return True
        log.info("draft not here name=%s", draft.name)
        return False

    async def _named(self, text: str) -> Path:
        named = await model_names.resolve(text, self._home)
        if not isinstance(named, Here):
            raise ModelError(
                f"the draft model {text} is not on this machine",
                hint=f"mesh-llm download {text} downloads it",
            )
        return named.path

    def _paired(self, model: ModelFacts) -> LocalModel | None:
        found = list(find_all(Places.from_environment()))
        return draft_pairs.paired(model.files[0], catalog.load(*self._home.catalog_files), found)

    async def _chosen(self, model: ModelFacts, path: Path) -> Draft:
        facts = await self._model_files.look(path)
        if facts.architecture in _INNER_DRAFTS:
            raise ModelError(
                f"{file_stem(facts)} cannot draft: it reads the layers of its model, which is not supported",
                hint="choose a small model of the same family, or use --no-draft",
            )
        is_head = facts.architecture == eagle3.ARCHITECTURE
        reason = eagle3.mismatch(model, facts) if is_head else None
        reason = reason or await vocabularies_differ(model.files[0], facts.files[0])
        if reason and is_head:
            raise ModelError(
                f"{file_stem(facts)} cannot draft for {file_stem(model)}: {reason}",
                hint="choose the EAGLE3 head that was made for this model, or use --no-draft",
            )
        if reason:
            raise ModelError(
                f"{file_stem(facts)} cannot draft for {file_stem(model)}: {reason}",
                hint="choose a small model of the same family, or use --no-draft",
            )
        self._files[facts.fingerprint] = facts.files[0]
        slots = self._config.slots or DEFAULT_SLOTS
        one = CacheSettings(context=CONTEXT_STEP, slots=1)
        return Draft(
            name=file_stem(facts),
            fingerprint=facts.fingerprint,
            weight_bytes=facts.weight_bytes,
            cache_bytes=-(-cache_bytes(facts, one) // CONTEXT_STEP),
            compute_bytes=compute_bytes(facts, CacheSettings(context=facts.context_trained, slots=slots))
            + kept_input_bytes(facts, slots),
            layers=facts.read_layers if is_head else (),
        )
