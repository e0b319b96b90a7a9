"""The mesh's models, and where their files lie on this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from mesh_llm import file_stamp
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import MeshError, ModelError
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.models import catalog
from mesh_llm.models.catalog import key_of, stem_of
from mesh_llm.models.facts import model_facts
from mesh_llm.models.stores import LocalModel, Places, Store, blob_title, find_all
from mesh_llm.models.unsupported import check_runs
from mesh_llm.peer_fetch.layer_fetch import Held
from mesh_llm.types import Fingerprint, HeldModel, HeldPart, ModelFacts

log = logging.getLogger(__name__)


class ModelFiles:
    """Models that this node has for its mesh. Others on its disks are its owner's alone: never kept here."""

    def __init__(self, *, any_architecture: bool = False) -> None:
        """`any_architecture`: another engine than ours is going to run them."""
        self._any_architecture = any_architecture
        self._known: dict[Fingerprint, ModelFacts] = {}
        self._parts: dict[Fingerprint, tuple[ModelFacts, Held]] = {}
        """Models of which only some layers are here; whoever asks for files does not hear of them."""
        self._stamps: dict[Fingerprint, dict[str, str]] = {}
        """Of the files as they were read: a fingerprint is not believed of any other ones."""
        self._refused: dict[Path, str] = {}
        """Files that only look like a model, as they were when that was found."""
        self.drafts: dict[Fingerprint, Path | None] = {}
        """Where draft models that were looked for are; None where they are not here."""

    async def look(self, path: Path) -> ModelFacts:
        """What a file holds; raises where the engine could not run it."""
        document = await read_gguf(path)
        if not self._any_architecture:
            check_runs(document, path.name)
        return model_facts(document)

    async def read(self, path: Path) -> ModelFacts:
        """The same, and this node has it from now on."""
        facts, stamps = await self._look(path)
        self._keep(facts, stamps)
        return facts

    async def read_if(self, path: Path, fingerprint: Fingerprint) -> ModelFacts | None:
        """The same, of the model `fingerprint` alone: any other is forgotten again."""
        if self._refused.get(path) == file_stamp.stamp(path):
            return None
        facts, stamps = await self._look(path)
        if facts.fingerprint != fingerprint:
            return None
        self._keep(facts, stamps)
        return facts

    async def _look(self, path: Path) -> tuple[ModelFacts, dict[str, str]]:
        before = file_stamp.stamp(path)
        facts = await self.look(path)
        if file_stamp.stamp(path) != before:
            raise ModelError(f"{path} changed while it was read", hint="try again when it is complete")
        return facts, file_stamp.stamps(facts.files)

    def _keep(self, facts: ModelFacts, stamps: dict[str, str]) -> None:
        self._known[facts.fingerprint] = facts
        self._stamps[facts.fingerprint] = stamps
        self._parts.pop(facts.fingerprint, None)

    def keep_part(self, held: Held) -> ModelFacts:
        """This node has these layers from now on."""
        facts = model_facts(held.document)
        self._parts[facts.fingerprint] = (facts, held)
        return facts

    def part(self, fingerprint: Fingerprint) -> Held | None:
        _, held = self._parts.get(fingerprint, (None, None))
        return held

    def facts(self, fingerprint: Fingerprint) -> ModelFacts | None:
        """Of the whole model, also where only some layers of it are here."""
        facts, _ = self._parts.get(fingerprint, (None, None))
        return self._known.get(fingerprint) or facts

    def files(self, fingerprint: Fingerprint) -> Sequence[Path] | None:
        """As long as they are those that were read."""
        facts = self._known.get(fingerprint)
        return facts.files if facts is not None and self.changed(fingerprint) is None else None

    def stamps(self, fingerprint: Fingerprint) -> dict[str, str]:
        """Of the files as they were read."""
        return self._stamps.get(fingerprint, {})

    def changed(self, fingerprint: Fingerprint) -> str | None:
        """What has become of the model's files since they were read; None where they are as they were."""
        return file_stamp.changed(self.stamps(fingerprint))

    @property
    def known(self) -> Sequence[ModelFacts]:
        """Models that are here as a whole."""
        return tuple(self._known.values())

    def forget(self, fingerprint: Fingerprint) -> None:
        """Its files are others now."""
        self._known.pop(fingerprint, None)
        self._stamps.pop(fingerprint, None)

    def refuse(self, facts: ModelFacts) -> None:
        """They are not the model: a fingerprint takes samples. So they stay until they change."""
        self._refused |= {path: file_stamp.stamp(path) for path in facts.files}
        self.forget(facts.fingerprint)

    def held(self, fingerprint: Fingerprint) -> tuple[HeldModel, ...]:
        """The model as members are told of it, if all of it is here."""
        facts = self._known.get(fingerprint) if self.files(fingerprint) is not None else None
        return () if facts is None else (_held(facts),)

    def held_part(self, fingerprint: Fingerprint) -> HeldPart | None:
        """Likewise, if some layers of it are."""
        held = self.part(fingerprint)
        return HeldPart(fingerprint=fingerprint, spans=tuple(_spans(held.layers))) if held else None

    async def find(self, settings: ModelSettings) -> ModelFacts | None:
        """The mesh's model, if its files are in the models folder, or by its name in another store."""
        for path in await asyncio.to_thread(_candidates, settings):
            if settings.fingerprint in self._known:
                break
            try:
                await self.read_if(path, settings.fingerprint)
            except MeshError as error:
                log.info("not the mesh's model file=%s: %s", path, error.message)
        return self._known.get(settings.fingerprint)


def _held(facts: ModelFacts) -> HeldModel:
    return HeldModel(
        fingerprint=facts.fingerprint,
        name=file_stem(facts),
        size_bytes=facts.size_bytes,
        encodes=facts.encodes,
    )


def _spans(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Layers one behind the other: the first, and the last, not included."""
    for _, group in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        yield members[0], members[-1] + 1


def _candidates(settings: ModelSettings) -> list[Path]:
    """Files that may be it, the likeliest first. Programs beside ours have many: only those of its name."""
    entry = catalog.load().get(settings.model)
    likely = {settings.model, settings.alias, entry.stem if entry is not None else settings.model}
    keys = {key_of(name) for name in likely}

    def is_likely(model: LocalModel) -> bool:
        return any(key_of(name) in keys for name in (*model.names, model.title))

    whole = [model for model in find_all(Places.from_environment()) if not model.missing]
    possible = (model for model in whole if model.store is Store.MODELS or is_likely(model))
    return [model.path for model in sorted(possible, key=lambda model: not is_likely(model))]


def file_stem(facts: ModelFacts) -> str:
    """The name under which a model is served unless somebody says otherwise."""
    return _stem(facts.files[0])


@lru_cache(maxsize=64)
def _stem(path: Path) -> str:
    """Of a blob of Ollama's what it is called there."""
    return blob_title(path) or stem_of(path.name)
