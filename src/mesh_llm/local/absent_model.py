"""What is known of a model before it is downloaded: from the catalog, or from the headers of its files."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from mesh_llm.download import hub
from mesh_llm.download.remote_header import fetch_headers
from mesh_llm.engine.inspect import read_headers
from mesh_llm.errors import ModelError
from mesh_llm.frozen import frozen
from mesh_llm.home import cache_folder
from mesh_llm.models.catalog import CatalogEntry, HubName
from mesh_llm.models.catalog_facts import facts_of
from mesh_llm.models.facts import model_facts
from mesh_llm.models.header_cache import NO_FINGERPRINT
from mesh_llm.models.unsupported import check_runs
from mesh_llm.types import ModelFacts


@frozen
class AbsentModel:
    facts: ModelFacts
    """Without a fingerprint, which takes the whole file."""
    note: str
    """Where they come from."""


async def look_up(named: CatalogEntry | HubName) -> AbsentModel:
    """Nobody is asked where the catalog has the model's shape; else the hub is, for some megabytes."""
    entry = await hub.resolve(named) if isinstance(named, HubName) else named
    if (facts := facts_of(entry)) is not None:
        return AbsentModel(facts=facts, note=f"{entry.name} is not here: its sizes are the catalog's")
    folder = cache_folder()
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="header-", dir=folder) as scratch:
        paths = await fetch_headers(entry, Path(scratch))
        [document] = [each async for each in read_headers(paths[:1])]
    if isinstance(document, ModelError):
        raise document
    check_runs(document, paths[0].name)
    facts = model_facts({**document, "fingerprint": NO_FINGERPRINT})
    return AbsentModel(facts=facts, note=f"{entry.name} is not here: its header was read from {entry.source}")
