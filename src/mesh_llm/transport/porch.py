"""Where strangers wait: connections that arrive, until they are admitted or sent away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mesh_llm.defaults import HANDSHAKE_EVICT_S, HANDSHAKE_FRAME_LIMIT_BYTES, HANDSHAKE_S, HANDSHAKES_LIMIT
from mesh_llm.transport import handshake
from mesh_llm.transport.attempts import FailedAttempts
from mesh_llm.transport.closing import Code, close
from mesh_llm.transport.control import Control
from mesh_llm.transport.framing import FrameType
from mesh_llm.transport.gate import Gate
from mesh_llm.transport.handshake import Dropped
from mesh_llm.transport.quic import iroh
from mesh_llm.transport.roster import Roster
from mesh_llm.types import NodeId

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


class Porch:
    """Bounds what strangers may cost: how many at once, for how long, and how many failures."""

    def __init__(
        self, *, me: handshake.Self, roster: Roster, spawn: Spawn, on_duplicate: Callable[[], None]
    ) -> None:
        self.turned_away = 0
        """Without a word, because too many came at once."""
        self.attempts = FailedAttempts(now=time.monotonic())
        self._me = me
        self._roster = roster
        self._spawn = spawn
        self._on_duplicate = on_duplicate
        self._here: dict[asyncio.Task[Any], float] = {}

    @property
    def waiting(self) -> int:
        return len(self._here)

    async def run(self, endpoint: Any) -> None:
        """Until the endpoint closes."""
        while (incoming := await endpoint.accept_next()) is not None:
            now = time.monotonic()
            if not self.attempts.allow_anyone(now) or not self._make_room(now):
                self.turned_away += 1
                # Before any cryptography is done for it. QUIC asks again by itself, later and later.
                await incoming.ignore()
                continue
            task = self._spawn(self._receive(incoming), "receive a connection")
            self._here[task] = now
            task.add_done_callback(lambda task: self._here.pop(task, None))

    def _make_room(self, now: float) -> bool:
        if len(self._here) < HANDSHAKES_LIMIT:
            return True
        oldest, since = next(iter(self._here.items()))
        if now - since < HANDSHAKE_EVICT_S:
            return False
        oldest.cancel()
        del self._here[oldest]
        return True

    async def _receive(self, incoming: Any) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                connection = await (await incoming.accept()).connect()
        except (TimeoutError, iroh().IrohError):
            self.attempts.failed(None, time.monotonic())
            return
        node = NodeId(connection.remote_id().to_bytes().hex())
        if node == self._me.identity.id:
            close(connection, Code.OWN_ID)
            self._on_duplicate()
        elif not self.attempts.allow(node, time.monotonic()):
            close(connection, Code.BUSY)
        else:
            await self._introduce(connection, node)

    async def _introduce(self, connection: Any, node: NodeId) -> None:
        gate = Gate(connection, shut=True)
        self._spawn(gate.run(), f"streams of {node[:10]}")
        try:
            await handshake.conduct(connection, self._answer(connection, node, gate))
        except Dropped as error:
            if error.closing.code is not Code.DUPLICATE:
                self.attempts.failed(node, time.monotonic())
                log.info("refused node=%s reason=%s", node, error)
        except asyncio.CancelledError:
            self.attempts.failed(node, time.monotonic())
            raise

    async def _answer(self, connection: Any, node: NodeId, gate: Gate) -> None:
        control = Control(await gate.first(), limit_bytes=HANDSHAKE_FRAME_LIMIT_BYTES)
        introduction = await handshake.answer(control, self._me, node, now=time.time(), let_in=gate.hold)
        try:
            await control.expect(FrameType.CONFIRM)
            self._roster.enter(introduction, connection, control, gate)
        except BaseException:
            # The other side may have counted on it.
            self._roster.remember_gone(node, introduction.link)
            raise
