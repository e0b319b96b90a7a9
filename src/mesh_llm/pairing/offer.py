"""The side that lets somebody in: open for ten minutes, with one code, one machine at a time.

It listens on a QUIC endpoint of its own, with a key that is made for it: the mesh's own endpoint takes no
part, and nothing is left of the offer when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mesh_llm.errors import MeshError, PeerLost
from mesh_llm.frozen import frozen
from mesh_llm.pairing import exchange
from mesh_llm.pairing.announcement import announced
from mesh_llm.pairing.exchange import ALPN, PairingRefused, Refusal, new_code
from mesh_llm.tasks import cancelled, task_group
from mesh_llm.transport.close_codes import Code, close
from mesh_llm.transport.endpoint import NetworkConfig, address_of, bind
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.pending_connections import source_of
from mesh_llm.transport.stream import Stream
from mesh_llm.types import NodeId

log = logging.getLogger(__name__)

OPEN_S = 600.0
ATTEMPTS_AN_HOUR = 10
CONVERSATION_S = 20.0
"""For all that no person is waited for."""
DELIVERY_S = 10.0
CONNECTIONS_LIMIT = 8
"""At a time: more are turned away unheard."""


class Attempts:
    """Wrong codes of the last hour; an attempt counts from its beginning until the code was right."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: deque[float] = deque()

    def begin(self) -> float | None:
        """When it began; None if there were too many."""
        now = self._clock()
        while self._begun and now - self._begun[0] >= 3600.0:
            self._begun.popleft()
        if len(self._begun) >= ATTEMPTS_AN_HOUR:
            return None
        self._begun.append(now)
        return now

    def succeeded(self, begun: float) -> None:
        with contextlib.suppress(ValueError):
            self._begun.remove(begun)

    @property
    def left(self) -> int:
        now = self._clock()
        return ATTEMPTS_AN_HOUR - sum(now - each < 3600.0 for each in self._begun)


@frozen
class Arrived:
    """A machine that knew the code, and waits for a person to agree."""

    id: str
    name: str
    source: str


class Offer:
    """`run` lives as long as the offer is open: until somebody is in, its time is over, or it is ended."""

    def __init__(
        self,
        label: str,
        *,
        attempts: Attempts,
        make_token: Callable[[], str],
        bind_ip: str | None,
        open_s: float = OPEN_S,
    ) -> None:
        self.label = label
        self.code = new_code()
        self.expires = time.time() + open_s
        self.announced = asyncio.Event()
        self.arrived: Arrived | None = None
        self.admitted: str | None = None
        """The name of the machine that was let in."""
        self._attempts = attempts
        self._make_token = make_token
        self._identity = Identity.from_secret(secrets.token_bytes(32))
        self._network = NetworkConfig(identity=self._identity, bind_ip=bind_ip, no_relay=True, alpn=ALPN)
        self._open_s = open_s
        self._decision: asyncio.Future[bool] | None = None
        self._talking = 0
        self._over = asyncio.Event()

    async def run(self) -> None:
        endpoint = await bind(self._network)
        try:
            direct = address_of(endpoint, self._network).direct
            ip = self._network.bind_ip
            async with announced(self.label, self._identity.id, direct, ip=ip) as self.label:
                self.announced.set()
                async with task_group() as group:
                    accepting = group.create_task(self._accept(endpoint, group), name="pairing")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._open_s):
                            await self._over.wait()
                    accepting.cancel()
                    if self._decision is not None and not self._decision.done():
                        self._decision.set_result(False)
        finally:
            await endpoint.close()

    def decide(self, id: str, accept: bool) -> None:
        if self.arrived is None or self.arrived.id != id or self._decision is None:
            raise MeshError("no machine waits to be let in", hint="it may have given up; let it try again")
        if not self._decision.done():
            self._decision.set_result(accept)

    def end(self) -> None:
        self._over.set()

    async def _accept(self, endpoint: Any, group: asyncio.TaskGroup) -> None:
        while (incoming := await endpoint.accept_next()) is not None:
            if self._talking >= CONNECTIONS_LIMIT:
                with contextlib.suppress(iroh().IrohError):
                    await incoming.ignore()
                continue
            self._talking += 1
            group.create_task(self._meet(incoming), name="pairing with a machine")

    async def _meet(self, incoming: Any) -> None:
        connection = None
        try:
            async with asyncio.timeout(CONVERSATION_S):
                source = await source_of(incoming)
                connection = await (await incoming.accept()).connect()
                pair = await connection.accept_bi()
            async with task_group() as group:
                await self._talk(exchange.stream_in(group, pair), connection, source)
            # What was said last is to arrive before the connection ends.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DELIVERY_S):
                    await connection.closed()
        except (TimeoutError, PeerLost, iroh().IrohError) as error:
            log.info("pairing ended cause=%s", error)
        finally:
            self._talking -= 1
            if connection is not None:
                close(connection, Code.CLOSED)

    async def _talk(self, stream: Stream, connection: Any, source: str) -> None:
        other = NodeId(connection.remote_id().to_bytes().hex())
        try:
            async with asyncio.timeout(CONVERSATION_S):
                name = await self._proven(stream, other)
            if self._decision is not None:
                raise PairingRefused(Refusal.BUSY)
            await self._admit(stream, connection, Arrived(id=other, name=name, source=source))
        except PairingRefused as refused:
            log.info("pairing refused source=%s reason=%s", source, refused.reason.value)
            await exchange.refuse(stream, refused.reason)
        await stream.finish()

    async def _proven(self, stream: Stream, other: NodeId) -> str:
        name, message = await exchange.greet(stream)
        if (begun := self._attempts.begin()) is None:
            raise PairingRefused(Refusal.ATTEMPTS)
        await exchange.check(stream, message, code=self.code, own=self._identity.id, other=other)
        self._attempts.succeeded(begun)
        return name

    async def _admit(self, stream: Stream, connection: Any, arrived: Arrived) -> None:
        """A person agrees, or not; whoever gives up meanwhile is no longer asked about."""
        self.arrived = arrived
        decision = self._decision = asyncio.get_running_loop().create_future()
        gone = asyncio.ensure_future(connection.closed())
        try:
            await asyncio.wait((decision, gone), return_when=asyncio.FIRST_COMPLETED)
            if not decision.done():
                raise PeerLost("the other machine gave up")
            if not decision.result():
                raise PairingRefused(Refusal.DECLINED)
            await exchange.give(stream, self._make_token())
            self.admitted = arrived.name
            self.end()
        finally:
            self.arrived = self._decision = None
            await cancelled(gone)
