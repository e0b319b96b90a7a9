"""What happens on the node, for all who watch: looked at once, written down once.

An event stream begins with a `snapshot`; `status`, `sample`, `event` and `progress`
follow as there is news. While nobody watches nothing is looked at; only what is told
(samples, events, progress) is kept, within bounds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mesh_llm.defaults import CONSOLE_BEAT_S, CONSOLE_SAMPLE_S, CONSOLE_SAMPLES
from mesh_llm.types import Event, Progress

CONSOLE_TICK_S = 1.0
"""Between two looks at the node while somebody watches: what a person can follow."""
CONSOLE_EVENTS = 100
"""Kept to be shown: what happened in a busy hour. A hundred lines take 20 KB."""
CONSOLE_PROGRESS = 16
"""Kept to be shown, by what it is about; more does not happen at once."""
CONSOLE_WATCHERS = 64
"""Pages and programs that follow one node: a screen in every room."""
CONSOLE_BEHIND_BYTES = 2 << 20
"""That wait for one who follows: half a minute of a large mesh. Who is further behind starts afresh."""
CONSOLE_BEHIND_S = 30.0
"""For one who follows to take what was written; a sleeping laptop does not."""


BEAT = b":\n\n"
"""A comment: a sign of life."""


class Crowded(Exception):
    """There are as many who watch as may."""


class FeedWatcher:
    """One who watches: what is told goes straight to the connection, and waits in its buffer alone.

    One that does not read is dropped. It comes again, and gets a fresh snapshot.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._behind_since: float | None = None

    def give(self, chunk: bytes, now: float) -> None:
        if self._transport.is_closing():
            return
        waiting = self._transport.get_write_buffer_size()
        self._behind_since = (self._behind_since or now) if waiting else None
        late = self._behind_since is not None and now - self._behind_since > CONSOLE_BEHIND_S
        if late or (waiting and waiting + len(chunk) > CONSOLE_BEHIND_BYTES):
            self._transport.abort()
        else:
            self._transport.write(chunk)


class Feed:
    def __init__(
        self,
        status: Callable[[], Awaitable[Mapping[str, Any]]],
        *,
        catch_up: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`catch_up`: tells what was not told while nobody watched."""
        self._status = status
        self._catch_up = catch_up
        self._clock = clock
        self._samples: deque[bytes] = deque(maxlen=CONSOLE_SAMPLES)
        self._events: deque[bytes] = deque(maxlen=CONSOLE_EVENTS)
        self._progress: dict[str, bytes] = {}
        self._watchers: set[FeedWatcher] = set()
        self._watched = asyncio.Event()
        self.ended = asyncio.Event()
        """With the node."""
        self._looking = asyncio.Lock()
        self._document = b""
        self._told = b""
        """The document that all who watch have; one who has just come may have a newer one."""
        self._looked_at = self._spread_at = 0.0

    # -- what is told to it --------------------------------------------------------------------

    def event(self, event: Event) -> None:
        entry = _written({"t": round(self._clock(), 3), "kind": event.kind, "text": event.text})
        self._events.append(entry)
        self._spread(b"event", entry)

    def sample(self, sample: Mapping[str, Any]) -> None:
        entry = _written(sample)
        self._samples.append(entry)
        self._spread(b"sample", entry)

    def drop_oldest_sample(self) -> None:
        self._samples.popleft()

    def begin_with(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Better ones, in place of those that are here."""
        self._samples = deque(map(_written, samples), maxlen=CONSOLE_SAMPLES)

    def progress(self, step: Progress) -> None:
        entry = _written({"what": step.what, "done": step.done, "total": step.total, "unit": step.unit})
        self._progress.pop(step.what, None)
        if step.done < step.total or not step.total:
            self._progress[step.what] = entry
            if len(self._progress) > CONSOLE_PROGRESS:
                del self._progress[next(iter(self._progress))]
        self._spread(b"progress", entry)

    # -- who watches ---------------------------------------------------------------------------

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    async def run(self) -> None:
        """Looks at the node while somebody watches; returns only by being cancelled."""
        while True:
            await self._watched.wait()
            await asyncio.sleep(CONSOLE_TICK_S)
            if self._watchers and await self._look() != self._told:
                self._told = self._document
                self._spread(b"status", self._told)
            elif time.monotonic() - self._spread_at >= CONSOLE_BEAT_S:
                self._give(BEAT)

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= CONSOLE_WATCHERS

    @asynccontextmanager
    async def watched(self, transport: asyncio.Transport) -> AsyncIterator[None]:
        """Tell a connection what there is, and then all that happens. It speaks HTTP in chunks."""
        if self._catch_up is not None and not self._watchers:
            await self._catch_up()
        await self._look()
        if self.is_full:
            raise Crowded
        watcher = FeedWatcher(transport)
        # Together, with nothing in between: whatever is told from here on follows the snapshot.
        watcher.give(_chunk(_frame(b"snapshot", self._snapshot())), time.monotonic())
        if not self._watchers:
            self._told = self._document
        self._watchers.add(watcher)
        self._watched.set()
        try:
            yield
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._watched.clear()

    def _snapshot(self) -> bytes:
        parts = (
            b'{"status":' + self._document,
            b'"history":{"interval_s":%g,"samples":[%s]}' % (CONSOLE_SAMPLE_S, b",".join(self._samples)),
            b'"events":[' + b",".join(self._events) + b"]",
            b'"progress":[' + b",".join(self._progress.values()) + b"]}",
        )
        return b",".join(parts)

    async def _look(self) -> bytes:
        """The status document, no older than a tick, however many ask at once."""
        async with self._looking:
            now = time.monotonic()
            if now - self._looked_at >= 0.9 * CONSOLE_TICK_S or not self._document:
                self._document = _written(await self._status())
                self._looked_at = now
            return self._document

    def _spread(self, kind: bytes, document: bytes) -> None:
        if self._watchers:
            self._give(_frame(kind, document))

    def _give(self, frame: bytes) -> None:
        chunk, now = _chunk(frame), time.monotonic()
        self._spread_at = now
        for watcher in self._watchers:
            watcher.give(chunk, now)


def _written(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _chunk(frame: bytes) -> bytes:
    """As HTTP writes it: once for all, and past the server's own writer, which would do it for each."""
    return b"%x\r\n%s\r\n" % (len(frame), frame)


def _frame(kind: bytes, document: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind, document)
