"""Whose turn it is: a bounded, fair queue in front of an engine's slots.

    async with turns.take("10.0.0.7", name="nightly"):
        ...        # one of the engine's slots is ours until the end of the block

A free slot goes to the client that holds the fewest; among equals round robin, within one client
first come, first served. So whoever has sixty requests waiting delays another client's only one
by no more than the turn that ends next. A client that gives its requests names divides its own turns
between them in the same way; however many it invents, they are no more turns. Requests whose
answers have begun already go before all others; there are at most as many as slots, and whoever
pretends to have more gets no more.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from mesh_llm.defaults import (
    GATEWAY_QUEUE_LIMIT,
    GATEWAY_QUEUE_PER_CLIENT,
    GATEWAY_RETRY_AFTER_LIMIT_S,
    GATEWAY_TURN_GUESS_S,
    GATEWAY_TURN_WAIT_S,
)

_NEWEST_WEIGHT = 0.2
"""Of the turn that has just ended in the estimate of the next one's length: the last ten or so count."""


class TurnRefused(Exception):
    """The queue is full."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; it has room again in about {retry_after_s} s")
        self.retry_after_s = retry_after_s


class TurnLate(Exception):
    """It has waited for too long."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"the request has waited {waited_s:.3g} s for its turn at the engine")
        self.waited_s = waited_s


_T = TypeVar("_T")
_Waiter = asyncio.Future[None]
_Line = dict[_Waiter, None]
_Who = tuple[str, str]
"""A client, and which of its own names."""


class _Held:
    """Turns that are taken."""

    def __init__(self) -> None:
        self._clients: Counter[str] = Counter()
        self._names: Counter[_Who] = Counter()

    def add(self, who: _Who) -> None:
        self._clients[who[0]] += 1
        self._names[who] += 1

    def remove(self, who: _Who) -> None:
        # What has come to nothing must not stay: names are the clients' to choose.
        self._clients -= Counter((who[0],))
        self._names -= Counter((who,))

    def by_client(self, client: str) -> int:
        return self._clients[client]

    def by_name(self, client: str) -> Callable[[str], int]:
        return lambda name: self._names[client, name]


class _Lane:
    """Waiting requests by client and name. The first of each is the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[str, _Line]] = {}
        self.size = 0

    def count(self, client: str) -> int:
        return sum(map(len, self._clients.get(client, {}).values()))

    def add(self, who: _Who, waiter: _Waiter, *, last: _Who) -> None:
        """`last`: who had the last turn, and comes after one who has just arrived.

        Only that one does: who comes anew after each turn would otherwise always be next.
        """
        client, name = who
        names = _enter(self._clients, client, {}, last[0])
        _enter(names, name, {}, last[1] if last[0] == client else None)[waiter] = None
        self.size += 1

    def remove(self, who: _Who, waiter: _Waiter) -> None:
        client, name = who
        names = self._clients.get(client, {})
        if waiter not in names.get(name, {}):
            return
        del names[name][waiter]
        if not names[name]:
            del names[name]
        if not names:
            del self._clients[client]
        self.size -= 1

    def next(self, held: _Held) -> tuple[_Who, _Waiter]:
        """Takes out whose turn it is; the lane must not be empty."""
        client = min(self._clients, key=held.by_client)
        names = self._clients.pop(client)
        name = min(names, key=held.by_name(client))
        line = names.pop(name)
        waiter = next(iter(line))
        del line[waiter]
        if line:
            names[name] = line
        if names:
            self._clients[client] = names
        self.size -= 1
        return (client, name), waiter


def _enter(ring: dict[str, _T], key: str, empty: _T, last: str | None) -> _T:
    if key not in ring:
        ring[key] = empty
        if last in ring:
            ring[last] = ring.pop(last)
    return ring[key]


class Turns:
    def __init__(
        self,
        slots: int,
        *,
        limit: int = GATEWAY_QUEUE_LIMIT,
        per_client: int = GATEWAY_QUEUE_PER_CLIENT,
        wait_s: float = GATEWAY_TURN_WAIT_S,
    ) -> None:
        self._slots = max(1, slots)
        self._limit = limit
        self._per_client = per_client
        self._wait_s = wait_s
        self._held = _Held()
        self._taken = 0
        self._last: _Who = "", ""
        """Whose turn came last."""
        self._fresh = _Lane()
        self._resumed = _Lane()
        self._resumed_in_a_row = 0
        """Granted while others waited."""
        self._lasts_s = GATEWAY_TURN_GUESS_S
        self.on_wait: Callable[[float], None] = lambda _: None
        """Told of each request that was let in, however its wait ended: how long that was."""

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def waiting(self) -> int:
        return self._fresh.size + self._resumed.size

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def free(self) -> bool:
        """A turn can be had without waiting."""
        return self._taken < self._slots

    def resize(self, slots: int) -> None:
        """Turns that were taken stay so, even if they are now too many."""
        self._slots = max(1, slots)
        self._fill()

    @asynccontextmanager
    async def take(
        self, client: str, *, name: str = "", resumed: bool = False, within_s: float | None = None
    ) -> AsyncIterator[None]:
        """Wait for a turn, and keep it until the end of the block. Raises `TurnRefused` or `TurnLate`.

        `within_s`: where it has less time than the queue gives.
        """
        who = client, name
        if self.free:
            # Nobody waits then.
            self._grant(who)
            self.on_wait(0.0)
        else:
            wait_s = self._wait_s if within_s is None else min(within_s, self._wait_s)
            await self._wait(who, self._resumed if resumed else self._fresh, wait_s)
        since_s = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            lasted_s = asyncio.get_running_loop().time() - since_s
            self._lasts_s += _NEWEST_WEIGHT * (lasted_s - self._lasts_s)
            self._give_back(who)

    async def _wait(self, who: _Who, lane: _Lane, wait_s: float) -> None:
        if lane.size >= self._limit or lane.count(who[0]) >= self._per_client:
            raise TurnRefused(self.retry_after_s)
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        waiter = loop.create_future()
        lane.add(who, waiter, last=self._last)
        try:
            async with asyncio.timeout(wait_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                # It was granted, and in the same moment not wanted any more.
                self._give_back(who)
            else:
                lane.remove(who, waiter)
            if isinstance(error, TimeoutError):
                raise TurnLate(wait_s) from None
            raise
        finally:
            self.on_wait(loop.time() - since_s)

    @property
    def retry_after_s(self) -> int:
        """After which there may be room: when as many turns have ended as wait now."""
        seconds = math.ceil(self.waiting * self._lasts_s / self._slots)
        return min(max(seconds, 1), GATEWAY_RETRY_AFTER_LIMIT_S)

    def _grant(self, who: _Who) -> None:
        self._taken += 1
        self._held.add(who)
        self._last = who

    def _give_back(self, who: _Who) -> None:
        self._taken -= 1
        self._held.remove(who)
        self._fill()

    def _fill(self) -> None:
        while self.free and self.waiting:
            who, waiter = self._next_lane().next(self._held)
            # One that was cancelled has left, although its task does not know yet.
            if not waiter.cancelled():
                self._grant(who)
                waiter.set_result(None)

    def _next_lane(self) -> _Lane:
        if not self._resumed.size or (self._fresh.size and self._resumed_in_a_row >= self._slots):
            self._resumed_in_a_row = 0
            return self._fresh
        self._resumed_in_a_row += 1 if self._fresh.size else 0
        return self._resumed
