"""TCP connections to the relay: how many there may be, and for how long they may say nothing useful."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from mesh_llm.defaults import RELAY_CLIENTS_SPARE
from mesh_llm.relay.limits import Allowance, RelayLimits
from mesh_llm.relay.metrics import RelayCounters
from mesh_llm.third_party import require_aiohttp
from mesh_llm.transport.invite import customer_of

RELAY_ARRIVALS_S = 4
"""New connections from an address in a second, for each that it may have: a signature takes 0.2 ms."""
RELAY_SOURCES = 4096
"""Addresses whose arrivals are remembered."""


log = logging.getLogger(__name__)

require_aiohttp("relay/connections.py")

_HEADER_LIMIT_BYTES = 8 << 10


class RelayConnections(web.Server):
    """Makes a `Connection` of everyone who calls."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: RelayLimits,
        counters: RelayCounters,
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.limits = limits
        self.counters = counters
        self._by_source: Counter[str] = Counter()
        self._count = 0
        self._arrivals: dict[str, Allowance] = {}

    def __call__(self) -> web.RequestHandler:
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=self.limits.handshake_s,
            max_line_size=_HEADER_LIMIT_BYTES,
            max_field_size=_HEADER_LIMIT_BYTES,
        )

    def enter(self, source: str, now: float) -> str | None:
        """Count a connection in; the reason if there is no room for it."""
        self._count += 1
        self._by_source[source] += 1
        if self._count > self.limits.clients + RELAY_CLIENTS_SPARE:
            return "too many connections"
        if 0 < self.limits.per_address < self._by_source[source]:
            return "too many connections from one address"
        if self._comes_too_often(source, now):
            return "one address connects too often"
        return None

    def _comes_too_often(self, source: str, now: float) -> bool:
        arrivals = self._arrivals.pop(source, None)
        if arrivals is None:
            arrivals = Allowance(RELAY_ARRIVALS_S * self.limits.per_address, now)
            if len(self._arrivals) >= RELAY_SOURCES:
                # The one that has not come for the longest time: dictionaries keep their order.
                del self._arrivals[next(iter(self._arrivals))]
        self._arrivals[source] = arrivals
        return arrivals.spend(1, now) > 0

    def leave(self, source: str) -> None:
        self._count -= 1
        self._by_source[source] -= 1
        if not self._by_source[source]:
            del self._by_source[source]


class Connection(web.RequestHandler):
    """Lives for the time of a handshake, and longer only if a client was let in over it."""

    _source: str | None = None
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        door = self._door()
        if door is None:
            return
        self._source = source_of(transport.get_extra_info("peername"))
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(door.limits.handshake_s, self._late)
        if (refusal := door.enter(self._source, loop.time())) is not None:
            door.counters.refused[refusal] += 1
            cast(asyncio.Transport, transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        door = self._door()
        super().connection_lost(exc)
        self.admitted()
        if door is not None and self._source is not None:
            door.leave(self._source)
            self._source = None

    def admitted(self) -> None:
        """It may stay for as long as it likes."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        # The text of the exception quotes the request, tokens included: it goes nowhere.
        log.debug("unreadable request error=%s", type(exc).__name__)
        response = web.Response(status=status, text="this is not a request that a relay answers\n")
        response.force_close()
        return response

    def _late(self) -> None:
        self._deadline = None
        door = self._door()
        if door is not None and self.transport is not None:
            door.counters.refused["too slow to say who it is"] += 1
            self.transport.abort()

    def _door(self) -> RelayConnections | None:
        # aiohttp forgets the server when the connection is lost.
        return cast("RelayConnections | None", self._manager)


def source_of(peername: object) -> str:
    """Whom a connection counts for."""
    if not isinstance(peername, tuple) or not peername:
        return "unknown"
    try:
        return customer_of(ipaddress.ip_address(str(peername[0]).partition("%")[0]))
    except ValueError:
        return "unknown"
