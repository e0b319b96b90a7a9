"""Streams between two members that reach each other only through a third.

The one in the middle joins two streams, and can read and alter what passes. Who opened a stream it cannot
pretend: the receiver sends a challenge first, and the opener signs it together with what it asks for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

from mesh_llm.errors import Forged, MalformedMessage, NodeUnreachable, PeerLost
from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.messages import signed_from_fields, signed_to_document
from mesh_llm.peers.members import Members
from mesh_llm.peers.trust import Origin, Service
from mesh_llm.tasks import task_group
from mesh_llm.transport.claims import Claim, Signer, signer_of
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.network import Peer, Stream
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import NodeId, Role

FORWARD_PROOF_S = 10.0
"""For the opener of a forwarded stream to prove who it is: one round trip through a third node."""
FORWARDS_PER_CLIENT = 32
FORWARDS_PER_NODE = 128
FORWARDS_PER_TARGET = 256
"""Streams that a node forwards at once: for one client's invite, for one node, and to one node, which serves
512 of this node's in all."""


log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 16
_NONCE_BYTES = 16
_KIND_CHARS = 64


class Forwarding:
    def __init__(self, members: Members, service: Callable[[str, Role], Service | None]) -> None:
        """`service`: what serves a stream of that kind, for one of that role."""
        self._members = members
        self._service = service
        self._for_account: Counter[str] = Counter()
        self._to_target: Counter[NodeId] = Counter()

    async def open(self, helper: Peer, node: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        """A stream to `node` through `helper`."""
        members = self._members
        stream = await helper.open("forward", {"to": node})
        try:
            async with asyncio.timeout(FORWARD_PROOF_S):
                await prove(stream, members.membership, members.identity, to=node, kind=kind, header=header)
        except TimeoutError:
            stream.reset()
            names = f"{members.name_of(node)} does not answer through {members.name_of(helper.id)}"
            raise NodeUnreachable(names) from None
        except BaseException:
            stream.reset()
            raise
        return stream

    async def serve_middle(self, origin: Origin, header: dict[str, Any], stream: Stream) -> None:
        """Join two streams: `origin` cannot reach whom it wants to speak to, and this node can."""
        target = self._members.peer(NodeId(str(header.get("to"))))
        if target is None or target.role is Role.CLIENT or self._is_busy(origin, target.id):
            stream.reset()
            return
        self._for_account[origin.account] += 1
        self._to_target[target.id] += 1
        try:
            await join_streams(stream, await target.open("forwarded", {}))
        finally:
            self._for_account -= Counter((origin.account,))
            self._to_target -= Counter((target.id,))

    def _is_busy(self, origin: Origin, target: NodeId) -> bool:
        """They are this node's own streams on its connection to the target: it needs some itself."""
        limit = FORWARDS_PER_CLIENT if origin.role is Role.CLIENT else FORWARDS_PER_NODE
        return self._for_account[origin.account] >= limit or self._to_target[target] >= FORWARDS_PER_TARGET

    async def serve_end(self, between: Origin, header: dict[str, Any], stream: Stream) -> None:
        """Somebody beyond another member: it has to prove who it is."""
        try:
            async with asyncio.timeout(FORWARD_PROOF_S):
                asked = await challenge(stream, self._members.membership, self._members.me)
        except (Forged, MalformedMessage, TimeoutError) as error:
            log.info("stream refused between=%s: %r", between.id[:8], error)
            stream.reset()
            return
        opener = asked.opener
        service = self._service(asked.kind, opener.role)
        if service is None or asked.kind in ("forward", "forwarded"):
            stream.reset()
            return
        await service(Origin.of(opener.node, opener.role, opener.credential), asked.header, stream)


@frozen
class Forwarded:
    """What somebody who has proven who it is wants of this node."""

    opener: Signer
    kind: str
    header: dict[str, Any]


async def prove(
    stream: Stream,
    membership: Membership,
    identity: Identity,
    *,
    to: NodeId,
    kind: str,
    header: dict[str, Any],
) -> None:
    """Answer the receiver's challenge, through whoever is in the middle."""
    nonce = (await stream.read_document()).get("nonce")
    if not isinstance(nonce, str) or len(nonce) > 4 * _NONCE_BYTES:
        raise PeerLost("the other node sent no challenge")
    text = json.dumps({"to": to, "nonce": nonce, "kind": kind, "header": header})
    await stream.write_document(signed_to_document(membership.seal(identity, Claim.STREAM, text)))


async def challenge(stream: Stream, membership: Membership, me: NodeId) -> Forwarded:
    """Who has opened it, and for what; raises `Forged` or `MalformedMessage`."""
    assert membership.mesh is not None
    nonce = secrets.token_hex(_NONCE_BYTES)
    await stream.write_document({"nonce": nonce})
    signed = signed_from_fields(Fields(await stream.read_document(), "forwarded"))
    opener = signer_of(signed, membership.mesh, Claim.STREAM)
    if membership.revocations.strikes(opener.credential) is not None:
        raise Forged("a stream from a node that was expelled")
    try:
        fields = Fields(json.loads(signed.text), "forwarded")
    except (ValueError, RecursionError):
        raise MalformedMessage("forwarded: not JSON") from None
    header = fields.get("header")
    if (
        fields.node("to") != me
        or fields.text("nonce", 4 * _NONCE_BYTES) != nonce
        or not isinstance(header, dict)
    ):
        raise Forged("a stream that was opened to another node, or was used before")
    return Forwarded(opener=opener, kind=fields.text("kind", _KIND_CHARS), header=header)


async def join_streams(stream: Stream, onward: Stream) -> None:
    """Copy both ways until both have ended; where one breaks, the other is reset."""
    try:
        async with task_group() as group:
            group.create_task(_pump(stream, onward), name="forward")
            group.create_task(_pump(onward, stream), name="forward back")
    except BaseException:
        # Merely let go of, it would look as if it had ended well. The first is its server's to reset.
        onward.reset()
        raise


async def _pump(source: Stream, target: Stream) -> None:
    while data := await source.read(_PIECE_BYTES):
        await target.write(data)
    await target.finish()
