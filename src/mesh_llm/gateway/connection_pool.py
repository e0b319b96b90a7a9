"""Connections to engines, kept from one request to the next."""

from __future__ import annotations

import asyncio
from functools import partial
from weakref import WeakSet

from mesh_llm.gateway.engine_connection import EngineConnection, EngineLost
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.upstream import SlotRequest, Upstream

GATEWAY_CONNECT_S = 5.0
"""To a socket on this machine: far more than a busy machine needs, less than a person waits."""
GATEWAY_ENGINE_IDLE_S = 4.0
"""The engine closes a connection after five idle seconds; leaving it first avoids meeting it half closed."""


class ConnectionPool:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._idle: dict[Upstream, list[EngineConnection]] = {}
        self._single: WeakSet[EngineConnection] = WeakSet()
        """Carry one request: kept, they would hold a turn at their engine."""

    def take(self, upstream: Upstream) -> EngineConnection | None:
        """A connection that has been used before, if one is still fresh."""
        idle = self._idle.get(upstream)
        while idle:
            # The last one that was given back; those before it grow old, and are closed in `give_back`.
            connection = idle.pop()
            if not (connection.is_closing or _is_old(connection)):
                return connection
            connection.close()
        return None

    async def connect(self, upstream: Upstream, turn: SlotRequest | None = None) -> EngineConnection:
        """A connection that nobody has used before; `turn` as in `upstream.Connect`."""
        connection = EngineConnection(
            silence_s=self._limits.silence_s, on_lost=partial(self._forget, upstream)
        )
        host, _, port = upstream.authority.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GATEWAY_CONNECT_S):
                if upstream.connect is not None:
                    link = await upstream.connect(turn)
                    await loop.create_connection(lambda: connection, sock=link)
                else:
                    await loop.create_connection(lambda: connection, host.strip("[]"), int(port))
        except OSError as error:
            raise EngineLost(f"no connection: {error}") from error
        if upstream.connect is not None and turn is not None:
            self._single.add(connection)
        return connection

    async def ask(
        self, upstream: Upstream, method: str, request: bytes, turn: SlotRequest | None = None
    ) -> EngineConnection:
        """Send a request that can be sent again; the head of its answer has come."""
        if turn is not None and upstream.connect is not None:
            return await _send(await self.connect(upstream, turn), method, request)
        used = self.take(upstream)
        if used is not None:
            try:
                return await _send(used, method, request)
            except EngineLost:
                # The engine closes idle connections, perhaps in the moment in which we chose one, and
                # each one that it has streamed on, although it promises to keep it.
                if used.answered:
                    raise
        return await _send(await self.connect(upstream), method, request)

    def give_back(self, upstream: Upstream, connection: EngineConnection) -> None:
        """Keep it, or close it: after part of an answer that makes the engine stop."""
        if not connection.reusable or connection in self._single:
            connection.close()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        idle = self._idle.setdefault(upstream, [])
        idle.append(connection)
        if _is_old(idle[0]):
            idle.pop(0).close()

    def close(self) -> None:
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _forget(self, upstream: Upstream, connection: EngineConnection) -> None:
        """The engine has closed it, as it does when it is idle for long and when it ends."""
        idle = self._idle.get(upstream, [])
        if connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[upstream]


async def _send(connection: EngineConnection, method: str, request: bytes) -> EngineConnection:
    try:
        connection.send(method, request)
        await connection.head()
    except BaseException:
        connection.close()
        raise
    return connection


def _is_old(connection: EngineConnection) -> bool:
    idle_s = asyncio.get_running_loop().time() - connection.idle_since_s
    return idle_s >= GATEWAY_ENGINE_IDLE_S
