"""A model on its way to this disk: what has arrived of each file, checked piece by piece.

Every byte of a finished file has been hashed: as it arrived, or, where an
earlier run left it, as it lay on the disk.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mesh_llm.errors import DownloadFailed
from mesh_llm.peer_fetch.manifest import FilePieces, Manifest
from mesh_llm.peer_fetch.piece_hashes import hash_range
from mesh_llm.types import Fingerprint

T = TypeVar("T")

_NAMES_TRIED = 100
_SIDECAR = "part.json"
_NO_SECOND_NAMES = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class Disk:
    """One thread for all work on a part; gone before the part's lock is, even when cancelled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch disk")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except OSError as error:
            raise disk_failure(self._folder, error) from error

    def close(self) -> None:
        # Each piece of work is a chunk to write or a piece to hash: a moment.
        self._thread.shutdown(wait=True, cancel_futures=True)


def disk_failure(folder: Path, error: OSError) -> DownloadFailed:
    elsewhere = "name another folder in MESH_LLM_MODELS"
    if error.errno == errno.ENOSPC:
        return DownloadFailed(
            f"the disk filled up while fetching a model to {folder}", hint=f"free some space, or {elsewhere}"
        )
    return DownloadFailed(f"cannot write to {folder}: {error.strerror or error}", hint=elsewhere)


class PieceDamaged(Exception):
    """A piece was complete and its hash another one; it has been thrown away."""


