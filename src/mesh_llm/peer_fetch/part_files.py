"""A model on its way from peers to this disk: what has arrived of each file, checked piece by piece."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesh_llm.errors import DownloadFailed
from mesh_llm.models.part_file import Disk, PartFile, place, read_note, sync, write_note
from mesh_llm.peer_fetch.manifest import Manifest
from mesh_llm.peer_fetch.piece_hashes import hash_range
from mesh_llm.types import Fingerprint

_NAMES_TRIED = 100
_SIDECAR = "part.json"


class PartFiles:
    """The files of one manifest in a folder of their own, under the names that they are checked by."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk, wanted: frozenset[int]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.files = {
            index: PartFile(
                folder / name,
                size_bytes=manifest.files[index].size_bytes,
                piece_bytes=manifest.piece_bytes,
                hashes=manifest.files[index].pieces,
            )
            for index, name in enumerate(manifest.names("model"))
            if index in wanted
        }
        self._disk = disk

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files.values())

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
                await self._disk.run(file.open)
                while await self._disk.run(file.take_up):
                    told(checked_bytes + file.offset)
            checked_bytes += file.offset

    async def _adopt(self, file: PartFile, existing: Path) -> bool:
        """Whether a file that stands in the models folder is this one, byte for byte."""
        if not await self._disk.run(_could_be, file, existing):
            return False
        for index in range(len(file.hashes)):
            if not await self._disk.run(_has_piece, file, existing, index):
                return False
        return await self._disk.run(_adopt, file, existing)

    def _tie(self, sidecar: dict[str, Any]) -> None:
        """Begin anew unless the folder is about exactly these bytes."""
        path = self.folder / _SIDECAR
        if read_note(path) == sidecar:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        write_note(path, sidecar)

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
            if _place_all(self.paths, targets):
                sync(folder)
                return tuple(targets)
        raise DownloadFailed(
            f"{folder} already has {_NAMES_TRIED} other files called {self.manifest.stem}",
            hint="remove some of them",
        )


def version_folder(folder: Path, digest: str) -> Path:
    """Of one version of a model, in the folder of its fetch."""
    return folder / digest[:32]


def remove_others(version: Path, *, keep: int) -> None:
    """Of the versions beside this one, all go but the `keep` that have come furthest."""
    others = [path for path in version.parent.iterdir() if path != version]
    others.sort(key=_come_bytes, reverse=True)
    for path in others[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def _come_bytes(version: Path) -> int:
    return sum(path.stat().st_size for path in version.glob("*.gguf"))


def _could_be(file: PartFile, existing: Path) -> bool:
    """Whether it pays to compare a file that is there already."""
    # A part with another name, too, is what a run left that was killed at its end: it is one of those.
    begun = file.path.exists() and file.path.stat().st_nlink == 1
    return not begun and existing.is_file() and existing.stat().st_size == file.size_bytes


def _has_piece(file: PartFile, existing: Path, index: int) -> bool:
    digest = hash_range(existing, index * file.piece_bytes, file.piece_bytes)
    return digest.hexdigest() == file.hashes[index]


def _adopt(file: PartFile, existing: Path) -> bool:
    file.path.unlink(missing_ok=True)
    try:
        os.link(existing.resolve(), file.path)
    except OSError:
        return False  # on another disk, or one without second names: it is fetched once more
    file.offset = existing.stat().st_size
    return True


def _place_all(sources: Sequence[Path], targets: Sequence[Path]) -> bool:
    """Names for all of the files, or for none: False where one belongs to another file."""
    made: list[tuple[Path, Path]] = []
    for source, target in zip(sources, targets, strict=True):
        is_new = not target.exists()
        if not place(source, target):
            for part, name in made:
                name.unlink() if part.exists() else name.rename(part)
            return False
        if is_new:
            made.append((source, target))
    return True
