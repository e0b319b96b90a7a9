"""A file on its way from a server to this disk: in batches, and of one version of the file.

A note beside the part says which version its bytes belong to. The next run goes
on behind them if the server still has that one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh_llm.defaults import FETCH_SPARE_BYTES
from mesh_llm.download.http import RemoteFile
from mesh_llm.models.part_file import Disk, PartFile, read_note, sync, write_note

DOWNLOAD_BATCH_BYTES = 1 << 20
"""Hashed and written at a time: fewer turns between threads than packets."""
DOWNLOAD_BATCHES = 4
"""Of a file that wait for the disk; beyond them the server waits, too, and memory stays flat."""


class VersionedPart:
    """Its methods are for one task at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.part"
        self.offset = 0
        """Bytes that have come; after `settle` all of them are on the disk."""
        self.size_bytes: int | None = None
        self._note = folder / f"{name}.json"
        self._part = PartFile(self.path)
        self._disk = Disk(folder)
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._writing: deque[asyncio.Future[None]] = deque()
        self._failure: OSError | None = None
        """Of a batch that could not be written: those behind it must not get its place in the file."""

    @property
    def missing_bytes(self) -> int:
        return 0 if self.size_bytes is None else self.size_bytes - self.offset

    @property
    def sha256(self) -> str:
        return self._part.sha256

    # -- which version -----------------------------------------------------------------------------

    async def open(self, remote: RemoteFile, told: Callable[[int], None]) -> None:
        """Take up what an earlier run left of this very version; `told` hears how much of it is hashed."""
        await self._disk.begin(self._part.open)
        if not await self._disk.begin(self._is_about, remote):
            await self.restart(remote)
        self.size_bytes = remote.size_bytes
        while await self._disk.begin(self._part.take_up):
            self.offset = self._part.offset
            told(self.offset)
        if remote.size_bytes is not None and self.offset > remote.size_bytes:
            await self.restart(remote)

    async def follow(self, remote: RemoteFile) -> bool:
        """Go on with what the server says now; False where it is another version, and all begins anew."""
        same = await self._disk.begin(self._is_about, remote) or (
            # Nothing tells versions apart but their size: within one run that has to do.
            remote.identity is None and remote.size_bytes == self.size_bytes
        )
        if not same:
            await self.restart(remote)
        return same

    async def restart(self, remote: RemoteFile) -> None:
        await self.settle()
        await self._disk.begin(self._clear, remote)
        self.offset, self.size_bytes = 0, remote.size_bytes

    def _is_about(self, remote: RemoteFile) -> bool:
        return remote.identity is not None and bool(read_note(self._note) == _version(remote))

    def _clear(self, remote: RemoteFile) -> None:
        # The note goes first: a part without one is begun anew.
        self._note.unlink(missing_ok=True)
        self._part.cut(0)
        write_note(self._note, _version(remote))

    # -- bytes -------------------------------------------------------------------------------------

    async def write(self, chunk: bytes) -> None:
        self._batch.append(chunk)
        self._batch_bytes += len(chunk)
        self.offset += len(chunk)
        if self._batch_bytes >= DOWNLOAD_BATCH_BYTES:
            await self._hand_over(DOWNLOAD_BATCHES)

    async def settle(self) -> None:
        """Wait until all that has come is written."""
        await self._hand_over(0)

    async def _hand_over(self, waiting: int) -> None:
        if self._batch:
            future = self._disk.begin(self._put, self._batch)
            # Raised where it is waited for; one that nobody waits for any more is of no interest.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._writing.append(future)
            self._batch, self._batch_bytes = [], 0
        while len(self._writing) > waiting:
            await self._writing.popleft()
        if self._failure is not None:
            raise self._failure

    def _put(self, batch: list[bytes]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._write(batch)
        except OSError as error:
            self._failure = error
            raise

    def _write(self, batch: list[bytes]) -> None:
        if self.size_bytes is None and shutil.disk_usage(self.path.parent).free < FETCH_SPARE_BYTES:
            # Of what never said how long it is, and may never end, nobody could ask before.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._part.write(b"".join(batch))

    # -- its end -----------------------------------------------------------------------------------

    async def finish(self) -> None:
        """All of it is there, for good."""
        await self.settle()
        await self._disk.begin(sync, self.path)

    async def throw_away(self) -> None:
        await self.settle()
        await self._disk.begin(self._unlink)

    def _unlink(self) -> None:
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the thread: what it has begun is a moment's work, what waits is left undone."""
        self._disk.close()


def _version(remote: RemoteFile) -> dict[str, Any]:
    return {"identity": remote.identity, "size_bytes": remote.size_bytes}
