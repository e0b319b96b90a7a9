"""Brings some layers of a model from peers to this disk: what a worker reads, and no more.

First comes what tells the model: headers, and the samples that its fingerprint
is made of. The fingerprint proves them. Then come the pieces that the layers
lie in, each checked by its hash before it is written. Later ones are added in
place, so that an engine's mapping of the files stays good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh_llm.defaults import FETCH_CHUNK_BYTES
from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.frozen import frozen
from mesh_llm.models import incoming_folders
from mesh_llm.models.layer_ranges import (
    Extent,
    Piece,
    Share,
    Table,
    needed,
    pieces_of,
    runs,
    samples,
    tensor_table,
    whole_layers,
    whole_tensors,
)
from mesh_llm.models.part_file import PieceDamaged
from mesh_llm.peer_fetch.channel import Inbox, SourceLost, SourceWrong
from mesh_llm.peer_fetch.manifest import Manifest
from mesh_llm.peer_fetch.sources import (
    FetchTimes,
    Source,
    Sources,
    SourceSearch,
    Wanted,
    fetch_key,
    own_folder,
)
from mesh_llm.peer_fetch.sparse_files import SparseFiles
from mesh_llm.types import EventSink, Fingerprint, ProgressSink

Read = Callable[[Path], Awaitable[dict[str, Any]]]
"""What a model's files say of themselves (`engine/children/gguf.py`); ModelError if they are none."""

_FOLDER = ".layers"
_LARGEST_PIECE_BYTES = 64 << 20
"""Kept in memory until its hash is known to be right."""
_HEADER_BYTES = 256 << 20
"""Of each file at most: the largest vocabularies take a tenth."""
_SAMPLES_ASKED = 512
"""In one question: 2 MB of answer, so that a cut costs little."""


