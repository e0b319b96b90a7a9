"""The connections that count: one per member, and which one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from mesh_llm.defaults import PEERS_LIMIT
from mesh_llm.transport.close_codes import Code
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.credential import Credential, origin_of, role_of
from mesh_llm.transport.handshake import GONE_LIMIT, HandshakeRefusal, Introduction, is_arbiter
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.peer import Handler, Peer
from mesh_llm.transport.stream_gate import StreamGate
from mesh_llm.types import NodeId, Role

CLIENTS_PER_INVITE = 16
"""Connected at once to one node: a token for a family's devices, not for a thousand invented ids."""


class Connections:
    """Everything here happens between two awaits: two handshakes cannot both be the first."""

    def __init__(
        self,
        *,
        me: NodeId,
        membership: Membership,
        handler: Handler,
        spawn: Callable[[Coroutine[Any, Any, Any], str], object],
    ) -> None:
        self.peers: dict[NodeId, Peer] = {}
        self._me = me
        self._membership = membership
        self._handler = handler
        self._spawn = spawn
        self._silent = False
        self._gone: OrderedDict[NodeId, deque[str]] = OrderedDict()
        self._waiting: dict[NodeId, asyncio.Event] = {}

    def gone(self, node: NodeId) -> list[str]:
        """The last connections with `node` that have ended here."""
        return list(self._gone.get(node, ()))

    def remember_gone(self, node: NodeId, link: str) -> None:
        links = self._gone.pop(node, None) or deque(maxlen=GONE_LIMIT)
        links.append(link)
        self._gone[node] = links
        while len(self._gone) > PEERS_LIMIT:
            self._gone.popitem(last=False)

    def existing(self, introduction: Introduction) -> Peer | None:
        """The connection that stands in the way of this one.

        None where that one is over, for all that the other side has told us: it has started anew, or
        has seen the end of it.
        """
        peer = self.peers.get(introduction.node)
        if peer is None or peer.instance != introduction.instance or peer.link in introduction.gone:
            return None
        return peer

    def enter(
        self, introduction: Introduction, connection: Any, control: ControlStream, gate: StreamGate
    ) -> Peer:
        """The connection counts from now on, in the place of any other to this node."""
        node = introduction.node
        if self._membership.revocations.strikes(introduction.credential) is not None:
            raise HandshakeRefusal(Code.REVOKED)
        confirm = is_arbiter(self._me, node)
        if confirm and self.existing(introduction) is not None:
            raise HandshakeRefusal(Code.DUPLICATE)
        old = self.peers.get(node)
        if self._silent or (old is None and len(self.peers) >= PEERS_LIMIT):
            raise HandshakeRefusal(Code.BUSY)
        if self.is_crowd(node, introduction.credential):
            raise HandshakeRefusal(Code.CROWDED)
        if old is not None:
            self.drop(old, Code.REPLACED if old.instance == introduction.instance else Code.OWN_ID)
        peer = Peer(
            introduction=introduction,
            connection=connection,
            control=control,
            gate=gate,
            handler=self._handler,
            confirm=confirm,
        )
        self.peers[node] = peer
        self._spawn(self._run(peer), f"peer {node[:10]}")
        if (event := self._waiting.get(node)) is not None:
            event.set()
        self._handler.on_peer(peer)
        return peer

    def is_crowd(self, node: NodeId, credential: Credential) -> bool:
        """Ids cost nothing: all that come by one client's token are one client, with so many connections."""
        if node in self.peers or role_of(credential) is not Role.CLIENT:
            return False
        clients = (peer.credential for peer in self.peers.values() if peer.role is Role.CLIENT)
        return sum(origin_of(each) == origin_of(credential) for each in clients) >= CLIENTS_PER_INVITE

    async def _run(self, peer: Peer) -> None:
        closing = await peer.run()
        self.drop(peer, closing.code)

    def drop(self, peer: Peer, code: Code, reason: str = "") -> None:
        """End a peer, and say so once."""
        peer.end(code, reason)
        if self.peers.get(peer.id) is not peer:
            return
        del self.peers[peer.id]
        self.remember_gone(peer.id, peer.link)
        assert peer.closing is not None
        if not self._silent:
            self._handler.on_lost(peer, peer.closing.reason)

    def end(self, reason: str) -> None:
        """Of the whole network: nobody is told but the peers."""
        self._silent = True
        for peer in tuple(self.peers.values()):
            self.drop(peer, Code.LEAVING, reason)

    async def wait_for(self, node: NodeId, timeout_s: float) -> Peer | None:
        """The peer, if it arrives within that time."""
        event = self._waiting.setdefault(node, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while node not in self.peers:
                    event.clear()
                    await event.wait()
        self._waiting.pop(node, None)
        return self.peers.get(node)
