"""llama.cpp's own web page, which the engine carries: taken out once, and kept in the cache.

A package that was made by `tools/wheel.py` has it as well, for lite clients without an engine.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import tempfile
import zipfile
from pathlib import Path

from mesh_llm.defaults import ENGINE_PACKAGE
from mesh_llm.engine import prebuilt
from mesh_llm.engine.inspect import take_page
from mesh_llm.engine.library import EngineWheel, find_wheel
from mesh_llm.errors import EngineFailed, EngineMissing
from mesh_llm.home import cache_folder

PAGE_LIMIT_BYTES = 64 << 20
"""Of all files as they are packed; those of today have 3 MB."""
PACKAGED = "page.zip"

log = logging.getLogger(__name__)


async def page_files() -> dict[str, bytes]:
    """By name, each packed with gzip."""
    packaged = prebuilt.folder() / PACKAGED
    if packaged.is_file():
        return await asyncio.to_thread(_read, packaged)
    kept = _place(find_wheel())
    try:
        return await asyncio.to_thread(_read, kept)
    except FileNotFoundError:
        pass
    except EngineMissing as error:
        log.warning("web page taken out again path=%s cause=%s", kept, error)
    await take_out(kept)
    return await asyncio.to_thread(_read, kept)


async def take_out(target: Path) -> None:
    """Write the page of the installed engine to `target`, all of it or nothing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="incoming-") as scratch:
            await take_page(made := Path(scratch) / target.name)
            made.replace(target)
    except OSError as error:
        raise EngineFailed(f"the web page cannot be kept in {target.parent}: {error.strerror}") from error


def _place(wheel: EngineWheel) -> Path:
    """By version and digest, as the engine's package tells it: another build has another page."""
    files = importlib.metadata.files(ENGINE_PACKAGE) or ()
    digests = [file.hash.value for file in files if file.name == wheel.module.name and file.hash]
    return cache_folder() / "page" / f"{wheel.version}-{(digests or ['unknown'])[0][:16]}.zip"


def _read(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > PAGE_LIMIT_BYTES:
                raise EngineMissing(f"{path} is too large for a web page")
            return {name: archive.read(name) for name in archive.namelist()}
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, OSError) as error:
        raise EngineMissing(f"the web page in {path} cannot be read: {error}") from None
