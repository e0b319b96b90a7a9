"""Asks peers for what this node lacks of a model: one after the other, until one has given all of it.

What is the same for whole files and for some layers: whom to ask next, when to
ask no more, and what a source says that it has.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mesh_llm.defaults import FETCH_MANIFEST_BYTES, FETCH_SIZE_LIMIT_BYTES, FETCH_SPARE_BYTES, FETCH_STALL_S
from mesh_llm.errors import DownloadFailed, MeshError
from mesh_llm.frozen import frozen
from mesh_llm.models import incoming_folders
from mesh_llm.models.part_file import Disk, disk_failure
from mesh_llm.peer_fetch import manifest
from mesh_llm.peer_fetch.channel import ByteStream, Inbox, SourceLost, SourceWrong
from mesh_llm.peer_fetch.manifest import Manifest
from mesh_llm.types import Event, EventSink, Fingerprint, Progress, ProgressSink

FETCH_MANIFEST_S = 60 * 60.0
"""A source hashes its files the first time it is asked: 700 GB from an SSD in three quarters of an hour."""
FETCH_BEATS = 2000
"""Signs of life of a source that hashes: more than twice as many as it sends in FETCH_MANIFEST_S."""
FETCH_TRIES = 3
"""Of one source, without a byte more than before: after that its node is asked no more."""
FETCH_FAILURES = 100
"""Of all sources together: a fetch that only ever breaks off ends, and keeps what it has."""
FETCH_PAUSE_S = 1.0
"""Before a source is tried again: a peer that restarts needs about as long."""


T = TypeVar("T")

_ANSWER_BYTES = 4096
"""Of the line that a file's bytes begin with."""
_REASON_CHARACTERS = 200
_TRY_AGAIN = "what has arrived is kept; it continues when a node that has the model is back"
_MAKE_ROOM = "free some space, or name another folder in MESH_LLM_MODELS"


@frozen
class Source:
    """A peer that has the model."""

    name: str
    """For people; different for each."""
    open: Callable[[dict[str, Any]], AbstractAsyncContextManager[ByteStream]]
    """A stream to it that began with this request; closed, whatever is still on its way, with the block."""


Sources = Callable[[], Sequence[Source]]
"""Those there are now, the best first. Asked again whenever one fails."""


@frozen
class FetchTimes:
    stall_s: float = FETCH_STALL_S
    manifest_s: float = FETCH_MANIFEST_S
    pause_s: float = FETCH_PAUSE_S


@frozen
class Wanted:
    """A model, or some files of it."""

    fingerprint: Fingerprint
    name: str
    """For people."""
    digest: str = ""
    """Of the copy that its owner chose (`Manifest.digest`): no other is taken. Empty: not known."""
    size_bytes: int | None = None
    """Of all its files, where that is known: a source that claims another size is not believed."""
    shards: frozenset[int] | None = None
    """Which of its files, counted from 0; None for all. Some alone have no fingerprint to check them by."""


class NoRoom(SourceWrong):
    """What a source offers does not fit on the disk. Another one may tell a smaller, truer size."""


def fetch_key(fingerprint: Fingerprint) -> str:
    """Names the folder of a fetch."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:32]


@asynccontextmanager
async def own_folder(
    wanted: Wanted, place: Path, *, models: Path, events: EventSink
) -> AsyncIterator[tuple[Path, Disk]]:
    """The folder of one fetch in `place`, held against all others, and a thread for the work on its files."""
    waits = Event(kind="fetch", text=f"{wanted.name} is being fetched by another node on this machine")
    try:
        place.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(incoming_folders.clean, place, now=time.time())
        key = fetch_key(wanted.fingerprint)
        async with incoming_folders.resumable(place, key, waiting=lambda: events(waits)) as own:
            with closing(Disk(models)) as disk:
                yield own, disk
    except OSError as error:
        raise disk_failure(models, error) from error


@dataclass(kw_only=True)
class SourceSearch:
    """One fetch, over all its sources."""

    wanted: Wanted
    folder: Path
    disk: Disk
    sources: Sources
    progress: ProgressSink
    events: EventSink
    times: FetchTimes
    wrong: set[str] = field(default_factory=set)
    """Names of sources that are asked no more."""
    failures: Counter[str] = field(default_factory=Counter)
    """Of a source since it last brought a byte that nobody had brought before."""
    failures_of_all: int = 0
    most_bytes: int = 0
    reason: str = "no node that can be reached has it"
    hint: str = _TRY_AGAIN

    async def from_any(self, take: Callable[[Source], Awaitable[T]]) -> T:
        """What `take` gets from a source; raises DownloadFailed when all have failed."""
        while True:
            source = self._next_source()
            if self.failures[source.name]:
                await asyncio.sleep(self.times.pause_s)
            try:
                return await take(source)
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
        self.hint = _MAKE_ROOM if isinstance(error, NoRoom) else _TRY_AGAIN
        self.say(str(error), source)

    def say(self, what: str, source: Source) -> None:
        self.events(Event(kind="fetch", text=f"{self.wanted.name} from {source.name}: {what}"))

    def tell(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.progress(Progress(what=what, done=done_bytes, total=total_bytes, unit="bytes"))

    def came(self, source: Source, done_bytes: int) -> None:
        """So many bytes are here now: a source that brings more than there were is as good as new."""
        if done_bytes > self.most_bytes:
            self.most_bytes = done_bytes
            self.failures[source.name] = 0

    # -- questions ----------------------------------------------------------------------------------

    async def manifest(self, source: Source) -> Manifest:
        request = {"ask": "manifest", "fingerprint": self.wanted.fingerprint}
        try:
            async with asyncio.timeout(self.times.manifest_s), self._ask(source, request) as inbox:
                told = manifest.parse(await self._after_hashing(source, inbox))
        except TimeoutError:
            raise SourceLost("it did not say what it has") from None
        if self.wanted.size_bytes not in (None, told.size_bytes):
            raise SourceWrong(f"its copy has {told.size_bytes:,} bytes, not {self.wanted.size_bytes:,}")
        if self.wanted.digest not in ("", told.digest):
            # Fingerprints are made of samples: of two copies with the same one, only this tells them apart.
            raise SourceWrong("its copy is not the one that the mesh's owner chose")
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
            self.tell(f"{source.name} reads its copy of {self.wanted.name}", hashed_bytes, total_bytes)
        raise SourceWrong("it did not finish its hashing")

    @asynccontextmanager
    async def bytes_of(self, source: Source, where: dict[str, Any], length: int) -> AsyncIterator[Inbox]:
        """The bytes that `where` describes, `length` of them, to be read from the inbox."""
        request = {"fingerprint": self.wanted.fingerprint, **where}
        async with self._ask(source, request) as inbox:
            message = await inbox.line(_ANSWER_BYTES)
            _check_refusal(message)
            if message != {"bytes": length}:
                raise SourceWrong("it answered another question")
            yield inbox

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

    # -- room ---------------------------------------------------------------------------------------

    async def check_space(self, missing_bytes: int) -> None:
        facts = await self.disk.run(os.statvfs, self.folder)
        free = facts.f_bavail * facts.f_frsize
        if missing_bytes and free < missing_bytes + FETCH_SPARE_BYTES:
            raise NoRoom(
                f"{_shown(missing_bytes)} are still to come, "
                f"but {self.folder} has room for {_shown(max(0, free - FETCH_SPARE_BYTES))}"
            )


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