class PartFile:
    """One file on its way. The methods block."""

    def __init__(self, path: Path, entry: FilePieces, piece_bytes: int) -> None:
        self.path = path
        self.entry = entry
        self.piece_bytes = piece_bytes
        self.offset = 0
        """Bytes that are there; those before the current piece are checked."""
        self._digest = hashlib.sha256()

    @property
    def missing_bytes(self) -> int:
        return self.entry.size_bytes - self.offset

    @property
    def piece_start(self) -> int:
        return self.offset - self.offset % self.piece_bytes

    @property
    def piece_end(self) -> int:
        return min(self.piece_start + self.piece_bytes, self.entry.size_bytes)

    def create(self) -> None:
        self.path.touch(0o644)

    def could_be(self, existing: Path) -> bool:
        """Whether it pays to compare a file that is there already."""
        # Never write to a file that has another name, too: a run that was killed at its end leaves these.
        if self.path.exists() and self.path.stat().st_nlink > 1:
            self.path.unlink()
        return (
            not self.path.exists() and existing.is_file() and existing.stat().st_size == self.entry.size_bytes
        )

    def has_piece(self, existing: Path, index: int) -> bool:
        start = index * self.piece_bytes
        size = min(self.piece_bytes, self.entry.size_bytes - start)
        return hash_range(existing, start, size).hexdigest() == self.entry.pieces[index]

    def adopt(self, existing: Path) -> bool:
        try:
            os.link(existing.resolve(), self.path)
        except OSError:
            return False  # on another disk, or one without second names: it is fetched once more
        self.offset = self.entry.size_bytes
        return True

    def take_up(self) -> bool:
        """Check the next piece that an earlier run has left, and go on behind it; False: it was the last."""
        left_bytes = self.path.stat().st_size
        if self.offset >= min(left_bytes, self.entry.size_bytes):
            self._cut()
            return False
        start, end = self.piece_start, min(self.piece_end, left_bytes)
        self._digest = hash_range(self.path, start, end - start)
        self.offset = end
        whole = end == min(start + self.piece_bytes, self.entry.size_bytes)
        if whole and not self._piece_is_good(start):
            self.offset = start
            self._digest = hashlib.sha256()
            self._cut()
            return False
        if whole:
            self._digest = hashlib.sha256()
        else:
            self._cut()
        return whole

    def write(self, data: bytes) -> None:
        """The next bytes, no further than `piece_end`."""
        start, end = self.piece_start, self.piece_end
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.offset)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            self._digest.update(data)
            self.offset += len(data)
            if self.offset < end:
                return
            # A run that ends here with the machine has lost a piece at most.
            os.fsync(file.fileno())
        good = self._piece_is_good(start)
        self._digest = hashlib.sha256()
        if not good:
            self.offset = start
            self._cut()
            raise PieceDamaged

    def _piece_is_good(self, start: int) -> bool:
        return self._digest.hexdigest() == self.entry.pieces[start // self.piece_bytes]

    def _cut(self) -> None:
        if self.path.stat().st_size != self.offset:
            os.truncate(self.path, self.offset)


class PartFiles:
    """The files of one manifest in a folder of their own, under the names that they are checked by."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk, wanted: frozenset[int]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.files = {
            index: PartFile(folder / name, manifest.files[index], manifest.piece_bytes)
            for index, name in enumerate(manifest.names("model"))
            if index in wanted
        }
        self._disk = disk

    @property
    def missing_bytes(self) -> int:
        return sum(file.missing_bytes for file in self.files.values())

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files.values())

    async def open(self, fingerprint: Fingerprint, models: Path, told: Callable[[int], None]) -> None:
        """Take up what is there of it, in `models` too; `told` hears how many bytes of it are checked."""
        sidecar = {
            "fingerprint": fingerprint,
            "digest": self.manifest.digest,
            "bytes": self.manifest.size_bytes,
        }
        await self._disk.run(self._tie, sidecar)
        names = self.manifest.names(self.manifest.stem)
        checked_bytes = 0
        for index, file in self.files.items():
            if not await self._adopt(file, models / names[index]):
                await self._disk.run(file.create)
                while await self._disk.run(file.take_up):
                    told(checked_bytes + file.offset)
            checked_bytes += file.offset

    async def _adopt(self, file: PartFile, existing: Path) -> bool:
        """Whether a file that stands in the models folder is this one, byte for byte."""
        if not await self._disk.run(file.could_be, existing):
            return False
        for index in range(len(file.entry.pieces)):
            if not await self._disk.run(file.has_piece, existing, index):
                return False
        return await self._disk.run(file.adopt, existing)

    def _tie(self, sidecar: dict[str, Any]) -> None:
        """Begin anew unless the folder is about exactly these bytes."""
        path = self.folder / _SIDECAR
        try:
            if json.loads(path.read_text()) == sidecar:
                return
        except (OSError, ValueError):
            pass
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(sidecar))
        scratch.replace(path)

    async def throw_away(self) -> None:
        await self._disk.run(shutil.rmtree, self.folder, True)

    async def place(self, folder: Path) -> tuple[Path, ...]:
        """Give the files their names in `folder`, never in place of another file."""
        return await self._disk.run(self._place, folder)

    def _place(self, folder: Path) -> tuple[Path, ...]:
        for number in range(1, _NAMES_TRIED):
            stem = self.manifest.stem if number == 1 else f"{self.manifest.stem}-{number}"
            names = self.manifest.names(stem)
            targets = [folder / names[index] for index in self.files]
            if _link_all(self.paths, targets):
                _sync(folder)
                return tuple(targets)
        raise DownloadFailed(
            f"{folder} already has {_NAMES_TRIED} other files called {self.manifest.stem}",
            hint="remove some of them",
        )


def _link_all(sources: Sequence[Path], targets: Sequence[Path]) -> bool:
    """Second names for all of the files, or for none: False where a name belongs to another file."""
    made: list[Path] = []
    for source, target in zip(sources, targets, strict=True):
        try:
            os.link(source, target)
            made.append(target)
        except FileExistsError:
            # A run that was killed half-way through has named some of them.
            if not target.samefile(source):
                for path in made:
                    path.unlink()
                return False
        except OSError as error:
            if error.errno not in _NO_SECOND_NAMES or made:
                raise
            return _move_all(sources, targets)
    return True


def _move_all(sources: Sequence[Path], targets: Sequence[Path]) -> bool:
    """The same for file systems on which a file has one name; somebody else's file may slip in between."""
    if any(target.exists() for target in targets):
        return False
    for source, target in zip(sources, targets, strict=True):
        source.rename(target)
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
