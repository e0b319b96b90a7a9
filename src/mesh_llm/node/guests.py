"""Connections of other nodes' gateways to the engine here, each in its turn.

A connection that says for whom it is carries one request, and waits in the same queue as the requests
of this node's own clients. Others (for lists of models, token counts and the like) go straight through.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from mesh_llm.defaults import (
    GATEWAY_CONNECT_S,
    GATEWAY_LINGER_S,
    GATEWAY_SILENCE_S,
    GUEST_CLIENT_CHARACTERS,
    GUEST_HELD_BYTES,
    GUESTS_LIMIT,
    GUESTS_PER_NODE,
)
from mesh_llm.errors import PeerLost
from mesh_llm.gateway import failures
from mesh_llm.gateway.failures import Failure
from mesh_llm.gateway.turns import TurnLate, TurnRefused, Turns
from mesh_llm.gateway.upstream import Turn
from mesh_llm.tasks import cancelled
from mesh_llm.transport.network import Stream
from mesh_llm.transport.stream import READ_BYTES, StreamCode
from mesh_llm.types import NodeId

log = logging.getLogger(__name__)

Splice = Callable[[socket.socket, Stream], Awaitable[object]]


class Guests:
    def __init__(self, turns: Turns, splice: Splice) -> None:
        self._turns = turns
        self._splice = splice
        self._counts: Counter[NodeId] = Counter()

    @property
    def count(self) -> int:
        """Those who wait for their turn included."""
        return self._counts.total()

    async def serve(
        self, origin: NodeId, header: dict[str, Any], stream: Stream, port: Callable[[], int | None]
    ) -> None:
        """Until the connection ends. `port`: where the engine listens; it may be gone when the turn comes."""
        try:
            turn = _turn_of(origin, header)
        except ValueError:
            stream.reset(StreamCode.REFUSED)
            return
        if self._counts[origin] >= GUESTS_PER_NODE or self.count >= GUESTS_LIMIT:
            await self._turn_away(stream, turn)
            return
        self._counts[origin] += 1
        try:
            async with AsyncExitStack() as taken:
                start = await self._wait(turn, stream, taken)
                if start is not None:
                    await self._join(origin, stream, port(), start)
        finally:
            self._counts[origin] -= 1
            if not self._counts[origin]:
                del self._counts[origin]

    async def _turn_away(self, stream: Stream, turn: Turn | None) -> None:
        if turn is None:
            stream.reset()
        else:
            await _answer(stream, failures.busy(self._turns.retry_after_s))

    async def _wait(self, turn: Turn | None, stream: Stream, taken: AsyncExitStack) -> bytes | None:
        """What has been read meanwhile of the request; None if there is none any more."""
        if turn is None:
            return b""
        take = self._turns.take(turn.client, name=turn.name, resumed=turn.resumed, within_s=turn.within_s)
        try:
            if self._turns.free:
                await taken.enter_async_context(take)
                return b""
            ahead = _Ahead(stream)
            async with ahead.reading():
                await taken.enter_async_context(take)
            return await ahead.all()
        except TurnRefused as refused:
            await _answer(stream, failures.busy(refused.retry_after_s))
        except TurnLate as late:
            await _answer(stream, failures.queue_late(late.waited_s))
        except PeerLost as error:
            log.debug("guest left the queue: %s", error.message)
            stream.reset()
        return None

    async def _join(self, origin: NodeId, stream: Stream, port: int | None, start: bytes) -> None:
        if port is None:
            stream.reset()
            return
        loop = asyncio.get_running_loop()
        engine = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        engine.setblocking(False)
        engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with engine:
                async with asyncio.timeout(GATEWAY_CONNECT_S):
                    await loop.sock_connect(engine, ("127.0.0.1", port))
                if start:
                    async with asyncio.timeout(GATEWAY_SILENCE_S):
                        await loop.sock_sendall(engine, start)
                await self._splice(engine, stream)
        except (OSError, TimeoutError) as error:
            log.info("no connection to the engine for node=%s: %r", origin[:8], error)
            stream.reset()


class _Ahead:
    """Reads a request that waits, because its end is how a gateway says that nobody wants the answer.

    A request that is longer than what is read ahead is missed only when its turn has come.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._held = bytearray()
        self._before = 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Raises `PeerLost` within the block as soon as the request has ended."""
        self._before = await self._stream.bytes_read()
        try:
            async with asyncio.timeout(None) as scope:
                task = asyncio.create_task(self._read(scope), name="read ahead")
                try:
                    yield
                finally:
                    await cancelled(task)
        except TimeoutError:
            raise PeerLost("the request was given up") from None

    async def _read(self, scope: asyncio.Timeout) -> None:
        with suppress(PeerLost):
            while (room := GUEST_HELD_BYTES - len(self._held)) > 0:
                part = await self._stream.read(min(room, READ_BYTES))
                if not part:
                    break
                self._held += part
            else:
                return
        scope.reschedule(asyncio.get_running_loop().time())

    async def all(self) -> bytes:
        """What was read. Raises `PeerLost` if the reading ended in the moment in which something came."""
        if await self._stream.bytes_read() != self._before + len(self._held):
            raise PeerLost("a part of the request was lost")
        return bytes(self._held)


def _turn_of(origin: NodeId, header: dict[str, Any]) -> Turn | None:
    """None: no turn is needed. Raises `ValueError` where the header makes no sense."""
    client, name = header.get("client"), header.get("name", "")
    resumed, within_s = header.get("resumed", False), header.get("within_s")
    if client is None:
        return None
    if not (_is_name(client) and client and _is_name(name)):
        raise ValueError("no client")
    if not isinstance(resumed, bool) or not (within_s is None or _is_time(within_s)):
        raise ValueError("no turn")
    # Under its node's name: nobody waits at the expense of another node's clients.
    return Turn(client=f"{origin}/{client}", name=name, resumed=resumed, within_s=within_s)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= GUEST_CLIENT_CHARACTERS


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


async def _answer(stream: Stream, failure: Failure) -> None:
    """In the engine's place."""
    with suppress(PeerLost, TimeoutError):
        async with asyncio.timeout(GATEWAY_LINGER_S):
            await stream.write(failure.wire())
            await stream.finish()
            # The request may still be on its way: refusing to read it could overtake the answer.
            while await stream.read(READ_BYTES):
                pass
