"""Some pieces of a model's files, in files of the full size: what is not there is a hole.

Offsets and the fingerprint are those of the whole model, and a hole takes no
room on the disk. A small file beside them says which pieces are there; only
pieces whose hash was right are. Nothing here is ever taken for the model itself.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from mesh_llm.errors import DownloadFailed
from mesh_llm.models.layer_ranges import Extent, Piece
from mesh_llm.models.part_file import PartFile, read_note, sync, write_note
from mesh_llm.peer_fetch.manifest import Manifest, file_names, safe_stem
from mesh_llm.types import Fingerprint

_SIDECAR = "layers.json"
_PROBE_BYTES = 64 << 20
"""Of a hole to try a file system with: no real one fills that much when asked for nothing."""


class NoHoles(DownloadFailed):
    """The file system keeps no holes: some layers would take as much room as all of them."""


class SparseFiles:
    """The files and what is there of them. The methods block; one at a time, under the folder's lock."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: Fingerprint,
        digest: str,
        piece_bytes: int,
        sizes: tuple[int, ...],
        stem: str,
    ) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.digest = digest
        """Of the manifest that its pieces are checked by."""
        self.piece_bytes = piece_bytes
        self.sizes = sizes
        self.stem = stem
        """Of the files' names; their numbers are part of a model in several files."""
        names = file_names(stem, len(sizes))
        self.files = [
            PartFile(folder / name, size_bytes=size) for name, size in zip(names, sizes, strict=True)
        ]
        self.proven = False
        """Whether headers and samples are there and make the fingerprint."""
        self.held: set[Piece] = set()

    @classmethod
    def create(cls, folder: Path, fingerprint: Fingerprint, told: Manifest) -> SparseFiles:
        """In place of whatever is in the folder; raises NoHoles."""
        _empty(folder)
        made = cls(
            folder,
            fingerprint=fingerprint,
            digest=told.digest,
            piece_bytes=told.piece_bytes,
            sizes=tuple(file.size_bytes for file in told.files),
            # Never twice the same: a worker that knows other files by this name would read those.
            stem=f"{told.stem}-{secrets.token_hex(4)}",
        )
        _check_holes(folder)
        for file in made.files:
            file.reserve()
        made._write()
        return made

    @classmethod
    def load(cls, folder: Path, fingerprint: Fingerprint) -> SparseFiles | None:
        """What an earlier run left; None where there is nothing, or nothing that can be believed."""
        try:
            found = cls._read(folder, read_note(folder / _SIDECAR))
            (folder / _SIDECAR).touch()  # it is of use: what nobody has asked for in a long time goes
            fits = [path.stat().st_size for path in found.paths] == list(found.sizes)
        except (OSError, LookupError, ArithmeticError, ValueError, TypeError, AttributeError):
            return None
        return found if fits and found.fingerprint == fingerprint else None

    @classmethod
    def _read(cls, folder: Path, document: dict[str, Any]) -> SparseFiles:
        found = cls(
            folder,
            fingerprint=Fingerprint(str(document["fingerprint"])),
            digest=str(document["digest"]),
            piece_bytes=int(document["piece_bytes"]),
            sizes=tuple(map(int, document["sizes"])),
            stem=safe_stem(str(document["stem"])),
        )
        found.proven = document["proven"] is True
        for file, spans in enumerate(document["held"]):
            pieces = -(-found.sizes[file] // found.piece_bytes)
            for first, last in spans:
                if not 0 <= first < last <= pieces:
                    raise ValueError("no such pieces")
                found.held |= {Piece(file, index) for index in range(first, last)}
        return found

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    def size_of(self, piece: Piece) -> int:
        return min(self.piece_bytes, self.sizes[piece.file] - piece.index * self.piece_bytes)

    def lacks(self, where: Extent) -> bool:
        """Whether some of these bytes are in no piece that is there."""
        first, last = where.offset // self.piece_bytes, -(-where.end // self.piece_bytes)
        return any(Piece(where.file, index) not in self.held for index in range(first, last))

    def keep(self, piece: Piece, data: bytes, sha256: str) -> None:
        """A piece, if its hash is right."""
        self.files[piece.file].keep(piece.index * self.piece_bytes, data, sha256)
        self.held.add(piece)
        # After the bytes are on the disk: what this file says is true, whenever the machine ends.
        self._write()

    def sample(self, extents: list[Extent], data: bytes) -> None:
        """Bytes for the fingerprint alone: they are not part of any piece that is there."""
        for where in extents:
            self.files[where.file].put(where.offset, data[: where.size_bytes])
            data = data[where.size_bytes :]

    def prove(self) -> None:
        self.proven = True
        for path in self.paths:
            sync(path)
        self._write()

    def throw_away(self) -> None:
        _empty(self.folder)

    def _write(self) -> None:
        document = {
            "fingerprint": self.fingerprint,
            "digest": self.digest,
            "piece_bytes": self.piece_bytes,
            "sizes": self.sizes,
            "stem": self.stem,
            "proven": self.proven,
            "held": [self._spans(file) for file in range(len(self.sizes))],
        }
        write_note(self.folder / _SIDECAR, document)

    def _spans(self, file: int) -> list[list[int]]:
        spans: list[list[int]] = []
        for index in sorted(piece.index for piece in self.held if piece.file == file):
            if spans and spans[-1][1] == index:
                spans[-1][1] += 1
            else:
                spans.append([index, index + 1])
        return spans


def _empty(folder: Path) -> None:
    # The sidecar first: without it the rest is nothing.
    (folder / _SIDECAR).unlink(missing_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _check_holes(folder: Path) -> None:
    probe = folder / "hole"
    try:
        probe.touch(0o600)
        os.truncate(probe, _PROBE_BYTES)
        if probe.stat().st_blocks * 512 > _PROBE_BYTES // 2:
            raise NoHoles(f"the file system of {folder} does not support sparse files")
    except OSError as error:
        # exFAT and the like answer that there is no room for the zeros.
        raise NoHoles(
            f"the file system of {folder} does not support sparse files: {error.strerror}"
        ) from error
    finally:
        probe.unlink(missing_ok=True)
