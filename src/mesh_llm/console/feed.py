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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mesh_llm.defaults import (
    CONSOLE_EVENTS,
    CONSOLE_PROGRESS,
    CONSOLE_QUEUE_BYTES,
    CONSOLE_QUEUE_FRAMES,
    CONSOLE_SAMPLE_S,
    CONSOLE_SAMPLES,
    CONSOLE_TICK_S,
    CONSOLE_WATCHERS,
)
from mesh_llm.types import Event, Progress


class Crowded(Exception):
    """There are as many who watch as may."""


class Behind(Exception):
    """One who watches does not read, and has missed something."""


class Watcher:
    """Frames on their way to one who watches."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._behind = False
        self._news = asyncio.Event()

    def give(self, frame: bytes) -> None:
        full = len(self._frames) >= CONSOLE_QUEUE_FRAMES or self._bytes + len(frame) > CONSOLE_QUEUE_BYTES
        if full and self._frames:
            self._behind = True
            self._frames.clear()
        else:
            self._frames.append(frame)
            self._bytes += len(frame)
        self._news.set()

    async def take(self) -> bytes:
        """All that there is, as soon as there is something."""
        await self._news.wait()
        self._news.clear()
        if self._behind:
            raise Behind
        frames = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        return frames


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
        self._watchers: set[Watcher] = set()
        self._watched = asyncio.Event()
        self._looking = asyncio.Lock()
        self._document = b""
        self._looked_at = -CONSOLE_TICK_S

    # -- what is told to it --------------------------------------------------------------------

    def event(self, event: Event) -> None:
        entry = _written({"t": round(self._clock(), 3), "kind": event.kind, "text": event.text})
        self._events.append(entry)
        self._spread(b"event", entry)

    def sample(self, sample: Mapping[str, Any]) -> None:
        entry = _written(sample)
        self._samples.append(entry)
        self._spread(b"sample", entry)

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
            before = self._document
            if self._watchers and await self._look() != before:
                self._spread(b"status", self._document)

    async def snapshot(self) -> bytes:
        """The first frame for one who begins to watch right now: whatever is told from here on follows it."""
        if self._catch_up is not None and not self._watchers:
            await self._catch_up()
        await self._look()
        parts = (
            b'{"status":' + self._document,
            b'"history":{"interval_s":%g,"samples":[%s]}' % (CONSOLE_SAMPLE_S, b",".join(self._samples)),
            b'"events":[' + b",".join(self._events) + b"]",
            b'"progress":[' + b",".join(self._progress.values()) + b"]}",
        )
        return _frame(b"snapshot", b",".join(parts))

    @contextmanager
    def watched(self) -> Iterator[Watcher]:
        if len(self._watchers) >= CONSOLE_WATCHERS:
            raise Crowded
        watcher = Watcher()
        self._watchers.add(watcher)
        self._watched.set()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._watched.clear()

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
            frame = _frame(kind, document)
            for watcher in self._watchers:
                watcher.give(frame)


def _written(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _frame(kind: bytes, document: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind, document)
