"""Every store in turn; what several of them hold is listed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mesh_llm.models.stores import files, hub, ollama
from mesh_llm.models.stores.local import Found, LocalModel, Skipped, Store
from mesh_llm.models.stores.places import Places
from mesh_llm.models.stores.reading import Reading

Identity = tuple[tuple[int, int], ...]
"""Device and inode of every file: the same for links, whatever they are called."""


def find_all(places: Places) -> list[LocalModel]:
    """Every model on this disk: by store, then by name. Reads folders and manifests, no header."""
    return list(search(places).models)


def search(places: Places) -> Found:
    """The same, with what was left out."""
    models: dict[Identity, LocalModel] = {}
    skipped: list[Skipped] = []
    for store in Store:
        reading = Reading(store)
        for model in sorted(_models(reading, places), key=lambda model: (model.name, model.path)):
            _add(models, model)
        skipped += reading.skipped
    return Found(models=tuple(models.values()), skipped=tuple(skipped))


def _models(reading: Reading, places: Places) -> Iterator[LocalModel]:
    match reading.store:
        case Store.MODELS:
            yield from files.in_folder(reading, places.models)
        case Store.HUB:
            yield from hub.in_cache(reading, places.hub)
        case Store.LMSTUDIO:
            for folder in places.lmstudio:
                yield from files.in_lmstudio(reading, folder)
        case Store.OLLAMA:
            for folder in places.ollama:
                yield from ollama.in_store(reading, folder)


def _add(models: dict[Identity, LocalModel], model: LocalModel) -> None:
    # A file that went away since is a model that is not there.
    with suppress(OSError):
        identity = tuple(_identities(model.files))
        known = models.setdefault(identity, model)
        if model.name not in known.names:
            models[identity] = replace(known, also=(*known.also, model.name))


def _identities(paths: Iterable[Path]) -> Iterator[tuple[int, int]]:
    for path in paths:
        about = path.stat()
        yield about.st_dev, about.st_ino
