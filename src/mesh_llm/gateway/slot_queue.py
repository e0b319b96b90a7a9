"""Whose turn it is: a bounded, fair queue in front of an engine's slots.

    async with turns.take("10.0.0.7", name="nightly"):
        ...        # one of the engine's slots is ours until the end of the block

A free slot goes to the account (a node, or all who came in by one client's token) that holds the
fewest; among equals round robin. Within an account it goes to the client that holds the fewest, in the
same way, and within a client to one of the names that it gives its requests; within one name first
come, first served. So whoever has sixty requests waiting delays another's only one by no more than the
turn that ends next, and however many clients or names somebody invents, they are no more turns.
Requests whose answers have begun already go before all others: a lost engine leaves as many as it has
slots. Other nodes' word is taken for no more than that, so whoever says it of all its requests soon has
its share again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

GATEWAY_QUEUE_LIMIT = 256
"""Requests that wait for one of the engine's slots: those at the end wait for minutes already."""
GATEWAY_QUEUE_PER_ACCOUNT = 128
"""Of them from one node, or from all who came in by one client's token: nobody fills the queue alone."""
GATEWAY_QUEUE_PER_CLIENT = 64
"""Of them from one client: a swarm of agents fits in, and three others like it find room beside them."""
GATEWAY_TURN_WAIT_S = 300.0
"""For a slot: half of GATEWAY_SILENCE_S, which leaves the other half to the prompt."""
GATEWAY_TURN_GUESS_S = 5.0
"""That a turn takes, before one has ended: a short answer on a slow machine."""
GATEWAY_RETRY_AFTER_LIMIT_S = 60
"""Guesses about a queue reach no further, and clients that read the header wait no longer."""


_NEWEST_WEIGHT = 0.2
"""Of the turn that has just ended in the estimate of the next one's length: the last ten or so count."""
_TURNS_BETWEEN_LOSSES = 10
"""Of each slot, in which an account's requests go first once for each: engines are lost less often."""


class QueueFull(Exception):
    """The queue is full."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; try again in about {retry_after_s} s")
        self.retry_after_s = retry_after_s


class SlotWaitExpired(Exception):
    """It has waited for too long."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"the request has waited {waited_s:.3g} s for a slot of the engine")
        self.waited_s = waited_s


_Waiter = asyncio.Future[None]
_Who = tuple[str, ...]
"""An account, one of its clients, and which of that one's names; or the first of these."""
_Next = tuple[_Who, _Waiter, bool]
"""Whose request has its turn, and whether its answer has begun."""


class _Held:
    """Turns that are taken."""

    def __init__(self) -> None:
        self._counts: dict[_Who, int] = {}

    def add(self, who: _Who) -> None:
        for level in _levels(who):
            self._counts[level] = self.by(level) + 1

    def remove(self, who: _Who) -> None:
        for level in _levels(who):
            left = self._counts.pop(level) - 1
            # What has come to nothing must not stay: names are the clients' to choose.
            if left:
                self._counts[level] = left

    def by(self, who: _Who) -> int:
        return self._counts.get(who, 0)


def _levels(who: _Who) -> tuple[_Who, ...]:
    return who[:1], who[:2], who


