"""Sends this node's model files to peers that lack them.

A peer opens a stream with one request. Every answer begins with lines of JSON:

`{"ask": "manifest", "fingerprint"}` is answered by `{"hashing": bytes}` every
few seconds while the files are read for the first time, then by the manifest;
`{"ask": "bytes", "fingerprint", "file", "size", "offset", "length"}` by
`{"bytes": length}` and the bytes themselves;
`{"ask": "ranges", "fingerprint", "file", "size", "ranges": [[offset, length], …]}`
by `{"bytes": sum of lengths}` and the bytes of all of them, one behind the other;
each by `{"refused": sentence}` where it cannot be.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mesh_llm.defaults import FETCH_CHUNK_BYTES, FETCH_STALL_S
from mesh_llm.errors import MeshError, ModelError
from mesh_llm.models.stores import blob_title
from mesh_llm.peer_fetch.channel import ByteStream
from mesh_llm.peer_fetch.manifest import FilePieces, Manifest
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.peer_fetch.throttle import Throttle
from mesh_llm.types import Fingerprint, NodeId

OFFER_STREAMS = 8
"""Files sent at once: further peers are told to come again, or ask another one."""
OFFER_STREAMS_EACH = 4
"""To one peer, which needs one for each model that it fetches: none can keep the others out alone."""


log = logging.getLogger(__name__)

OFFER_RANGES = 1024
"""In one question: more than the samples of a small model, and a request of some 20 KB."""

Models = Callable[[], Mapping[Fingerprint, tuple[Path, ...]]]
"""The models on this node's disk, as they are now: the files of each, in order."""


class FileServer:
    """Answers requests for files; all of them share one throttle and a limit on their number."""

    def __init__(
        self, *, models: Models, digests: PieceHashes, throttle: Throttle, stall_s: float = FETCH_STALL_S
    ) -> None:
        self._models = models
        self._digests = digests
        self._throttle = throttle
        self._stall_s = stall_s
        self._under_way: Counter[NodeId] = Counter()
        """Answers to each peer."""

    async def answer(self, stream: ByteStream, request: Mapping[str, Any], *, origin: NodeId) -> None:
        """Answer one request; returns when all is written or the peer is gone. Closing is the caller's."""
        outbox = _Outbox(stream, self._throttle, self._stall_s)
        try:
            try:
                with self._turn(origin):
                    await self._answer(outbox, request)
                    await outbox.finish()
            except ModelError as error:
                await outbox.line({"refused": error.message})
                await outbox.finish()
        except (OSError, EOFError, MeshError) as error:
            log.info("file offer ended reason=%s", error or type(error).__name__)

    @contextmanager
    def _turn(self, origin: NodeId) -> Iterator[None]:
        """One of the streams that there are; who is refused has none, however long that takes to be read."""
        if self._under_way[origin] >= OFFER_STREAMS_EACH or self._under_way.total() >= OFFER_STREAMS:
            raise ModelError("it sends as many files as it can at once")
        self._under_way[origin] += 1
        try:
            yield
        finally:
            self._under_way[origin] -= 1
            if not self._under_way[origin]:
                del self._under_way[origin]

    async def _answer(self, outbox: _Outbox, request: Mapping[str, Any]) -> None:
        files = self._files(request.get("fingerprint"))
        match request.get("ask"):
            case "manifest":
                await outbox.line((await self._manifest(outbox, files)).to_message())
            case "bytes":
                offset, length = request.get("offset"), request.get("length")
                await self._send(outbox, files, request, [[offset, length]])
            case "ranges":
                await self._send(outbox, files, request, request.get("ranges"))
            case _:
                raise ModelError("it does not understand the request")

    def _files(self, fingerprint: Any) -> tuple[Path, ...]:
        files = self._models().get(Fingerprint(fingerprint)) if isinstance(fingerprint, str) else None
        if not files:
            raise ModelError("it does not have the model")
        return files

    async def _manifest(self, outbox: _Outbox, files: tuple[Path, ...]) -> Manifest:
        done_bytes = 0

        async def beat(bytes_of_file: int) -> None:
            await outbox.line({"hashing": done_bytes + bytes_of_file})

        entries: list[FilePieces] = []
        for path in files:
            try:
                entries.append(await self._digests.of(path, busy=self._throttle.busy, beat=beat))
            except OSError as error:
                if error.filename is None:
                    raise  # the stream's, not the file's
                raise ModelError("it cannot read the file any more") from error
            done_bytes += entries[-1].size_bytes
        # An Ollama blob's own name is nothing that its copy should be called.
        stem = blob_title(files[0]) or files[0].name
        return Manifest(stem=stem, piece_bytes=self._digests.piece_bytes, files=tuple(entries))

    async def _send(
        self, outbox: _Outbox, files: tuple[Path, ...], request: Mapping[str, Any], ranges: Any
    ) -> None:
        match request.get("file"), request.get("size"):
            case [int(index), int(size)] if 0 <= index < len(files) and _are_ranges(ranges, size):
                path = files[index]
            case _:
                raise ModelError("it has no such part of the model")
        promised = False
        for chunk_at, wanted in _chunks(ranges):
            try:
                chunk = await asyncio.to_thread(_read_at, path, size, chunk_at, wanted)
            except ModelError as error:
                if not promised:
                    raise
                raise EOFError(error.message) from error
            # Of the bytes that are in memory now, and not of those that may have come since.
            if self._models().get(Fingerprint(str(request.get("fingerprint")))) != files:
                if not promised:
                    raise ModelError("it does not have the model")
                raise EOFError("its file was replaced")
            # The first chunk before the promise of all: what cannot be read is refused with a sentence.
            if not promised:
                await outbox.line({"bytes": sum(length for _, length in ranges)})
                promised = True
            await outbox.chunk(chunk)


