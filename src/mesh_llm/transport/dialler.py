"""Connections that this node begins, and what to tell people when there are none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from mesh_llm.defaults import ALPN
from mesh_llm.errors import JoinRefused, MeshError, PeerLost
from mesh_llm.transport import handshake
from mesh_llm.transport.closing import Closing, Code, close
from mesh_llm.transport.control import Control
from mesh_llm.transport.endpoint import remote_address
from mesh_llm.transport.framing import FrameType
from mesh_llm.transport.gate import Gate
from mesh_llm.transport.handshake import Dropped, Introduction, is_arbiter
from mesh_llm.transport.peer import Peer
from mesh_llm.transport.quic import iroh, message_of
from mesh_llm.transport.roster import Roster
from mesh_llm.types import Address, NodeId

Prove = Callable[[Control], Awaitable[Introduction]]


class Dialler:
    def __init__(
        self,
        *,
        endpoint: Any,
        me: NodeId,
        roster: Roster,
        spawn: Callable[[Coroutine[Any, Any, Any], str], object],
    ) -> None:
        self._endpoint = endpoint
        self._me = me
        self._roster = roster
        self._spawn = spawn

    async def dial(self, node: NodeId, address: Address, prove: Prove) -> Peer:
        """One attempt: `Dropped` or `PeerLost` when it fails. The caller bounds its time."""
        try:
            connection = await self._endpoint.connect(remote_address(node, address), ALPN)
        except iroh().IrohError as error:
            raise _no_connection(node, message_of(error)) from None
        return await handshake.conduct(connection, self._introduce(connection, node, prove))

    async def _introduce(self, connection: Any, node: NodeId, prove: Prove) -> Peer:
        control = Control(await connection.open_bi())
        introduction = await prove(control)
        try:
            if not is_arbiter(self._me, node):
                await control.write(FrameType.CONFIRM, {})
                await control.expect(FrameType.CONFIRM)
            elif (existing := self._roster.existing(introduction)) is not None:
                close(connection, Code.DUPLICATE)
                return existing
            gate = Gate(connection, shut=False)
            peer = self._roster.enter(introduction, connection, control, gate)
        except BaseException:
            self._roster.remember_gone(node, introduction.link)
            raise
        self._spawn(gate.run(), f"streams of {node[:10]}")
        return peer


def _no_connection(node: NodeId, message: str) -> MeshError:
    if "known protocol" in message:
        return JoinRefused(
            f"node {node[:10]} speaks another version of the mesh's protocol",
            hint="update mesh-llm on both machines",
        )
    return PeerLost(f"no connection to node {node[:10]}: {message}")


def tried(address: Address) -> str:
    ways = [*address.direct, *([address.relay] if address.relay else [])]
    return ", ".join(ways) or "its id alone"


_UPDATE_HERE = "update mesh-llm on this machine"
_UPDATE_THERE = "update mesh-llm on the other machine"


def join_refused(dropped: Dropped) -> JoinRefused:
    """In the words of one who holds a token."""
    new_token = "ask for a new one: `mesh-llm invite` on a member makes it"
    if dropped.by_us:
        return JoinRefused(
            "the inviter could not prove that it made the token", hint=f"nothing was joined; {new_token}"
        )
    known = {
        Code.WRONG: ("the token was not accepted: it is wrong, or belongs to another mesh", new_token),
        Code.EXPIRED: ("the token has expired", new_token),
        Code.REVOKED: ("the token was revoked", new_token),
        Code.OWN_ID: ("the inviter runs with this node's identity", "give each node a home of its own"),
    }
    return _refused(dropped.closing, known, "the inviter")


def connect_refused(node: NodeId, dropped: Dropped) -> MeshError:
    """In the words of a member."""
    other = f"node {node[:10]}"
    if dropped.by_us:
        return JoinRefused(f"{other} could not prove that it belongs to this mesh")
    new_token = "join again with a new token"
    known = {
        Code.WRONG: (f"{other} does not accept this node as a member of its mesh", new_token),
        Code.REVOKED: ("this node was expelled from the mesh: its invite was revoked", new_token),
        Code.OWN_ID: (f"{other} has this node's identity", "give each node a home of its own"),
    }
    if dropped.closing.code in (Code.UNKNOWN, Code.BUSY, Code.TIMEOUT, Code.LEAVING, Code.CLOSED):
        return PeerLost(f"no connection to {other}: {dropped.closing.reason}")
    return _refused(dropped.closing, known, other)


def _refused(closing: Closing, known: dict[Code, tuple[str, str]], other: str) -> JoinRefused:
    known = known | {
        Code.TOO_OLD: (f"{other} runs a newer mesh-llm than this node", _UPDATE_HERE),
        Code.TOO_NEW: (f"{other} runs an older mesh-llm than this node", _UPDATE_THERE),
    }
    if closing.code in known:
        sentence, hint = known[closing.code]
        return JoinRefused(sentence, hint=hint)
    return JoinRefused(f"{other} refused: {closing.reason}")
