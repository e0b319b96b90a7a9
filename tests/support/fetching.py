"""A model at a peer's, and a receiver that fetches it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh_llm.peer_fetch.manifest import FilePieces, Manifest
from mesh_llm.peer_fetch.model_fetch import FetchTimes, Verify, Wanted, fetch
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.types import Event, Fingerprint, Progress
from tests.support.file_peer import PIECE_BYTES, Answer, Peer, honest

QUICK = FetchTimes(stall_s=30.0, pause_s=0.0)


async def digest_of(paths: tuple[Path, ...]) -> Fingerprint:
    """Stands in for the fingerprint, and stricter: every byte counts."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return Fingerprint(whole.hexdigest())


def manifest_digest(contents: Sequence[bytes]) -> str:
    files = tuple(
        FilePieces(
            size_bytes=len(data),
            pieces=tuple(
                hashlib.sha256(data[start : start + PIECE_BYTES]).hexdigest()
                for start in range(0, len(data), PIECE_BYTES)
            ),
        )
        for data in contents
    )
    return Manifest(stem="any", piece_bytes=PIECE_BYTES, files=files).digest


class Model:
    """A model at some peer's, and what a receiver needs to fetch it."""

    def __init__(self, files: Sequence[Path], tmp_path: Path) -> None:
        self.files = tuple(files)
        self.content = [file.read_bytes() for file in files]
        self.fingerprint = Fingerprint(hashlib.sha256(b"".join(self.content)).hexdigest())
        self.cache = tmp_path / "cache"
        self.folder = tmp_path / "models"
        self.events: list[Event] = []
        self.steps: list[Progress] = []

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.content))

    @property
    def digest(self) -> str:
        """Of all its bytes, as the mesh's owner would publish it."""
        return manifest_digest(self.content)

    def honest(self, **options: Any) -> Answer:
        return honest(self.cache, self.fingerprint, self.files, **options)

    async def fetch(
        self,
        *peers: Peer,
        times: FetchTimes = QUICK,
        verify: Verify = digest_of,
        size_bytes: int | None = None,
        shards: frozenset[int] | None = None,
        digest: str = "",
        digests: PieceHashes | None = None,
    ) -> tuple[Path, ...]:
        return await fetch(
            Wanted(
                fingerprint=self.fingerprint, name="tiny", digest=digest, size_bytes=size_bytes, shards=shards
            ),
            self.folder,
            sources=lambda: [each.source for each in peers],
            verify=verify,
            progress=self.steps.append,
            events=self.events.append,
            digests=digests,
            times=times,
        )

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def parts(self) -> list[Path]:
        return sorted(self.folder.glob(".incoming-fetch-*/*/*.gguf"))

    def said(self) -> list[str]:
        return [event.text for event in self.events]
