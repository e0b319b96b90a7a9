"""Which of a plan's engines answers a request: one that has read most of its text already, or the idlest.

Engines of one plan (lanes) have caches of their own, so a conversation goes on where it began.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from mesh_llm.gateway.engine_connection import EngineError
from mesh_llm.gateway.upstream import Upstream
from mesh_llm.gateway.warm_prefixes import Prompt, WarmPrefixes, read_prompt

_SHUN_S = 1.0
"""That an engine which broke off gets no new requests, if others do: whether it died is told by then."""
_HEAD_ENDS = b"\r\n\r\n"


@dataclass(slots=True, kw_only=True)
class _Lane:
    slots: int
    is_open: bool = True
    taken: int = 0
    shunned_until: float = 0.0


class Lanes:
    """The engines of one plan, by their addresses, the oldest first."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._warm = WarmPrefixes()

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
        self._warm.forget(url)

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
        prompt = read_prompt(request.partition(_HEAD_ENDS)[2] or request)
        url = self._choose(prompt)
        lane = self._lanes[url]
        self._warm.note(url, prompt)
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

    def _choose(self, prompt: Prompt) -> str:
        now = time.monotonic()
        lanes = {url: self._lanes[url] for url in self.urls}
        sound = {url: lane for url, lane in lanes.items() if lane.shunned_until <= now} or lanes
        free = {url: lane for url, lane in sound.items() if lane.taken < lane.slots} or sound
        read = self._warm.sizes(prompt)
        warmest = max(free, key=lambda url: read.get(url, 0))
        if 2 * read.get(warmest, 0) > prompt.size:
            return warmest
        return min(free, key=lambda url: free[url].taken)


def lane_of(upstream: Upstream, request: bytes, *, computes: bool) -> AbstractContextManager[Upstream]:
    """The engine to ask, for the length of the block."""
    if upstream.lanes is None or not computes:
        return nullcontext(upstream)
    return upstream.lanes.take(upstream, request)
