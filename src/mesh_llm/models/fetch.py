"""Brings a model's files from peers to the models folder: checked, whole, or not at all.

What has arrived survives everything but its own damage: a broken connection, a
killed process, a source that goes away. The next source, or the next run, goes
on at the same byte. Sources may offer different bytes under one fingerprint,
as a hostile one would: each version is kept apart until one proves to be the
model.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh_llm.defaults import (
    FETCH_BEATS,
    FETCH_CHUNK_BYTES,
    FETCH_FAILURES,
    FETCH_MANIFEST_BYTES,
    FETCH_MANIFEST_S,
    FETCH_PAUSE_S,
    FETCH_SIZE_LIMIT_BYTES,
    FETCH_SPARE_BYTES,
    FETCH_STALL_S,
    FETCH_TRIES,
)
from mesh_llm.errors import DownloadFailed, MeshError, ModelError
from mesh_llm.models import incoming, manifest
from mesh_llm.models.digests import Digests
from mesh_llm.models.manifest import Manifest
from mesh_llm.models.part import Disk, Part, PartFile, PieceDamaged, disk_failure
from mesh_llm.models.stream import ByteStream, Inbox, SourceLost, SourceWrong
from mesh_llm.types import Event, EventSink, Fingerprint, Progress, ProgressSink

_ANSWER_BYTES = 4096
"""Of the line that a file's bytes begin with."""
_REASON_CHARACTERS = 200
_TRY_AGAIN = "what has arrived is kept; it goes on from there when a node that has the model is back"
_MAKE_ROOM = "free some space, or name another folder in MESH_LLM_MODELS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A peer that has the model."""

    name: str
    """For people; different for each."""
    open: Callable[[dict[str, Any]], AbstractAsyncContextManager[ByteStream]]
    """A stream to it that began with this request; closed, whatever is still on its way, with the block."""


Sources = Callable[[], Sequence[Source]]
"""Those there are now, the best first. Asked again whenever one fails."""
Verify = Callable[[tuple[Path, ...]], Awaitable[Fingerprint]]
"""The fingerprint of these files; raises ModelError where they are no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    stall_s: float = FETCH_STALL_S
    manifest_s: float = FETCH_MANIFEST_S
    pause_s: float = FETCH_PAUSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model, or some files of it."""

    fingerprint: Fingerprint
    name: str
    """For people."""
    size_bytes: int | None = None
    """Of all its files, where that is known: a source that claims another size is not believed."""
    shards: frozenset[int] | None = None
    """Which of its files, counted from 0; None for all. Some alone have no fingerprint to check them by."""