class _Lane:
    """Waiting requests by who wants them: lanes in lanes, and in the innermost the requests themselves.

    The first of each is the one whose last turn is longest ago.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Lane] = {}
        self._waiters: dict[_Waiter, bool] = {}
        """And whether their answers have begun."""
        self.size = 0
        self.resumed = 0
        """Of them, those whose answers have begun."""

    def count(self, who: _Who, *, resumed: bool) -> int:
        """Of those who wait, all of `who`'s that have begun, or all others of `who`'s."""
        if not who:
            return self.resumed if resumed else self.size - self.resumed
        part = self._parts.get(who[0])
        return 0 if part is None else part.count(who[1:], resumed=resumed)

    def add(self, who: _Who, waiter: _Waiter, *, resumed: bool, last: _Who) -> None:
        """`last`: who had the last turn, and comes after one who has just arrived.

        Only that one does: who comes anew after each turn would otherwise always be next.
        """
        self.size += 1
        self.resumed += resumed
        if not who:
            self._waiters[waiter] = resumed
            return
        if who[0] not in self._parts:
            self._parts[who[0]] = _Lane()
            if last and last[0] in self._parts:
                self._parts[last[0]] = self._parts.pop(last[0])
        below = last[1:] if last[:1] == who[:1] else ()
        self._parts[who[0]].add(who[1:], waiter, resumed=resumed, last=below)

    def remove(self, who: _Who, waiter: _Waiter, *, resumed: bool) -> bool:
        """Whether it was there."""
        if not who:
            found = waiter in self._waiters
            self._waiters.pop(waiter, None)
        else:
            part = self._parts.get(who[0])
            found = part is not None and part.remove(who[1:], waiter, resumed=resumed)
            if part is not None and not part.size:
                del self._parts[who[0]]
        if found:
            self.size -= 1
            self.resumed -= resumed
        return found

    def next(self, held: _Held, may_go_first: Callable[[str], bool], above: _Who = ()) -> _Next:
        """Takes out whose turn it is; the lane must not be empty.

        `may_go_first`: whether an account's requests do whose answers have begun.
        """
        if self._waiters:
            first = self.resumed > 0 and may_go_first(above[0])
            waiter = next(waiter for waiter, resumed in self._waiters.items() if resumed or not first)
            found = above, waiter, self._waiters.pop(waiter)
        else:

            def rank(key: str) -> tuple[bool, int]:
                who = (*above, key)
                first = self._parts[key].resumed > 0 and may_go_first(who[0])
                return not first, held.by(who)

            key = min(self._parts, key=rank)
            part = self._parts.pop(key)
            found = part.next(held, may_go_first, (*above, key))
            if part.size:
                self._parts[key] = part
        self.size -= 1
        self.resumed -= found[2]
        return found


class SlotQueue:
    def __init__(
        self,
        slots: int,
        *,
        limit: int = GATEWAY_QUEUE_LIMIT,
        per_account: int = GATEWAY_QUEUE_PER_ACCOUNT,
        per_client: int = GATEWAY_QUEUE_PER_CLIENT,
        wait_s: float = GATEWAY_TURN_WAIT_S,
    ) -> None:
        self._slots = max(1, slots)
        self._limit = limit
        self._per_account = per_account
        self._per_client = per_client
        self._wait_s = wait_s
        self._held = _Held()
        self._taken = 0
        self._last: _Who = ()
        """Whose turn came last."""
        self._lane = _Lane()
        self._turns = 0
        """Granted so far."""
        self._resumed: deque[tuple[int, str]] = deque()
        """Of the last ones those that answers had which had begun: the number, and the account."""
        self._lasts_s = GATEWAY_TURN_GUESS_S
        self.on_wait: Callable[[float], None] = lambda _: None
        """Told of each request that was let in, however its wait ended: how long that was."""

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def waiting(self) -> int:
        return self._lane.size

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def turn_s(self) -> float:
        """That a turn takes, about."""
        return self._lasts_s

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
        self,
        client: str,
        *,
        account: str = "",
        name: str = "",
        resumed: bool = False,
        within_s: float | None = None,
    ) -> AsyncIterator[None]:
        """Wait for a turn, and keep it until the end of the block. Raises `QueueFull` or `SlotWaitExpired`.

        `account`: empty for this node's own clients. `within_s`: where it has less time than the queue
        gives.
        """
        who = account, client, name
        if self.free:
            # Nobody waits then.
            self._grant(who)
            self.on_wait(0.0)
        else:
            wait_s = self._wait_s if within_s is None else min(within_s, self._wait_s)
            await self._wait(who, wait_s, resumed=resumed)
        since_s = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            lasted_s = asyncio.get_running_loop().time() - since_s
            self._lasts_s += _NEWEST_WEIGHT * (lasted_s - self._lasts_s)
            self._give_back(who)

    async def _wait(self, who: _Who, wait_s: float, *, resumed: bool) -> None:
        limits = self._limit, self._per_account, self._per_client
        if any(self._lane.count(who[:level], resumed=resumed) >= limit for level, limit in enumerate(limits)):
            raise QueueFull(self.retry_after_s)
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        waiter = loop.create_future()
        self._lane.add(who, waiter, resumed=resumed, last=self._last)
        try:
            async with asyncio.timeout(wait_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                # It was granted, and in the same moment not wanted any more.
                self._give_back(who)
            else:
                self._lane.remove(who, waiter, resumed=resumed)
            if isinstance(error, TimeoutError):
                raise SlotWaitExpired(wait_s) from None
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
        self._turns += 1
        self._held.add(who)
        self._last = who

    def _give_back(self, who: _Who) -> None:
        self._taken -= 1
        self._held.remove(who)
        self._fill()

    def _fill(self) -> None:
        while self.free and self.waiting:
            who, waiter, resumed = self._next()
            # One that was cancelled has left, although its task does not know yet.
            if not waiter.cancelled():
                self._grant(who)
                if resumed:
                    self._resumed.append((self._turns, who[0]))
                waiter.set_result(None)

    def _next(self) -> _Next:
        since = self._turns - _TURNS_BETWEEN_LOSSES * self._slots
        while self._resumed and self._resumed[0][0] <= since:
            self._resumed.popleft()
        had = Counter(account for _, account in self._resumed)
        return self._lane.next(self._held, lambda account: had[account] < self._slots)
