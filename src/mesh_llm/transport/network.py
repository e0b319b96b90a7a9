"""The network of one node: it dials, accepts, and keeps one connection to each member."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from mesh_llm.defaults import CONNECT_S, HANDSHAKE_S, JOIN_RETRY_S, NETWORK_CLOSE_S
from mesh_llm.errors import Forged, InviteRefused, JoinRefused, MeshError, PeerLost
from mesh_llm.transport import handshake
from mesh_llm.transport import invite as invites
from mesh_llm.transport.close_codes import Code
from mesh_llm.transport.connections import Connections
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.dialler import Dialler, connect_refused, join_refused, may_pass, tried
from mesh_llm.transport.endpoint import NetworkConfig, address_of, addresses_seen, bind, ports_of
from mesh_llm.transport.handshake import Dropped, Introduction, Joined
from mesh_llm.transport.invite import Invite
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.peer import Handler, PathFacts, Peer
from mesh_llm.transport.pending_connections import PendingConnections
from mesh_llm.transport.stream import Stream, StreamCode
from mesh_llm.types import Address, NodeId, Signed

JOIN_S = 20.0
"""Long enough for a relay and for a busy inviter, short enough for a person who waits."""
JOIN_ATTEMPT_S = 6.0
"""QUIC asks an inviter that does not answer after 1, 2, 4 … seconds; starting afresh asks more often."""
NETWORK_TASKS_S = 5.0
"""For whoever serves a stream to let go of it; far more than it takes."""
ADDRESS_POLL_S = 1.0
"""Between two looks at this node's own addresses, which change with its networks."""


__all__ = ["Handler", "Membership", "Network", "NetworkConfig", "PathFacts", "Peer", "Stream", "StreamCode"]

log = logging.getLogger(__name__)