async def fetch(
    wanted: Wanted,
    folder: Path,
    *,
    sources: Sources,
    verify: Verify,
    progress: ProgressSink,
    events: EventSink,
    digests: Digests | None = None,
    times: FetchTimes | None = None,
) -> tuple[Path, ...]:
    """The model's files in `folder`, in order. Raises DownloadFailed, and keeps what came until then."""
    waits = Event(kind="fetch", text=f"{wanted.name} is being fetched by another node of this machine")
    key = hashlib.sha256(wanted.fingerprint.encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(incoming.clean, folder, now=time.time())
        async with incoming.resumable(folder, key, waiting=lambda: events(waits)) as scratch:
            with closing(Disk(folder)) as disk:
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
                paths, pieces = await run.run()
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    except OSError as error:
        raise disk_failure(folder, error) from error
    if digests is not None and digests.piece_bytes == pieces.piece_bytes:
        await asyncio.to_thread(_remember, digests, wanted, paths, pieces)
    return paths


def _remember(digests: Digests, wanted: Wanted, paths: tuple[Path, ...], pieces: Manifest) -> None:
    """So that this node can offer the files without reading them again."""
    indices = sorted(wanted.shards) if wanted.shards is not None else range(len(pieces.files))
    for index, path in zip(indices, paths, strict=True):
        digests.remember(path, pieces.files[index].pieces)


class _NoRoom(SourceWrong):
    """What a source offers does not fit on the disk. Another one may tell a smaller, truer size."""


@dataclass(kw_only=True)
class _Fetch:
    """One fetch, over all its sources."""

    wanted: Wanted
    folder: Path
    scratch: Path
    disk: Disk
    sources: Sources
    verify: Verify
    progress: ProgressSink
    events: EventSink
    times: FetchTimes
    parts: dict[str, Part] = field(default_factory=dict)
    thrown_away: set[str] = field(default_factory=set)
    """Digests of manifests that turned out to be of something else."""
    wrong: set[str] = field(default_factory=set)
    """Names of sources that are asked no more."""
    failures: Counter[str] = field(default_factory=Counter)
    """Of a source since it last brought a byte that nobody had brought before."""
    failures_of_all: int = 0
    most_bytes: int = 0
    reason: str = "no node that can be reached has it"
    hint: str = _TRY_AGAIN

    async def run(self) -> tuple[tuple[Path, ...], Manifest]:
        while True:
            source = self._next_source()
            if self.failures[source.name]:
                await asyncio.sleep(self.times.pause_s)
            try:
                return await self._from(source)
            except SourceLost as error:
                self.failures[source.name] += 1
                self._failed(source, error)
            except SourceWrong as error:
                self.wrong.add(source.name)
                self._failed(source, error)

    def _next_source(self) -> Source:
        """The best of those that have failed least."""
        left = [
            source
            for source in self.sources()
            if source.name not in self.wrong and self.failures[source.name] < FETCH_TRIES
        ]
        if left and self.failures_of_all < FETCH_FAILURES:
            return min(left, key=lambda source: self.failures[source.name])
        raise DownloadFailed(f"{self.wanted.name} could not be fetched: {self.reason}", hint=self.hint)

    def _failed(self, source: Source, error: Exception) -> None:
        self.failures_of_all += 1
        self.reason = f"{source.name}: {error}"
        self.hint = _MAKE_ROOM if isinstance(error, _NoRoom) else _TRY_AGAIN
        self._say(str(error), source)

    def _say(self, what: str, source: Source) -> None:
        self.events(Event(kind="fetch", text=f"{self.wanted.name} from {source.name}: {what}"))

    async def _from(self, source: Source) -> tuple[tuple[Path, ...], Manifest]:
        told = await self._manifest(source)
        part = await self._part(told)
        await self._check_space(part)
        for index, file in part.files.items():
            if file.missing_bytes:
                await self._receive(source, part, index, file)
        await self._check(part)
        return await part.place(self.folder), part.manifest

    # -- what there is ------------------------------------------------------------------------------

    async def _manifest(self, source: Source) -> Manifest:
        request = {"ask": "manifest", "fingerprint": self.wanted.fingerprint}
        try:
            async with asyncio.timeout(self.times.manifest_s), self._ask(source, request) as inbox:
                told = manifest.parse(await self._after_hashing(source, inbox))
        except TimeoutError:
            raise SourceLost("it never came to tell what it has") from None
        if self.wanted.size_bytes not in (None, told.size_bytes):
            raise SourceWrong(f"its copy has {told.size_bytes:,} bytes, not {self.wanted.size_bytes:,}")
        if self.wanted.shards is not None and not self.wanted.shards <= set(range(len(told.files))):
            raise SourceWrong("its copy has fewer files")
        return told

    async def _after_hashing(self, source: Source, inbox: Inbox) -> dict[str, Any]:
        """The first line that is more than a sign of life."""
        hashed_bytes = 0
        for _ in range(FETCH_BEATS):
            message = await inbox.line(FETCH_MANIFEST_BYTES)
            _check_refusal(message)
            if "hashing" not in message:
                return message
            done = _count(message["hashing"], FETCH_SIZE_LIMIT_BYTES)
            inbox.pace.came(max(0, done - hashed_bytes))
            hashed_bytes = max(done, hashed_bytes)
            total_bytes = self.wanted.size_bytes or hashed_bytes
            self._tell(f"{source.name} reads its copy of {self.wanted.name}", hashed_bytes, total_bytes)
        raise SourceWrong("it tells of its hashing without an end")

    @asynccontextmanager
    async def _ask(self, source: Source, request: dict[str, Any]) -> AsyncIterator[Inbox]:
        try:
            async with AsyncExitStack() as stack:
                yield await self._open(source, request, stack)
        except (OSError, EOFError) as error:
            raise SourceLost(f"the connection broke ({error or type(error).__name__})") from error

    async def _open(self, source: Source, request: dict[str, Any], stack: AsyncExitStack) -> Inbox:
        try:
            async with asyncio.timeout(self.times.stall_s):
                stream = await stack.enter_async_context(source.open(request))
        except TimeoutError:
            raise SourceLost("it does not answer") from None
        except (OSError, EOFError, MeshError) as error:
            raise SourceLost(f"it cannot be reached ({error or type(error).__name__})") from error
        return Inbox(stream, stall_s=self.times.stall_s)

    async def _part(self, told: Manifest) -> Part:
        if told.digest in self.thrown_away:
            raise SourceWrong("it offers the same wrong copy")
        if told.digest not in self.parts:
            shards = self.wanted.shards if self.wanted.shards is not None else range(len(told.files))
            part = Part(self.scratch / told.digest[:32], told, self.disk, frozenset(shards))
            total_bytes = part.missing_bytes
            await part.open(
                self.wanted.fingerprint,
                self.folder,
                lambda done: self._tell(f"Checking {self.wanted.name}", done, total_bytes),
            )
            self.parts[told.digest] = part
        return self.parts[told.digest]

    async def _check_space(self, part: Part) -> None:
        need = part.missing_bytes + FETCH_SPARE_BYTES
        facts = await self.disk.run(os.statvfs, self.folder)
        free = facts.f_bavail * facts.f_frsize
        if part.missing_bytes and free < need:
            raise _NoRoom(
                f"{_shown(part.missing_bytes)} are still to come, "
                f"and {self.folder} has room for {_shown(max(0, free - FETCH_SPARE_BYTES))}"
            )

    # -- bytes --------------------------------------------------------------------------------------

    async def _receive(self, source: Source, part: Part, index: int, file: PartFile) -> None:
        while file.missing_bytes:
            # A piece that somebody else began may be damaged through no fault of this source. It is asked
            # for the whole piece at once: after another one's turn the blame would be unclear again.
            answers_from = file.offset if file.offset == file.piece_start else file.piece_end
            try:
                await self._receive_rest(source, part, index, file)
            except PieceDamaged:
                if file.offset >= answers_from:
                    raise SourceWrong("a piece arrived damaged and was thrown away") from None
                self._say("a piece that another one began was damaged and is fetched again", source)

    async def _receive_rest(self, source: Source, part: Part, index: int, file: PartFile) -> None:
        request = {
            "ask": "bytes",
            "fingerprint": self.wanted.fingerprint,
            "file": index,
            "size": file.entry.size_bytes,
            "offset": file.offset,
            "length": file.missing_bytes,
        }
        async with self._ask(source, request) as inbox:
            message = await inbox.line(_ANSWER_BYTES)
            _check_refusal(message)
            if message != {"bytes": file.missing_bytes}:
                raise SourceWrong("it answers another question than it was asked")
            while file.missing_bytes:
                await self._receive_chunk(source, part, inbox, file)

    async def _receive_chunk(self, source: Source, part: Part, inbox: Inbox, file: PartFile) -> None:
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
            raise SourceLost("it broke off")

    def _count_progress(self, source: Source, part: Part) -> None:
        total_bytes = sum(file.entry.size_bytes for file in part.files.values())
        done_bytes = total_bytes - part.missing_bytes
        if done_bytes > self.most_bytes:
            self.most_bytes = done_bytes
            self.failures[source.name] = 0
        self._tell(f"Fetching {self.wanted.name}", done_bytes, total_bytes)

    def _tell(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.progress(Progress(what=what, done=done_bytes, total=total_bytes, unit="bytes"))

    # -- the whole ----------------------------------------------------------------------------------

    async def _check(self, part: Part) -> None:
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


def _check_refusal(message: dict[str, Any]) -> None:
    if "refused" in message:
        text = str(message["refused"])[:_REASON_CHARACTERS]
        # Shown to people, in terminals among other places.
        raise SourceLost("".join(each if each.isprintable() else "?" for each in text))


def _count(value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise SourceWrong("it sent something unreadable")
    return value


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
