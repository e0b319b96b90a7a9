"""The headers of a model that is not here, from the first megabytes of its files.

They are laid down as files with holes, of the right names and sizes: whoever reads model files reads them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path, PurePosixPath

import aiohttp

from mesh_llm.download import hub
from mesh_llm.download.http import (
    RemoteFile,
    answered,
    content_range,
    get,
    host_of,
    locate_url,
    open_session,
    passing_status,
)
from mesh_llm.errors import DownloadFailed
from mesh_llm.models.catalog import CatalogEntry, HubSource, UrlSource
from mesh_llm.models.header_length import NoHeader, header_length

HEADER_FIRST_BYTES = 1 << 20
"""Asked for first: all files of a model but one have no vocabulary, and little else."""
HEADER_RANGE_BYTES = 4 << 20
"""Asked for then: a vocabulary of 150,000 tokens takes 6 MB."""
HEADER_LIMIT_BYTES = 64 << 20
"""Of all files together; the largest vocabularies take a quarter of it."""


async def fetch_headers(entry: CatalogEntry, folder: Path) -> list[Path]:
    """The entry's files in `folder`, the first first, with nothing but their headers in them."""
    source = entry.source
    if not isinstance(source, HubSource | UrlSource):
        raise DownloadFailed(
            f"the header of {entry.name} cannot be read before it is downloaded",
            hint=f"mesh-llm download {entry.name}",
        )
    hub.check()
    trust, paths, left = await asyncio.to_thread(hub.trust), [], HEADER_LIMIT_BYTES
    async with open_session(trust) as session:
        for file in source.files:
            path, length = await _laid_down(session, source, file, folder, left)
            paths.append(path)
            left -= length
    return paths


async def _laid_down(
    session: aiohttp.ClientSession, source: HubSource | UrlSource, file: str, folder: Path, limit: int
) -> tuple[Path, int]:
    name = PurePosixPath(file).name

    async def locate() -> RemoteFile:
        if isinstance(source, HubSource):
            return await hub.locate(source, file)
        known = hub.source_of(source.url)
        return await (
            hub.locate(known, known.files[0]) if known is not None else locate_url(session, source.url)
        )

    async def read() -> tuple[bytes, int]:
        remote = await locate()
        return await _header(session, remote, name, limit), remote.size_bytes or 0

    header, size_bytes = await answered(name, read)
    path = folder / name
    with path.open("wb") as written:
        written.write(header)
        written.truncate(max(size_bytes, len(header)))
    return path, len(header)


async def _header(session: aiohttp.ClientSession, remote: RemoteFile, name: str, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit:
        before = len(data)
        await _read_on(session, remote, data, HEADER_RANGE_BYTES if data else HEADER_FIRST_BYTES)
        try:
            end = header_length(bytes(data))
        except NoHeader as error:
            raise DownloadFailed(
                f"{name} on {host_of(remote.url)} is not a GGUF file: {error}", hint="name another file"
            ) from error
        if end is not None:
            return bytes(data[:end])
        if len(data) == before:
            raise DownloadFailed(f"{name} on {host_of(remote.url)} ends within its header")
    raise DownloadFailed(
        f"the headers of {name} are longer than {HEADER_LIMIT_BYTES >> 20} MB",
        hint="download the model to have it looked at",
    )


async def _read_on(session: aiohttp.ClientSession, remote: RemoteFile, data: bytearray, count: int) -> None:
    """The next range, behind what is there; nothing where the file ends."""
    start, host = len(data), host_of(remote.url)
    wanted = f"bytes={start}-{start + count - 1}"
    async with get(session, remote.url, {**remote.headers, "Range": wanted}) as answer:
        if (passing := passing_status(answer.status, host, answer.headers)) is not None:
            raise passing
        if answer.status == 416:
            return
        if answer.status not in (200, 206):
            raise DownloadFailed(f"{host} answers {answer.status} to the request for a file's header")
        found = content_range(answer) if answer.status == 206 else (0, None)
        if found is None or found[0] != (start if answer.status == 206 else 0):
            raise DownloadFailed(f"{host} answers with another part than it was asked for")
        # Who sends the whole file is heard as far as it was asked.
        skipped = start if answer.status == 200 else 0
        async for chunk in answer.content.iter_any():
            data += chunk[skipped:]
            skipped = max(0, skipped - len(chunk))
            if len(data) >= start + count:
                del data[start + count :]
                return