class Network:
    """Documents that change here (`mesh`) are written down by whoever owns the home."""

    def __init__(self, config: NetworkConfig, mesh: Membership, handler: Handler) -> None:
        self.config = config
        self.mesh = mesh
        self.id = config.identity.id
        self._handler = handler
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dialling: dict[NodeId, asyncio.Task[Peer]] = {}
        self._endpoint: Any = None
        self._dialler: Dialler | None = None
        self._closing = False
        self._address = Address()
        self._roster = Connections(me=self.id, membership=mesh, handler=handler, spawn=self._spawn)
        self._self = handshake.Self(
            identity=config.identity,
            instance=secrets.token_hex(8),
            membership=mesh,
            gone=self._roster.gone,
            welcome=handler.welcome,
            is_crowd=self._roster.is_crowd,
        )
        self.pending = PendingConnections(
            me=self._self, roster=self._roster, spawn=self._spawn, handler=handler
        )

    @property
    def peers(self) -> Mapping[NodeId, Peer]:
        return MappingProxyType(self._roster.peers)

    @property
    def address(self) -> Address:
        """Where others can reach this node, as far as it knows; empty before `start`."""
        return self._address

    @property
    def ports(self) -> tuple[int, int]:
        """Bound for IPv4 and for IPv6; 0 where there is none, and before `start`."""
        return ports_of(self._endpoint) if self._endpoint is not None else (0, 0)

    @property
    def relay_reached(self) -> str | None:
        """The relay that this node is connected to."""
        return self._endpoint.addr().relay_url() if self._endpoint is not None else None

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bound and accepting when it returns; MeshError where that cannot be."""
        self._endpoint = await bind(self.config)
        # Seen before it is told: what changes in between is a change.
        seen = addresses_seen(self._endpoint)
        self._address = address_of(self._endpoint, self.config)
        self._dialler = Dialler(endpoint=self._endpoint, me=self.id, roster=self._roster, spawn=self._spawn)
        self._spawn(self.pending.run(self._endpoint), "accept connections")
        self._spawn(self._watch_address(seen), "watch this node's address")

    async def close(self, reason: str = "") -> None:
        """Peers are told; everything of this network's has ended when it returns."""
        if self._endpoint is None or self._closing:
            return
        self._closing = True
        self._roster.end(reason)
        await self._end_tasks()
        with suppress(TimeoutError, iroh().IrohError):
            async with asyncio.timeout(NETWORK_CLOSE_S):
                await self._endpoint.close()

    async def _end_tasks(self) -> None:
        deadline = time.monotonic() + NETWORK_TASKS_S
        while self._tasks and time.monotonic() < deadline:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
        if self._tasks:
            log.error("still busy after the end: %s", ", ".join(task.get_name() for task in self._tasks))

    def _spawn(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MeshError):
            log.error("the network failed to %s", task.get_name(), exc_info=error)

    async def _watch_address(self, seen: object) -> None:
        # Asked for, not waited for: iroh's own notice comes on another thread, at times after the end.
        while True:
            await asyncio.sleep(ADDRESS_POLL_S)
            before, seen = seen, addresses_seen(self._endpoint)
            if before == seen:
                continue
            address = address_of(self._endpoint, self.config)
            if address != self._address:
                log.info("address changed direct=%s relay=%s", ",".join(address.direct), address.relay)
                self._address = address
                self._handler.on_address()

    # -- invites ---------------------------------------------------------------------------------

    def expel(self) -> None:
        """End the connections to those whose invites are revoked by now."""
        for peer in tuple(self.peers.values()):
            if self.mesh.revocations.strikes(peer.credential) is not None:
                self._roster.drop(peer, Code.REVOKED)

    # -- dialling --------------------------------------------------------------------------------

    async def join(self, invite: Invite, *, timeout_s: float = JOIN_S) -> tuple[Peer, dict[str, Any]]:
        """Become a member by an invite; `JoinRefused` says why not."""
        try:
            invites.check_expiry(invite, now=time.time())
        except InviteRefused as error:
            raise JoinRefused(error.message, hint=error.hint) from None
        if invite.inviter == self.id:
            raise JoinRefused("this node made the token itself", hint="use it on another machine")
        try:
            async with asyncio.timeout(timeout_s):
                peer, joined = await self._join(invite)
        except TimeoutError:
            raise JoinRefused(
                f"no answer from the inviter within {timeout_s:.0f} s; tried {tried(invite.address)}",
                hint="check that the node that made the token runs, and that UDP gets through to it",
            ) from None
        return peer, joined.welcome

    async def _join(self, invite: Invite) -> tuple[Peer, Joined]:
        assert self._dialler is not None
        answers: list[Joined] = []

        async def prove(control: ControlStream) -> Introduction:
            introduction, joined = await handshake.prove_invite(control, self._self, invite)
            # Before the connection counts: the node's handler is told of a peer of this mesh.
            self.mesh.adopt(joined.mesh, joined.credential)
            answers.append(joined)
            return introduction

        while True:
            try:
                async with asyncio.timeout(JOIN_ATTEMPT_S):
                    peer = await self._dialler.dial(invite.inviter, invite.address, prove)
                return peer, answers[-1]
            except TimeoutError:
                log.info("could not join yet reason=no answer")
            except Dropped as error:
                if not may_pass(error) or error.closing.code is Code.CROWDED:
                    raise join_refused(error) from None
                log.info("could not join yet reason=%s", error)
            except handshake.SaidExpelled:
                raise JoinRefused("the token was revoked", hint="ask for a new one") from None
            except PeerLost as error:
                log.info("could not join yet reason=%s", error)
            await asyncio.sleep(JOIN_RETRY_S)

    async def connect(self, node: NodeId, address: Address, *, timeout_s: float = CONNECT_S) -> Peer:
        """A member, by credentials both ways.

        `PeerLost` when it cannot be reached, `JoinRefused` when it refuses.
        """
        if (peer := self.peers.get(node)) is not None:
            return peer
        self.mesh.role(self.id)
        dialling = self._dialling.get(node)
        if dialling is None:
            dialling = self._spawn(self._connect(node, address, timeout_s), f"dial {node[:10]}")
            self._dialling[node] = dialling
            dialling.add_done_callback(lambda _: self._dialling.pop(node, None))
        try:
            return await asyncio.shield(dialling)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if dialling.cancelled() and (current is None or not current.cancelling()):
                raise PeerLost("this node's network is closing") from None
            raise

    async def _connect(self, node: NodeId, address: Address, timeout_s: float) -> Peer:
        assert self._dialler is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._dialler.dial(
                    node, address, lambda control: handshake.prove_credential(control, self._self, node)
                )
        except TimeoutError:
            raise PeerLost(
                f"no answer from node {node[:10]} within {timeout_s:.0f} s; tried {tried(address)}"
            ) from None
        except Dropped as error:
            if error.closing.code is not Code.DUPLICATE:
                raise connect_refused(node, error) from None
        except handshake.SaidExpelled as error:
            self._verify_expulsion(error.signed)
            raise PeerLost(f"node {node[:10]} says that this node was expelled, which is not true") from None
        # The other side holds a connection, which it is about to confirm, or which it has yet to find dead.
        if (peer := await self._roster.wait_for(node, min(timeout_s, HANDSHAKE_S))) is not None:
            return peer
        raise PeerLost(f"node {node[:10]} holds on to an older connection")

    def _verify_expulsion(self, signed: Signed) -> None:
        """Raises `Expelled` where the revocation holds, and concerns this node."""
        with suppress(Forged):
            # Those that concern others are heard from whoever passes them on as they should.
            if self.mesh.revocations.beside(signed).strikes(self.mesh.credential) is not None:
                self.mesh.take_revocations([signed])
                self.mesh.role(self.id)
