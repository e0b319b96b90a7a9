"""A file on its way to this disk: written, hashed, and continued by the next run.

Bytes come in order, or as whole pieces in any order. Every byte of a finished
file has been hashed: as it arrived, or, where an earlier run left it in order,
as it lay on the disk.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mesh_llm.defaults import COPY_CHUNK_BYTES
from mesh_llm.errors import DownloadFailed

T = TypeVar("T")

_NO_SECOND_NAMES = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class PieceDamaged(Exception):
    """A piece was complete and its hash another one; it has been thrown away."""


class PartFile:
    """The methods block."""

    def __init__(
        self, path: Path, *, size_bytes: int | None = None, piece_bytes: int = 0, hashes: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.size_bytes = size_bytes
        """None: nobody has said."""
        self.piece_bytes = piece_bytes
        """0: the whole file is one piece."""
        self.hashes = hashes
        """Of the pieces; none where they are compared elsewhere."""
        self.offset = 0
        """Bytes that are there in order; those before the current piece are checked."""
        self._digest = hashlib.sha256()

    @property
    def missing_bytes(self) -> int:
        return 0 if self.size_bytes is None else self.size_bytes - self.offset

    @property
    def piece_start(self) -> int:
        return self.offset - self.offset % self.piece_bytes if self.piece_bytes else 0

    @property
    def piece_end(self) -> int:
        size_bytes = sys.maxsize if self.size_bytes is None else self.size_bytes
        return min(self.piece_start + self.piece_bytes, size_bytes) if self.piece_bytes else size_bytes

    @property
    def sha256(self) -> str:
        """Of the current piece, as far as it is there."""
        return self._digest.hexdigest()

    # -- in order ----------------------------------------------------------------------------------

    def open(self) -> None:
        # Never write to a file that has another name, too: a run that was killed at its end leaves these.
        with suppress(FileNotFoundError):
            if self.path.stat().st_nlink > 1:
                self.path.unlink()
        self.path.touch(0o644)

    def take_up(self) -> bool:
        """Hash some more of what an earlier run has left, and go on behind it; False: that was all."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            chunk = file.read(min(COPY_CHUNK_BYTES, self.piece_end - self.offset))
        if chunk and self._is_good(chunk):
            return True
        self.cut(self.offset)
        return False

    def write(self, data: bytes) -> None:
        """The next bytes, no further than `piece_end`."""
        try:
            # A run that ends with the machine has lost a piece at most.
            self.put(self.offset, data, lasting=self.offset + len(data) == self.piece_end)
        except OSError:
            # A full disk takes a part of them: the next run would go on behind it.
            with suppress(OSError):
                os.truncate(self.path, self.offset)
            raise
        if not self._is_good(data):
            self.cut(self.offset)
            raise PieceDamaged

    def cut(self, size_bytes: int) -> None:
        """Go on from the start of a piece, or from where it was."""
        if self.path.stat().st_size != size_bytes:
            os.truncate(self.path, size_bytes)
        if size_bytes == self.piece_start:
            self._digest = hashlib.sha256()
        self.offset = size_bytes

    def _is_good(self, data: bytes) -> bool:
        """Count the next bytes; False where they end a piece that is not the right one, which goes."""
        start, end = self.piece_start, self.piece_end
        if self.offset == start:
            self._digest = hashlib.sha256()
        self._digest.update(data)
        self.offset += len(data)
        good = self.offset != end or not self.hashes or self.sha256 == self.hashes[start // self.piece_bytes]
        if not good:
            self.offset = start
        return good

    # -- in any order ------------------------------------------------------------------------------

    def reserve(self) -> None:
        """The full size, all of it a hole."""
        assert self.size_bytes is not None
        self.path.touch(0o644)
        os.truncate(self.path, self.size_bytes)

    def keep(self, start: int, data: bytes, sha256: str) -> None:
        """A whole piece, for good; compared before a byte of it is written."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise PieceDamaged
        self.put(start, data, lasting=True)

    def put(self, start: int, data: bytes, *, lasting: bool = False) -> None:
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Of a file or a folder: all of it is on the disk, for good."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_note(path: Path) -> Any:
    """What stands beside a part about its bytes; None where nothing readable does."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def write_note(path: Path, document: dict[str, Any]) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(document), "utf-8")
    scratch.replace(path)


def place(part: Path, target: Path) -> bool:
    """Give the file its name; False where that belongs to another file, which is never written over."""
    try:
        os.link(part, target)
    except FileExistsError:
        # A run that was killed half-way through has named it.
        return target.samefile(part)
    except OSError as error:
        if error.errno not in _NO_SECOND_NAMES:
            raise
        # Where a file has one name only, somebody else's file may slip in between.
        if target.exists():
            return False
        part.rename(target)
    return True


class Disk:
    """One thread for all work on a part; gone before the part's lock is, even when cancelled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="part file")

    def begin(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self.begin(work, *arguments)
        except OSError as error:
            raise disk_failure(self._folder, error) from error

    def close(self) -> None:
        # Each piece of work is a chunk to write or to hash: a moment.
        self._thread.shutdown(wait=True, cancel_futures=True)


def disk_failure(
    folder: Path, error: OSError, *, doing: str = "fetching a model", kept: str = ""
) -> DownloadFailed:
    elsewhere = "name another folder in MESH_LLM_MODELS"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadFailed(
            f"the disk filled up while {doing} to {folder}", hint=f"free some space, or {elsewhere}{kept}"
        )
    return DownloadFailed(f"cannot write to {folder}: {error.strerror or error}", hint=elsewhere)
