"""Where strangers wait: connections that arrive, until they are admitted or sent away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mesh_llm.defaults import HANDSHAKE_S, HANDSHAKES_LIMIT
from mesh_llm.transport import handshake
from mesh_llm.transport.close_codes import Code, close
from mesh_llm.transport.connections import Connections
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.failed_attempts import FailedAttempts
from mesh_llm.transport.framing import FrameType
from mesh_llm.transport.handshake import Dropped
from mesh_llm.transport.invite import customer_of, split_address
from mesh_llm.transport.iroh_library import iroh, message_of
from mesh_llm.transport.peer import Handler
from mesh_llm.transport.stream_gate import StreamGate
from mesh_llm.types import NodeId

HANDSHAKE_FRAME_LIMIT_BYTES = 16 << 10
"""Before admission: a full chain of grants takes 3 KB."""
HANDSHAKE_EVICT_S = 0.5
"""A handshake this old makes room for a new one when all places are taken."""


log = logging.getLogger(__name__)

_REFUSED = {
    Code.WRONG: "it knows no invite of this mesh",
    Code.EXPIRED: "its invite has expired",
    Code.REVOKED: "its invite was revoked",
    Code.USED: "its invite has been used up",
    Code.CROWDED: "too many clients came by the same invite",
    Code.TOO_OLD: "it speaks an older protocol",
    Code.TOO_NEW: "it speaks a newer protocol",
}
"""What the one who was asked says of it; `close_codes` has what the other one is told."""

Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


class PendingConnections:
    """Bounds what strangers may cost: how many at once, for how long, and how many failures."""

    def __init__(self, *, me: handshake.Self, roster: Connections, spawn: Spawn, handler: Handler) -> None:
        self.turned_away = 0
        """Without a word, because too many came at once."""
        self.attempts = FailedAttempts(now=time.monotonic())
        self._me = me
        self._roster = roster
        self._spawn = spawn
        self._handler = handler
        self._here: dict[asyncio.Task[Any], float] = {}

    @property
    def waiting(self) -> int:
        return len(self._here)

    async def run(self, endpoint: Any) -> None:
        """Until the endpoint closes."""
        while (incoming := await endpoint.accept_next()) is not None:
            try:
                await self._consider(incoming)
            except (iroh().IrohError, ValueError) as error:
                # It was gone before it was looked at. The next one is not to suffer for it.
                log.info("a connection came to nothing reason=%s", message_of(error))

    async def _consider(self, incoming: Any) -> None:
        now = time.monotonic()
        source = await source_of(incoming)
        if not self.attempts.is_calm(now):
            if not await incoming.remote_addr_validated():
                # It shall show that it is where it claims to be. That costs us nothing.
                await incoming.retry()
                return
            if not self.attempts.allow_source(source, now):
                await self._turn_away(incoming)
                return
        if not self._make_room(now):
            await self._turn_away(incoming)
            return
        task = self._spawn(self._receive(incoming, source), "receive a connection")
        self._here[task] = now
        task.add_done_callback(lambda task: self._here.pop(task, None))

    async def _turn_away(self, incoming: Any) -> None:
        # Before any cryptography is done for it. QUIC asks again by itself, later and later.
        self.turned_away += 1
        await incoming.ignore()

    def _make_room(self, now: float) -> bool:
        if len(self._here) < HANDSHAKES_LIMIT:
            return True
        oldest, since = next(iter(self._here.items()))
        if now - since < HANDSHAKE_EVICT_S:
            return False
        oldest.cancel()
        del self._here[oldest]
        return True

    async def _receive(self, incoming: Any, source: str) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                connection = await (await incoming.accept()).connect()
        except (TimeoutError, iroh().IrohError):
            self.attempts.failed(source=source, node=None, now=time.monotonic())
            return
        node = NodeId(connection.remote_id().to_bytes().hex())
        if node == self._me.identity.id:
            close(connection, Code.OWN_ID)
            self._handler.on_duplicate()
        elif not self.attempts.allow_node(node, time.monotonic()):
            close(connection, Code.BUSY)
            self.attempts.failed(source=source, node=None, now=time.monotonic())
        else:
            await self._introduce(connection, node, source)

    async def _introduce(self, connection: Any, node: NodeId, source: str) -> None:
        gate = StreamGate(connection, shut=True)
        self._spawn(gate.run(), f"streams of {node[:10]}")
        try:
            await handshake.conduct(connection, self._answer(connection, node, gate))
        except Dropped as error:
            if error.closing.code is not Code.DUPLICATE:
                self.attempts.failed(source=source, node=node, now=time.monotonic())
                log.info("refused node=%s reason=%s", node, error)
                if error.by_us and error.closing.code in _REFUSED:
                    self._handler.on_refused(node, _REFUSED[error.closing.code])
        except asyncio.CancelledError:
            self.attempts.failed(source=source, node=node, now=time.monotonic())
            raise

    async def _answer(self, connection: Any, node: NodeId, gate: StreamGate) -> None:
        control = ControlStream(await gate.first(), limit_bytes=HANDSHAKE_FRAME_LIMIT_BYTES)
        task = asyncio.current_task()
        assert task is not None

        def let_in() -> None:
            gate.hold()
            # No stranger any more: it makes room for nobody.
            self._here.pop(task, None)

        introduction = await handshake.answer(control, self._me, node, now=time.time(), let_in=let_in)
        try:
            await control.expect(FrameType.CONFIRM)
            self._roster.enter(introduction, connection, control, gate)
        except BaseException:
            # The other side may have counted on it.
            self._roster.remember_gone(node, introduction.link)
            raise


async def source_of(incoming: Any) -> str:
    """The network that it comes from, or the node's id behind a relay, which has checked that."""
    address = await incoming.remote_addr()
    if address.is_ip():
        return customer_of(split_address(address.addr)[0])
    return address.endpoint_id.to_bytes().hex() if address.is_relay() else "elsewhere"
