"""Which of a plan's engines answers a request: one that has read most of its text already, or the idlest.

Engines of one plan (lanes) have caches of their own. What each has read lately is remembered by hashes of
its requests' beginnings, so that a conversation goes on where it began.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from mesh_llm.gateway.engine_connection import EngineError
from mesh_llm.gateway.upstream import Upstream

_BLOCK_BYTES = 256
"""Of a text that are looked at together: some sixty tokens."""
_BLOCKS_MOST = 4096
"""Of one text: a megabyte."""
_REMEMBERED = 1 << 16
"""Blocks of all texts that one engine has read: some megabytes of memory, and more than caches hold."""
_WARM = 0.5
"""So much of a request's text, at least, makes it the same conversation: many share the first words."""
_SHUN_S = 1.0
"""That an engine which broke off gets no new requests, if others do: whether it died is told by then."""
_TEXTS = (b'"messages"', b'"prompt"', b'"input"', b'"content"')
"""Where the text begins in a request's body; what comes before it may be different each time."""


@dataclass(slots=True, kw_only=True)
class _Lane:
    slots: int
    is_open: bool = True
    taken: int = 0
    read: dict[bytes, None] = field(default_factory=dict)
    """Beginnings of texts, the latest last."""
    shunned_until: float = 0.0

    def knows(self, blocks: list[bytes]) -> int:
        """Of a text's blocks, from its first on."""
        return next((index for index, block in enumerate(blocks) if block not in self.read), len(blocks))

    def learn(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self.read.pop(block, None)
            self.read[block] = None
        for old in list(self.read)[: max(0, len(self.read) - _REMEMBERED)]:
            del self.read[old]


class Lanes:
    """The engines of one plan, by their addresses, the oldest first."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def open(self, url: str, *, slots: int) -> None:
        """It takes requests from now on."""
        self._lanes[url] = _Lane(slots=slots)

    def close(self, url: str) -> None:
        """It takes no more; those that it has go on."""
        self._lanes[url].is_open = False

    def reopen(self, url: str) -> None:
        self._lanes[url].is_open = True

    def remove(self, url: str) -> None:
        self._lanes.pop(url, None)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of those that take requests."""
        return tuple(url for url, lane in self._lanes.items() if lane.is_open)

    def taken(self, url: str) -> int:
        """Requests that it has now."""
        lane = self._lanes.get(url)
        return lane.taken if lane is not None else 0

    @contextmanager
    def take(self, upstream: Upstream, request: bytes) -> Iterator[Upstream]:
        """The engine for a request that has its turn, until the end of the block."""
        if not self.urls:
            yield upstream
            return
        blocks = _blocks(request)
        url = self._choose(blocks)
        lane = self._lanes[url]
        lane.learn(blocks)
        lane.taken += 1
        engine = replace(upstream, url=url)
        try:
            yield engine
        except EngineError as error:
            lane.shunned_until = time.monotonic() + _SHUN_S
            error.engine = engine
            raise
        finally:
            lane.taken -= 1

    def _choose(self, blocks: list[bytes]) -> str:
        now = time.monotonic()
        lanes = {url: self._lanes[url] for url in self.urls}
        sound = {url: lane for url, lane in lanes.items() if lane.shunned_until <= now} or lanes
        free = {url: lane for url, lane in sound.items() if lane.taken < lane.slots} or sound
        known = {url: lane.knows(blocks) for url, lane in free.items()}
        warmest = max(known, key=lambda url: known[url])
        if known[warmest] > _WARM * len(blocks):
            return warmest
        return min(free, key=lambda url: free[url].taken)


def lane_of(upstream: Upstream, request: bytes, *, computes: bool) -> AbstractContextManager[Upstream]:
    """The engine to ask, for the length of the block."""
    if upstream.lanes is None or not computes:
        return nullcontext(upstream)
    return upstream.lanes.take(upstream, request)


def _blocks(request: bytes) -> list[bytes]:
    """Hashes of a text's beginnings, each one block longer than the last."""
    start = next((at for word in _TEXTS if (at := request.find(word)) >= 0), 0)
    text = request[start : start + _BLOCK_BYTES * _BLOCKS_MOST]
    digest, blocks = hashlib.blake2b(digest_size=16), []
    for at in range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        digest.update(text[at : at + _BLOCK_BYTES])
        blocks.append(digest.digest())
    return blocks