@frozen
class Held:
    """What is on this disk of a model."""

    paths: tuple[Path, ...]
    """Full of holes. For workers alone, and for them only the tensors below."""
    document: dict[str, Any]
    """As `engine/children/gguf.py` has it: that of the whole model."""
    tensors: tuple[str, ...]
    layers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of the whole model."""
        return sum(tensor_table(self.document).sizes)

    def has(self, share: Share) -> bool:
        """Whether everything that a worker with these layers reads is there, and still on the disk."""
        wanted = needed(tensor_table(self.document), share)
        return set(wanted) <= set(self.tensors) and all(path.exists() for path in self.paths)


async def find(folder: Path, fingerprint: Fingerprint, *, digest: str = "", read: Read) -> Held | None:
    """What earlier runs have brought to the models folder: of the copy with this digest, if one is known."""
    place = folder / _FOLDER / incoming_folders.resumable_name(fetch_key(fingerprint))
    holding = await asyncio.to_thread(SparseFiles.load, place, fingerprint)
    if holding is None or not holding.proven or digest not in ("", holding.digest):
        return None
    try:
        return await _look(holding, read)
    except ModelError:
        return None


async def fetch_layers(
    wanted: Wanted,
    share: Share | None,
    folder: Path,
    *,
    sources: Sources,
    read: Read,
    progress: ProgressSink,
    events: EventSink,
    times: FetchTimes | None = None,
) -> Held:
    """The layers of a share beside those that are there; without one, what the fingerprint needs.

    Raises DownloadFailed, and keeps what came until then.
    """
    async with own_folder(wanted, folder / _FOLDER, models=folder, events=events) as (own, disk):
        run = _LayerFetch(
            wanted=wanted,
            folder=own,
            disk=disk,
            sources=sources,
            progress=progress,
            events=events,
            times=times or FetchTimes(),
            share=share,
            read=read,
        )
        return await run.run()


async def _look(holding: SparseFiles, read: Read) -> Held:
    """Raises ModelError where the files are not the model, after all."""
    document = await read(holding.paths[0])
    if document.get("fingerprint") != holding.fingerprint:
        raise ModelError("the layers on this disk are of another model")
    table = tensor_table(document)
    if list(table.sizes) != list(holding.sizes):
        raise ModelError("the layers on this disk are of another model")
    names = whole_tensors(table, frozenset(holding.held), holding.piece_bytes)
    return Held(
        paths=holding.paths,
        document=document,
        tensors=names,
        layers=whole_layers(table, names),
    )


@dataclass(kw_only=True)
class _LayerFetch(SourceSearch):
    """One fetch of some layers."""

    share: Share | None
    read: Read
    came_bytes: int = 0
    others: set[str] = field(default_factory=set)
    """Sources that have another version of the model than the one that layers are here of."""
    holding: SparseFiles | None = None

    async def run(self) -> Held:
        self.holding = await self.disk.run(SparseFiles.load, self.folder, self.wanted.fingerprint)
        if self.holding is not None and self.wanted.digest not in ("", self.holding.digest):
            # It came before anybody knew which copy is the right one.
            await self._throw_away()
        if self.holding is not None and self.holding.proven:
            try:
                held = await _look(self.holding, self.read)
            except ModelError:
                await self._throw_away()
            else:
                if not self._missing(self.holding, tensor_table(held.document)):
                    return held
        try:
            return await self.from_any(self._take)
        except DownloadFailed:
            # Whoever the first version came from is gone, or nobody believes it: the next try begins anew.
            if self.others and self.others >= {source.name for source in self.sources()}:
                await self._throw_away()
            raise

    async def _take(self, source: Source) -> Held:
        told = await self.manifest(source)
        if told.piece_bytes > _LARGEST_PIECE_BYTES:
            raise SourceWrong("its pieces are too large for a part of the model")
        holding = await self._hold(source, told)
        if not holding.proven:
            await self._prove(source, told, holding)
        held = await _look(holding, self.read)
        missing = self._missing(holding, tensor_table(held.document))
        if not missing:
            return held
        await self.check_space(sum(map(holding.size_of, missing)))
        await self._receive(source, told, holding, missing, f"Fetching layers of {self.wanted.name}")
        return await _look(holding, self.read)

    def _missing(self, holding: SparseFiles, table: Table) -> frozenset[Piece]:
        if self.share is None:
            return frozenset()
        wanted = [table.tensors[name] for name in needed(table, self.share)]
        return pieces_of(wanted, holding.piece_bytes) - holding.held

    async def _hold(self, source: Source, told: Manifest) -> SparseFiles:
        """The pieces of exactly these files; what was proven to be the model bars other versions of it."""
        if self.holding is not None and self.holding.digest == told.digest:
            return self.holding
        if self.holding is not None and self.holding.proven:
            self.others.add(source.name)
            raise SourceWrong("its copy is not the one that the layers on this disk are from")
        self.holding = await self.disk.run(SparseFiles.create, self.folder, self.wanted.fingerprint, told)
        return self.holding

    async def _throw_away(self) -> None:
        if self.holding is not None:
            await self.disk.run(self.holding.throw_away)
            self.holding = None

    # -- what tells the model -----------------------------------------------------------------------

    async def _prove(self, source: Source, told: Manifest, holding: SparseFiles) -> None:
        try:
            table = await self._headers(source, told, holding)
            await self._samples(source, holding, [each for each in samples(table) if holding.lacks(each)])
            await _look(holding, self.read)
        except ModelError as error:
            await self._throw_away()
            raise SourceWrong(f"what arrived is not the model and was thrown away: {error.message}") from None
        await self.disk.run(holding.prove)

    async def _headers(self, source: Source, told: Manifest, holding: SparseFiles) -> Table:
        """Pieces from the start of each file until the headers are among them."""
        count, most = 1, max(1, _HEADER_BYTES // holding.piece_bytes)
        while True:
            extents = [
                Extent(file=file, offset=0, size_bytes=min(size, count * holding.piece_bytes))
                for file, size in enumerate(holding.sizes)
            ]
            missing = pieces_of(extents, holding.piece_bytes) - holding.held
            await self.check_space(sum(map(holding.size_of, missing)))
            await self._receive(source, told, holding, missing, f"Fetching the header of {self.wanted.name}")
            try:
                table = tensor_table(await self.read(holding.paths[0]))
                if not any(holding.lacks(header) for header in table.headers):
                    return table
                wrong = ModelError("its header is too long")
            except ModelError as error:
                wrong = error
            if count >= most or count * holding.piece_bytes >= max(holding.sizes):
                raise wrong
            count *= 2

    async def _samples(self, source: Source, holding: SparseFiles, wanted: Sequence[Extent]) -> None:
        await self.check_space(sum(each.size_bytes for each in wanted))
        for file, size in enumerate(holding.sizes):
            here = [each for each in wanted if each.file == file]
            for start in range(0, len(here), _SAMPLES_ASKED):
                asked = here[start : start + _SAMPLES_ASKED]
                total = sum(each.size_bytes for each in asked)
                ranges = [[each.offset, each.size_bytes] for each in asked]
                where = {"ask": "ranges", "file": file, "size": size, "ranges": ranges}
                async with self.bytes_of(source, where, total) as inbox:
                    data = await _exactly(inbox, total)
                await self.disk.run(holding.sample, asked, data)
                self._came(source, total)

    # -- pieces -------------------------------------------------------------------------------------

    async def _receive(
        self, source: Source, told: Manifest, holding: SparseFiles, missing: frozenset[Piece], what: str
    ) -> None:
        total_bytes = sum(map(holding.size_of, missing))
        done_bytes = 0
        for first, count in runs(missing):
            pieces = [Piece(first.file, first.index + step) for step in range(count)]
            length = sum(map(holding.size_of, pieces))
            where = {
                "ask": "bytes",
                "file": first.file,
                "size": holding.sizes[first.file],
                "offset": first.index * holding.piece_bytes,
                "length": length,
            }
            async with self.bytes_of(source, where, length) as inbox:
                for piece in pieces:
                    before_bytes = done_bytes

                    def step(size: int, before_bytes: int = before_bytes) -> None:
                        self.tell(what, before_bytes + size, total_bytes)

                    data = await _exactly(inbox, holding.size_of(piece), step)
                    right = told.files[piece.file].pieces[piece.index]
                    try:
                        await self.disk.run(holding.keep, piece, data, right)
                    except PieceDamaged:
                        raise SourceWrong("a piece arrived damaged and was thrown away") from None
                    done_bytes += len(data)
                    self._came(source, len(data))

    def _came(self, source: Source, size_bytes: int) -> None:
        self.came_bytes += size_bytes
        self.came(source, self.came_bytes)


async def _exactly(inbox: Inbox, size: int, told: Callable[[int], None] = lambda _: None) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = await inbox.some(min(FETCH_CHUNK_BYTES, size - len(data)))
        if not more:
            raise SourceLost("it stopped early")
        data += more
        told(len(data))
    return bytes(data)