def _are_ranges(ranges: Any, size: int) -> bool:
    return (
        isinstance(ranges, list)
        and 0 < len(ranges) <= OFFER_RANGES
        and all(_is_range(entry, size) for entry in ranges)
    )


def _is_range(entry: Any, size: int) -> bool:
    match entry:
        case [int(offset), int(length)]:
            return 0 <= offset < size and 0 < length <= size - offset
    return False


def _chunks(ranges: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Offsets and sizes of what is read at once."""
    for offset, length in ranges:
        for start in range(offset, offset + length, FETCH_CHUNK_BYTES):
            yield start, min(FETCH_CHUNK_BYTES, offset + length - start)


def _read_at(path: Path, size: int, offset: int, wanted: int) -> bytes:
    """Opened anew each time: a read that a cancelled request leaves behind shares nothing with later ones."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size:
                raise ModelError("its file has another size")
            data = os.pread(file.fileno(), wanted, offset)
            if len(data) == wanted:
                return data
    except OSError as error:
        raise ModelError("it cannot read the file any more") from error
    raise ModelError("its file became shorter")


class _Outbox:
    """The sending end of a stream: throttled, and given up where the peer does not read."""

    def __init__(self, stream: ByteStream, throttle: Throttle, stall_s: float) -> None:
        self._stream = stream
        self._throttle = throttle
        self._stall_s = stall_s

    async def line(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for start in range(0, len(data), FETCH_CHUNK_BYTES):
            await self._write(data[start : start + FETCH_CHUNK_BYTES])

    async def chunk(self, data: bytes) -> None:
        await self._throttle.take(len(data))
        await self._write(data)

    async def finish(self) -> None:
        async with asyncio.timeout(self._stall_s):
            await self._stream.finish()

    async def _write(self, data: bytes) -> None:
        # A chunk in that time is about the pace that a receiver asks of a source.
        async with asyncio.timeout(self._stall_s):
            await self._stream.write(data)
