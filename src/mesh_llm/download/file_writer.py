"""A file on its way from a server to this disk: hashed and written in order by a thread of its own.

What is there survives the process, and belongs to one version of the file: a
note beside it says which. The next run goes on behind it, after hashing it again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mesh_llm.defaults import COPY_CHUNK_BYTES, FETCH_SPARE_BYTES
from mesh_llm.download.http import RemoteFile

DOWNLOAD_BATCH_BYTES = 1 << 20
"""Hashed and written at a time: fewer turns between threads than packets."""
DOWNLOAD_BATCHES = 4
"""Of a file that wait for the disk; beyond them the server waits, too, and memory stays flat."""


T = TypeVar("T")


class FileWriter:
    """Its methods are for one task at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.part"
        self.offset = 0
        """Bytes that have come; after `settle` all of them are on the disk."""
        self.size_bytes: int | None = None
        self._note = folder / f"{name}.json"
        self._digest = hashlib.sha256()
        self._descriptor: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="download")
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._writing: deque[asyncio.Future[None]] = deque()

    @property
    def missing_bytes(self) -> int:
        return 0 if self.size_bytes is None else self.size_bytes - self.offset

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    # -- which version -----------------------------------------------------------------------------

    async def open(self, remote: RemoteFile, told: Callable[[int], None]) -> None:
        """Take up what an earlier run left of this very version; `told` hears how much of it is hashed."""
        await self._run(self._open)
        if not await self._run(self._is_about, remote):
            await self.restart(remote)
        self.size_bytes = remote.size_bytes
        while await self._run(self._take_up):
            told(self.offset)
        if remote.size_bytes is not None and self.offset > remote.size_bytes:
            await self.restart(remote)

    async def follow(self, remote: RemoteFile) -> bool:
        """Go on with what the server says now; False where it is another version, and all begins anew."""
        same = await self._run(self._is_about, remote) or (
            # Nothing tells versions apart but their size: within one run that has to do.
            remote.identity is None and remote.size_bytes == self.size_bytes
        )
        if not same:
            await self.restart(remote)
        return same

    async def restart(self, remote: RemoteFile) -> None:
        await self.settle()
        await self._run(self._clear, remote)
        self.size_bytes = remote.size_bytes

    def _open(self) -> None:
        # Never write to a file that has another name, too: a run that was killed at its end leaves these.
        with suppress(FileNotFoundError):
            if self.path.stat().st_nlink > 1:
                self.path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o644)
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def _is_about(self, remote: RemoteFile) -> bool:
        if remote.identity is None:
            return False
        try:
            said = json.loads(self._note.read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return bool(said == _version(remote))

    def _clear(self, remote: RemoteFile) -> None:
        assert self._descriptor is not None
        # The note goes first: a part without one is begun anew.
        self._note.unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._digest = hashlib.sha256()
        self.offset = 0
        scratch = self._note.with_suffix(".new")
        scratch.write_text(json.dumps(_version(remote)), "utf-8")
        scratch.replace(self._note)

    def _take_up(self) -> bool:
        assert self._descriptor is not None
        chunk = os.read(self._descriptor, COPY_CHUNK_BYTES)
        self._digest.update(chunk)
        self.offset += len(chunk)
        return bool(chunk)

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
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._thread, self._put, self._batch)
            # Raised where it is waited for; one that nobody waits for any more is of no interest.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._writing.append(future)
            self._batch, self._batch_bytes = [], 0
        while len(self._writing) > waiting:
            await self._writing.popleft()

    def _put(self, batch: list[bytes]) -> None:
        assert self._descriptor is not None
        if self.size_bytes is None and shutil.disk_usage(self.path.parent).free < FETCH_SPARE_BYTES:
            # Of what never said how long it is, and may never end, nobody could ask before.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for chunk in batch:
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._descriptor, view) :]
            self._digest.update(chunk)

    # -- its end -----------------------------------------------------------------------------------

    async def finish(self) -> None:
        """All of it is there, for good."""
        await self.settle()
        await self._run(self._sync)

    def _sync(self) -> None:
        assert self._descriptor is not None
        os.fsync(self._descriptor)

    async def throw_away(self) -> None:
        await self.settle()
        await self._run(self._unlink)

    def _unlink(self) -> None:
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """Ends the thread: what it has begun is a moment's work, what waits is left undone."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _version(remote: RemoteFile) -> dict[str, Any]:
    return {"identity": remote.identity, "size_bytes": remote.size_bytes}
