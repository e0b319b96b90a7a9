"""What a person means by a model's name on this machine: their own catalog, and every store on the disk."""

from __future__ import annotations

import asyncio
from functools import cache

from mesh_llm.home import Home
from mesh_llm.models import catalog, names
from mesh_llm.models.names import Named
from mesh_llm.models.stores import LocalModel, Places, find_all


async def resolve(text: str, home: Home) -> Named:
    """A file here, or what is to be downloaded; raises with a sentence where it is neither, or several."""

    @cache
    def find() -> tuple[LocalModel, ...]:
        return tuple(find_all(Places.from_environment()))

    def ask() -> Named:
        return names.resolve(text, catalog=catalog.load(*home.catalog_files), find=find)

    return await asyncio.to_thread(ask)
