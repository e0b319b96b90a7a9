"""Connections that this node begins, and what to tell people when there are none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from mesh_llm.defaults import ALPN
from mesh_llm.errors import JoinRefused, MeshError, PeerLost
from mesh_llm.transport import handshake
from mesh_llm.transport.close_codes import Code, close
from mesh_llm.transport.connections import Connections
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.endpoint import remote_address
from mesh_llm.transport.framing import FrameType
from mesh_llm.transport.handshake import Dropped, Introduction, is_arbiter
from mesh_llm.transport.iroh_library import iroh, message_of
from mesh_llm.transport.peer import Peer
from mesh_llm.transport.stream_gate import StreamGate
from mesh_llm.types import Address, NodeId

Prove = Callable[[ControlStream], Awaitable[Introduction]]


class Dialler:
    def __init__(
        self,
        *,
        endpoint: Any,
        me: NodeId,
        roster: Connections,
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
        control = ControlStream(await connection.open_bi())
        introduction = await prove(control)
        try:
            if not is_arbiter(self._me, node):
                await control.write(FrameType.CONFIRM, {})
                await control.expect(FrameType.CONFIRM)
            elif (existing := self._roster.existing(introduction)) is not None:
                close(connection, Code.DUPLICATE)
                return existing
            gate = StreamGate(connection, shut=False)
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
_NEW_TOKEN = "ask for a new one: `mesh-llm invite` on a member makes it"
_PASSING = (
    Code.UNKNOWN,
    Code.BUSY,
    Code.TIMEOUT,
    Code.LEAVING,
    Code.CLOSED,
    Code.INTERNAL,
    Code.CROWDED,
)
"""Another attempt may well succeed."""


def may_pass(dropped: Dropped) -> bool:
    return dropped.closing.code in _PASSING


def join_refused(dropped: Dropped) -> JoinRefused:
    """In the words of one who holds a token."""
    told = {
        Code.WRONG: ("the token was not accepted: it is wrong, or belongs to another mesh", _NEW_TOKEN),
        Code.EXPIRED: ("the token has expired", _NEW_TOKEN),
        Code.REVOKED: ("the token was revoked", _NEW_TOKEN),
        Code.USED: ("the token has been used up", _NEW_TOKEN),
        Code.CROWDED: ("too many clients with this token are connected", "end one, or ask for another token"),
        Code.OWN_ID: ("the inviter runs with this node's identity", "give each node a home of its own"),
    }
    found = {Code.WRONG: ("the inviter could not prove that it made the token", _NEW_TOKEN)}
    return _refused(dropped, found if dropped.by_us else told, "the inviter")


def connect_refused(node: NodeId, dropped: Dropped) -> MeshError:
    """In the words of a member."""
    other = f"node {node[:10]}"
    if may_pass(dropped):
        return PeerLost(f"no connection to {other}: {dropped.closing.reason}")
    if dropped.closing.code is Code.REVOKED and not dropped.by_us:
        # Without the revocation it is one node's word: it may be out of its mind, or of the mesh.
        return PeerLost(f"{other} says that this node was expelled, but does not prove it")
    again = "join again with a new token"
    told = {
        Code.WRONG: (f"{other} does not accept this node as a member of its mesh", again),
        Code.OWN_ID: (f"{other} has this node's identity", "give each node a home of its own"),
    }
    found: dict[Code, tuple[str, str | None]] = {
        Code.WRONG: (f"{other} could not prove that it belongs to this mesh", None),
        Code.REVOKED: (f"{other} was expelled from the mesh", None),
    }
    return _refused(dropped, found if dropped.by_us else told, other)


def _refused(dropped: Dropped, known: Mapping[Code, tuple[str, str | None]], other: str) -> JoinRefused:
    code = dropped.closing.code
    if code in (Code.TOO_OLD, Code.TOO_NEW):
        # The code speaks of the one who is told.
        here_is_older = (code is Code.TOO_OLD) is not dropped.by_us
        age, hint = ("a newer", _UPDATE_HERE) if here_is_older else ("an older", _UPDATE_THERE)
        return JoinRefused(f"{other} runs {age} mesh-llm than this node", hint=hint)
    if code in known:
        return JoinRefused(known[code][0], hint=known[code][1])
    if dropped.by_us:
        return JoinRefused(f"{other} violates the mesh's protocol", hint="update mesh-llm on both machines")
    return JoinRefused(f"{other} refused: {dropped.closing.reason}")
