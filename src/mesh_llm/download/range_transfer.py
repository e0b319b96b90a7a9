"""One file's bytes from a server, by ranges: cut off, it goes on where it was, for as long as that helps."""

from __future__ import annotations

import time
from collections.abc import Callable

import aiohttp

from mesh_llm.download.http import (
    Locate,
    Passing,
    Patience,
    RemoteFile,
    content_range,
    get,
    host_of,
    passing_status,
    stall_s,
)
from mesh_llm.download.versioned_part import VersionedPart
from mesh_llm.errors import DownloadFailed

DOWNLOAD_LEAST_BYTES_S = 1 << 10
"""Over the same time, in a second: slower, even a small model would take days."""
DOWNLOAD_GAIN_BYTES = 1 << 20
"""After so many the tries begin anew: a line that breaks every minute gets there, one byte each time not."""
DOWNLOAD_RANGE_BYTES = 16 << 30
"""Asked for at once: the hub's storage does not give out more than 50 GB in one answer."""
DOWNLOAD_TURNS = 3
"""A file may change on the server while it is fetched, but not for ever."""


class _Pace:
    """Notices a server that keeps a connection alive with a byte now and then."""

    def __init__(self, offset: int) -> None:
        self._window_s = stall_s()
        self._since_s, self._offset = time.monotonic(), offset

    def is_lost(self, offset: int) -> bool:
        now = time.monotonic()
        if now - self._since_s < self._window_s:
            return False
        came = offset - self._offset
        self._since_s, self._offset = now, offset
        return came < DOWNLOAD_LEAST_BYTES_S * self._window_s


class Transfer:
    """Brings all bytes of one file; what it has brought stays with `file`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        name: str,
        file: VersionedPart,
        locate: Locate,
        *,
        told: Callable[[], None],
    ) -> None:
        self._session = session
        self._name = name
        self._file = file
        self._locate = locate
        self._told = told
        self._complete = False
        self._turns = 0

    async def run(self, remote: RemoteFile) -> RemoteFile:
        """Until the file is whole; what was said of it last. Raises DownloadFailed where that cannot be."""
        patience, where = Patience(self._name), remote
        self._complete = self._file.size_bytes is not None and not self._file.missing_bytes
        while not self._complete:
            before = self._file.offset
            try:
                await self._receive(where)
            except Passing as failure:
                await self._file.settle()
                if self._file.offset - before >= DOWNLOAD_GAIN_BYTES:
                    patience.gained()
                where = await self._again(patience, failure)
        return where

    async def _again(self, patience: Patience, failure: Passing) -> RemoteFile:
        """Where the file is by now: addresses of storage are good for minutes, and files change."""
        while True:
            await patience.after(failure)
            try:
                remote = await self._locate()
            except Passing as error:
                failure = error
                continue
            if not await self._file.follow(remote):
                self._count_turn()
            return remote

    async def _receive(self, remote: RemoteFile) -> None:
        async with get(self._session, remote.url, self._headers(remote)) as answer:
            await self._begin(remote, answer)
            before = self._file.offset
            until = self._file.size_bytes
            pace = _Pace(before)
            async for chunk in answer.content.iter_any():
                if until is not None and self._file.offset + len(chunk) > until:
                    raise self._odd(f"sends more than the {until} bytes that it has", remote)
                await self._file.write(chunk)
                self._told()
                if pace.is_lost(self._file.offset):
                    raise Passing(f"{host_of(remote.url)} sends almost nothing")
            await self._file.settle()
        if until is None:
            # A server that never said how much there is: the end of its answer is the end of the file.
            self._file.size_bytes = self._file.offset
        self._complete = not self._file.missing_bytes
        short = answer.content_length is None or self._file.offset == before
        if short and not self._complete:
            raise Passing(f"the connection to {host_of(remote.url)} was lost")

    def _headers(self, remote: RemoteFile) -> dict[str, str]:
        start, size_bytes = self._file.offset, self._file.size_bytes
        headers = dict(remote.headers)
        if size_bytes is not None and size_bytes > 0:
            end = min(start + DOWNLOAD_RANGE_BYTES, size_bytes)
            headers["Range"] = f"bytes={start}-{end - 1}"
        elif start:
            headers["Range"] = f"bytes={start}-"
        if start and remote.if_range is not None:
            headers["If-Range"] = remote.if_range
        return headers

    async def _begin(self, remote: RemoteFile, answer: aiohttp.ClientResponse) -> None:
        """Make sure that the answer's first byte is the file's next one."""
        status, host = answer.status, host_of(str(answer.url))
        if (passing := passing_status(status, host, answer.headers)) is not None:
            raise passing
        if status in (401, 403, 404, 410):
            # Its address was good when it was given: it has aged, and there will be another one.
            raise Passing(f"{host} no longer offers it ({status})")
        if status == 416:
            await self._file.restart(remote)
            self._count_turn()
            raise Passing(f"{host} has no such part of it (416)")
        if status == 206:
            self._check_range(remote, answer)
        elif status == 200:
            await self._begin_anew(remote, answer)
        else:
            raise self._odd(f"answers {status}", remote)

    def _check_range(self, remote: RemoteFile, answer: aiohttp.ClientResponse) -> None:
        found = content_range(answer)
        if found is None or found[0] != self._file.offset:
            raise self._odd("answers with another part than it was asked for", remote)
        if found[1] is not None and self._file.size_bytes not in (None, found[1]):
            raise self._wrong_size(found[1], remote)

    async def _begin_anew(self, remote: RemoteFile, answer: aiohttp.ClientResponse) -> None:
        """It sends the whole file, whatever was asked for."""
        size_bytes = answer.content_length
        if self._file.offset:
            await self._file.restart(remote)
            self._count_turn()
        if size_bytes is not None and self._file.size_bytes not in (None, size_bytes):
            raise self._wrong_size(size_bytes, remote)

    def _count_turn(self) -> None:
        self._turns += 1
        if self._turns > DOWNLOAD_TURNS:
            raise DownloadFailed(
                f"{self._name} was restarted {DOWNLOAD_TURNS} times: it changes on its server, "
                "or the server cannot continue downloads",
                hint="try again later",
            )

    def _wrong_size(self, size_bytes: int, remote: RemoteFile) -> DownloadFailed:
        return self._odd(f"has {size_bytes} bytes of it; there should be {self._file.size_bytes}", remote)

    def _odd(self, what: str, remote: RemoteFile) -> DownloadFailed:
        return DownloadFailed(
            f"{self._name} cannot be downloaded: {host_of(remote.url)} {what}",
            hint="try again later, or another mirror (HF_ENDPOINT)",
        )
