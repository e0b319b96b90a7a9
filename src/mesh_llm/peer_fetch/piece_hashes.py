"""The hashes of model files' pieces: computed once, kept in the cache while a file stays as it is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_llm.defaults import COPY_CHUNK_BYTES, FETCH_PIECE_BYTES
from mesh_llm.errors import ModelError
from mesh_llm.peer_fetch.manifest import FilePieces

OFFER_BEAT_S = 5.0
"""Between two signs of life of a source that is still hashing."""


Beat = Callable[[int], Awaitable[None]]
"""Told how many bytes of a file are hashed, every now and then."""


class PieceHashes:
    """By path, size, time of the last change and inode; shared by all nodes that share the cache folder."""

    def __init__(self, folder: Path, *, piece_bytes: int = FETCH_PIECE_BYTES) -> None:
        self._folder = folder
        self.piece_bytes = piece_bytes
        self._hashing: dict[Path, asyncio.Lock] = {}
        self._done: dict[Path, int] = {}

    async def of(self, path: Path, *, busy: Callable[[], bool], beat: Beat) -> FilePieces:
        """The file's hashes; those who ask at the same time share the work."""
        lock = self._hashing.setdefault(path, asyncio.Lock())
        await self._acquire(lock, path, beat)
        try:
            return self.known(path) or await self._hash(path, busy, beat)
        finally:
            self._done.pop(path, None)
            lock.release()

    def known(self, path: Path) -> FilePieces | None:
        try:
            facts = path.stat()
            kept = json.loads(self._file(path).read_text())
            pieces = kept.pop("pieces")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        count = -(-facts.st_size // self.piece_bytes)
        if kept != self._key(path, facts) or not isinstance(pieces, list) or len(pieces) != count:
            return None
        return FilePieces(size_bytes=facts.st_size, pieces=tuple(map(str, pieces)))

    def remember(self, path: Path, pieces: Sequence[str], read: os.stat_result | None = None) -> None:
        """Kept if it can be: a full or read-only cache only costs the next one time.

        `read`: the file as it was when it was hashed.
        """
        target = self._file(path)
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps({**self._key(path, read or path.stat()), "pieces": list(pieces)}))
            scratch.replace(target)

    async def _acquire(self, lock: asyncio.Lock, path: Path, beat: Beat) -> None:
        while True:
            try:
                async with asyncio.timeout(OFFER_BEAT_S):
                    await lock.acquire()
                    return
            except TimeoutError:
                await beat(self._done.get(path, 0))

    async def _hash(self, path: Path, busy: Callable[[], bool], beat: Beat) -> FilePieces:
        clock = asyncio.get_running_loop().time
        before = path.stat()
        pieces: list[str] = []
        told_at = clock()
        for start in range(0, before.st_size, self.piece_bytes):
            began = clock()
            size = min(self.piece_bytes, before.st_size - start)
            pieces.append((await asyncio.to_thread(hash_range, path, start, size)).hexdigest())
            self._done[path] = start + size
            if busy():
                # Half of a core and of the disk, while answers need them.
                await asyncio.sleep(clock() - began)
            if clock() - told_at >= OFFER_BEAT_S:
                told_at = clock()
                await beat(self._done[path])
        if self._key(path, path.stat()) != self._key(path, before):
            raise ModelError(f"{path} changed while it was read", hint="try again when it is complete")
        await asyncio.to_thread(self.remember, path, pieces, before)
        return FilePieces(size_bytes=before.st_size, pieces=tuple(pieces))

    def _file(self, path: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"

    def _key(self, path: Path, facts: os.stat_result) -> dict[str, Any]:
        return {
            "path": str(path),
            "size": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            # Tools that copy a file's time give another one of the same size the same look.
            "inode": facts.st_ino,
            "piece_bytes": self.piece_bytes,
        }


def hash_range(path: Path, start: int, size: int) -> hashlib._Hash:
    """SHA-256 over a range of a file, or over what there is of it; blocks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size > 0 and (chunk := file.read(min(COPY_CHUNK_BYTES, size))):
            digest.update(chunk)
            size -= len(chunk)
    return digest
