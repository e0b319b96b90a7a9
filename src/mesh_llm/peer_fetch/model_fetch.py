"""Brings a model's files from peers to the models folder: checked, whole, or not at all.

What has arrived survives everything but its own damage: a broken connection, a
killed process, a source that goes away. The next source, or the next run, goes
on at the same byte. Sources may offer different bytes under one fingerprint,
as a hostile one would: versions are kept apart, two at most, until one proves
to be the model.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mesh_llm.defaults import FETCH_CHUNK_BYTES
from mesh_llm.errors import ModelError
from mesh_llm.models.part_file import PartFile, PieceDamaged
from mesh_llm.peer_fetch.channel import Inbox, SourceLost, SourceWrong
from mesh_llm.peer_fetch.manifest import Manifest
from mesh_llm.peer_fetch.part_files import PartFiles, remove_others, version_folder
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.peer_fetch.sources import FetchTimes, Source, Sources, SourceSearch, Wanted, own_folder
from mesh_llm.types import EventSink, Fingerprint, ProgressSink

__all__ = ["FetchTimes", "Source", "Sources", "Verify", "Wanted", "fetch"]

OTHER_VERSIONS = 1
"""Kept beside the one that comes: whoever invents new ones must not fill the disk with them."""

Verify = Callable[[tuple[Path, ...]], Awaitable[Fingerprint]]
"""The fingerprint of these files; raises ModelError where they are no model."""


async def fetch(
    wanted: Wanted,
    folder: Path,
    *,
    sources: Sources,
    verify: Verify,
    progress: ProgressSink,
    events: EventSink,
    digests: PieceHashes | None = None,
    times: FetchTimes | None = None,
) -> tuple[Path, ...]:
    """The model's files in `folder`, in order. Raises DownloadFailed, and keeps what came until then."""
    async with own_folder(wanted, folder, models=folder, events=events) as (scratch, disk):
        run = _Fetch(
            wanted=wanted,
            folder=folder,
            scratch=scratch,
            disk=disk,
            sources=sources,
            verify=verify,
            progress=progress,
            events=events,
            times=times or FetchTimes(),
        )
        if wanted.digest:
            # Others came before anybody knew which copy is the right one.
            await run.make_way(wanted.digest, keep=0)
        paths, pieces = await run.from_any(run.take)
        await disk.run(shutil.rmtree, scratch, True)
    if digests is not None and digests.piece_bytes == pieces.piece_bytes:
        await asyncio.to_thread(_remember, digests, wanted, paths, pieces)
    return paths


def _remember(digests: PieceHashes, wanted: Wanted, paths: tuple[Path, ...], pieces: Manifest) -> None:
    """So that this node can offer the files without reading them again."""
    indices = sorted(wanted.shards) if wanted.shards is not None else range(len(pieces.files))
    for index, path in zip(indices, paths, strict=True):
        digests.remember(path, pieces.files[index].pieces)


@dataclass(kw_only=True)
class _Fetch(SourceSearch):
    """One fetch of whole files."""

    scratch: Path
    verify: Verify
    parts: dict[str, PartFiles] = field(default_factory=dict)
    thrown_away: set[str] = field(default_factory=set)
    """Digests of manifests that turned out to be of something else."""

    async def take(self, source: Source) -> tuple[tuple[Path, ...], Manifest]:
        told = await self.manifest(source)
        part = await self._part(told)
        await self.check_space(part.missing_bytes)
        for index, file in part.files.items():
            if file.missing_bytes:
                await self._receive(source, part, index, file)
        await self._check(part)
        return await part.place(self.folder), part.manifest

    async def _part(self, told: Manifest) -> PartFiles:
        if told.digest in self.thrown_away:
            raise SourceWrong("it offers the same wrong copy")
        if told.digest not in self.parts:
            await self.make_way(told.digest, keep=OTHER_VERSIONS)
            shards = self.wanted.shards if self.wanted.shards is not None else range(len(told.files))
            part = PartFiles(version_folder(self.scratch, told.digest), told, self.disk, frozenset(shards))
            total_bytes = part.missing_bytes
            await part.open(
                self.wanted.fingerprint,
                self.folder,
                lambda done: self.tell(f"Checking {self.wanted.name}", done, total_bytes),
            )
            self.parts[told.digest] = part
        return self.parts[told.digest]

    async def make_way(self, digest: str, *, keep: int) -> None:
        """For this version: all others go but the `keep` that have come furthest."""
        await self.disk.run(partial(remove_others, version_folder(self.scratch, digest), keep=keep))
        self.parts = {known: part for known, part in self.parts.items() if part.folder.exists()}

    # -- bytes --------------------------------------------------------------------------------------

    async def _receive(self, source: Source, part: PartFiles, index: int, file: PartFile) -> None:
        while file.missing_bytes:
            # A piece that somebody else began may be damaged through no fault of this source. It is asked
            # for the whole piece at once: after another one's turn the blame would be unclear again.
            answers_from = file.offset if file.offset == file.piece_start else file.piece_end
            try:
                await self._receive_rest(source, part, index, file)
            except PieceDamaged:
                if file.offset >= answers_from:
                    raise SourceWrong("a piece arrived damaged and was thrown away") from None
                self.say("a piece that another source began was damaged and is fetched again", source)

    async def _receive_rest(self, source: Source, part: PartFiles, index: int, file: PartFile) -> None:
        where = {
            "ask": "bytes",
            "file": index,
            "size": file.size_bytes,
            "offset": file.offset,
            "length": file.missing_bytes,
        }
        async with self.bytes_of(source, where, file.missing_bytes) as inbox:
            while file.missing_bytes:
                await self._receive_chunk(source, part, inbox, file)

    async def _receive_chunk(self, source: Source, part: PartFiles, inbox: Inbox, file: PartFile) -> None:
        wanted = min(FETCH_CHUNK_BYTES, file.piece_end - file.offset)
        chunk = bytearray()
        lost: SourceLost | None = None
        try:
            while len(chunk) < wanted and (more := await inbox.some(wanted - len(chunk))):
                chunk += more
        except SourceLost as error:
            lost = error
        if chunk:
            await self.disk.run(file.write, bytes(chunk))
            self._count_progress(source, part)
        if lost is not None:
            raise lost
        if len(chunk) < wanted:
            raise SourceLost("it stopped early")

    def _count_progress(self, source: Source, part: PartFiles) -> None:
        total_bytes = part.size_bytes
        done_bytes = total_bytes - part.missing_bytes
        self.came(source, done_bytes)
        self.tell(f"Fetching {self.wanted.name}", done_bytes, total_bytes)

    # -- the whole ----------------------------------------------------------------------------------

    async def _check(self, part: PartFiles) -> None:
        try:
            found = await self.verify(part.paths)
        except ModelError as error:
            wrong = error.message
        else:
            if found == self.wanted.fingerprint:
                return
            wrong = f"its fingerprint is {found[:12]}…, not {self.wanted.fingerprint[:12]}…"
        self.thrown_away.add(part.manifest.digest)
        del self.parts[part.manifest.digest]
        await part.throw_away()
        raise SourceWrong(f"what arrived is not the model and was thrown away: {wrong}")
