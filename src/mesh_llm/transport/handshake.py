"""What two nodes tell each other on a connection's first stream, before anything else.

    dialer    HELLO     protocol versions, nonce
    acceptor  HELLO     protocol versions, nonce
    dialer    PROVE     an invite's id and a proof of its secret, or a credential
    acceptor  ADMITTED  its own credential; to one who joins also: the proof turned round, a credential,
                        the welcome
           or EXPELLED  the signed revocation by which the dialer is no member any more
    dialer    CONFIRM
    acceptor  CONFIRM   only where the acceptor is the arbiter

QUIC has authenticated both ids. A proof is an HMAC with the invite's secret over both ids, both nonces,
the mesh and a label for the direction: it is worth nothing on another connection. Until its proof holds,
the dialer has been told versions and a nonce. A refusal is the connection's closing, with a code, which is
no more than a hint; of its expulsion a node is convinced by the revocation alone.

The arbiter is the one with the smaller id. When both dial at once there are two connections; the
arbiter keeps the one that first got as far as its decision, and the other side follows: it takes a
connection for established only when the arbiter has confirmed it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from mesh_llm.defaults import HANDSHAKE_S, PROTOCOL_VERSION
from mesh_llm.errors import CredentialRefused, Expelled, MalformedMessage
from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.messages import signed_from_fields, signed_to_document
from mesh_llm.transport import credential as credentials
from mesh_llm.transport.admissions import Verdict, proof
from mesh_llm.transport.close_codes import CloseReason, Code, close, closing_of
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.framing import FrameError, FrameType
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.revocations import Revocation, Revocations
from mesh_llm.types import MeshId, NodeId, Role, Signed

PROTOCOL_OLDEST = 2
"""That is still understood: neighbouring versions work together."""
EXPELLED_READ_S = 2.0
"""For one who was expelled to read why, before its connection is closed."""


T = TypeVar("T")

NONCE_BYTES = 16
GONE_LIMIT = 8
_PROOF = re.compile("[0-9a-f]{64}")
_SHORT = re.compile("[0-9a-f]{16}")
_NONCE = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_JOINER, _INVITER = b"joiner", b"inviter"


class Dropped(Exception):
    """A connection that ended before its handshake did."""

    def __init__(self, closing: CloseReason, *, by_us: bool) -> None:
        super().__init__(closing.reason)
        self.closing = closing
        self.by_us = by_us


class HandshakeRefusal(Exception):
    """The handshake ends here, and this is what the other side is told."""

    def __init__(self, code: Code, *, revocation: Revocation | None = None) -> None:
        super().__init__(code.name)
        self.code = code
        self.revocation = revocation
        """By which the other side is no member any more."""


class SaidExpelled(Exception):
    """The other side says that this node was expelled, and shows what for; the caller has to verify it."""

    def __init__(self, signed: Signed) -> None:
        super().__init__("expelled")
        self.signed = signed


@frozen
class Self:
    """This node, as a handshake needs it."""

    identity: Identity
    instance: str
    """16 hexadecimal digits that this run of the node has drawn."""
    membership: Membership
    gone: Callable[[NodeId], list[str]]
    """Connections with a node that have ended here: it may not have noticed."""
    welcome: Callable[[NodeId, Role], dict[str, Any]]
    is_crowd: Callable[[NodeId, Credential], bool] = lambda node, credential: False
    """Whether as many clients with the same invite are connected as one node serves."""


@frozen
class Introduction:
    """What a handshake has shown about the other side."""

    node: NodeId
    role: Role
    credential: Credential
    instance: str
    link: str
    """The connection's name, the same on both sides."""
    gone: frozenset[str]


@frozen
class Joined:
    mesh: MeshId
    credential: Credential
    welcome: dict[str, Any]


async def conduct(connection: Any, steps: Coroutine[Any, Any, T]) -> T:
    """Run a handshake. However it fails, the connection is closed, and `Dropped` says why."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return await steps
    except HandshakeRefusal as refusal:
        closing = close(connection, refusal.code)
    except FrameError as error:
        closing = close(connection, Code.MALFORMED, f"not of this protocol: {error}")
    except TimeoutError:
        closing = close(connection, Code.TIMEOUT)
    except iroh().IrohError:
        words = connection.close_reason()
        if words is not None:
            raise Dropped(closing_of(words), by_us=False) from None
        # It reset the stream and kept the connection.
        closing = close(connection, Code.MALFORMED)
    except BaseException:
        close(connection, Code.BUSY)
        raise
    raise Dropped(closing, by_us=True)


def is_arbiter(me: NodeId, other: NodeId) -> bool:
    return me < other


# -- the acceptor --------------------------------------------------------------------------------


async def answer(
    control: ControlStream, me: Self, node: NodeId, *, now: float, let_in: Callable[[], None]
) -> Introduction:
    """Up to ADMITTED; the caller waits for CONFIRM.

    `let_in` is called before the dialer can know that it is admitted.
    """
    hello = await control.expect(FrameType.HELLO)
    theirs = _hello_nonce(hello)
    ours = secrets.token_bytes(NONCE_BYTES)
    await control.write(FrameType.HELLO, _hello(ours))
    prove = await control.expect(FrameType.PROVE)
    if me.membership.mesh is None:
        raise HandshakeRefusal(Code.WRONG)
    transcript = _transcript(me.membership.mesh, node, me.identity.id, theirs, ours)
    try:
        if "invite" in prove:
            body, introduction = _admit_by_invite(me, node, prove, transcript, now)
        else:
            body, introduction = _admit_by_credential(me, node, prove, transcript)
    except HandshakeRefusal as refusal:
        if refusal.revocation is not None:
            await _show(control, refusal.revocation)
        raise
    control.trust()
    let_in()
    await control.write(FrameType.ADMITTED, {**body, **_about(me, node)})
    return introduction


async def _show(control: ControlStream, revocation: Revocation) -> None:
    """Let the other side read why it is out: closing at once would overtake it."""
    with suppress(TimeoutError, FrameError, iroh().IrohError):
        async with asyncio.timeout(EXPELLED_READ_S):
            await control.write(FrameType.EXPELLED, signed_to_document(revocation.signed))
            await control.read()


def _admit_by_invite(
    me: Self, node: NodeId, prove: dict[str, Any], transcript: bytes, now: float
) -> tuple[dict[str, Any], Introduction]:
    membership = me.membership
    id, given = _matching(prove, "invite", _SHORT), bytes.fromhex(_matching(prove, "proof", _PROOF))
    verdict = membership.admissions.verify(
        id=id, node=node, label=_JOINER, transcript=transcript, given=given, now=now
    )
    if verdict is not Verdict.RIGHT:
        raise HandshakeRefusal(Code[verdict.name])
    invite = membership.admissions.get(id)
    assert invite is not None
    try:
        membership.role(me.identity.id)
        assert membership.mesh is not None
        granted = credentials.extend(
            membership.credential, membership.mesh, me.identity, node, invite.role, id
        )
    except (CredentialRefused, Expelled):
        # Expelled ourselves, or become a client since: our grants are worth nothing.
        raise HandshakeRefusal(Code.REVOKED) from None
    introduction = _introduction(prove, node, invite.role, granted, transcript)
    if me.is_crowd(node, granted):
        raise HandshakeRefusal(Code.CROWDED)
    # Counted here, not when it has confirmed: whoever has the credential is a member wherever it shows it.
    if not membership.admissions.use(id, node):
        raise HandshakeRefusal(Code.USED)
    body = {
        "proof": proof(invite.secret, _INVITER, transcript).hex(),
        "granted": credentials.to_text(granted),
        "welcome": me.welcome(node, invite.role),
    }
    return body, introduction


def _admit_by_credential(
    me: Self, node: NodeId, prove: dict[str, Any], transcript: bytes
) -> tuple[dict[str, Any], Introduction]:
    role, credential = _check(me.membership, node, prove)
    if me.is_crowd(node, credential):
        raise HandshakeRefusal(Code.CROWDED)
    return {}, _introduction(prove, node, role, credential, transcript)


# -- the dialer ----------------------------------------------------------------------------------


async def greet(control: ControlStream) -> tuple[bytes, bytes]:
    """Both nonces, the dialer's first."""
    ours = secrets.token_bytes(NONCE_BYTES)
    await control.write(FrameType.HELLO, _hello(ours))
    return ours, _hello_nonce(await control.expect(FrameType.HELLO))


async def prove_invite(control: ControlStream, me: Self, invite: Invite) -> tuple[Introduction, Joined]:
    """Up to ADMITTED; the caller confirms."""
    ours, theirs = await greet(control)
    transcript = _transcript(invite.mesh, me.identity.id, invite.inviter, ours, theirs)
    body = {"invite": invite.id, "proof": proof(invite.secret, _JOINER, transcript).hex()}
    await control.write(FrameType.PROVE, {**body, **_about(me, invite.inviter, credential=False)})
    admitted = await _admitted(control)
    given = bytes.fromhex(_matching(admitted, "proof", _PROOF))
    if not hmac.compare_digest(proof(invite.secret, _INVITER, transcript), given):
        raise HandshakeRefusal(Code.WRONG)
    welcome = admitted.get("welcome")
    if not isinstance(welcome, dict):
        raise FrameError("no welcome")
    future = Membership(mesh=invite.mesh, revocations=Revocations(invite.mesh))
    introduction = _introduce_acceptor(future, invite.inviter, admitted, transcript)
    try:
        granted = credentials.from_text(admitted.get("granted"))
        credentials.check(granted, invite.mesh, me.identity.id)
    except CredentialRefused:
        raise HandshakeRefusal(Code.WRONG) from None
    return introduction, Joined(mesh=invite.mesh, credential=granted, welcome=welcome)


async def prove_credential(control: ControlStream, me: Self, node: NodeId) -> Introduction:
    """Up to ADMITTED; the caller confirms."""
    mesh = me.membership.mesh
    assert mesh is not None
    ours, theirs = await greet(control)
    transcript = _transcript(mesh, me.identity.id, node, ours, theirs)
    await control.write(FrameType.PROVE, _about(me, node))
    admitted = await _admitted(control)
    return _introduce_acceptor(me.membership, node, admitted, transcript)


async def _admitted(control: ControlStream) -> dict[str, Any]:
    frame = await control.read()
    if frame is not None and frame.type == FrameType.EXPELLED:
        try:
            raise SaidExpelled(signed_from_fields(Fields(frame.body, "expelled")))
        except MalformedMessage as error:
            raise FrameError(error.message) from None
    if frame is None or frame.type != FrameType.ADMITTED:
        raise FrameError("a frame that is not ADMITTED")
    return frame.body


def _introduce_acceptor(
    membership: Membership, node: NodeId, admitted: dict[str, Any], transcript: bytes
) -> Introduction:
    role, credential = _check(membership, node, admitted)
    return _introduction(admitted, node, role, credential, transcript)


# -- both ----------------------------------------------------------------------------------------


def _hello(nonce: bytes) -> dict[str, Any]:
    return {"version": PROTOCOL_VERSION, "oldest": PROTOCOL_OLDEST, "nonce": nonce.hex()}


def _hello_nonce(hello: dict[str, Any]) -> bytes:
    version = hello.get("version")
    oldest = hello.get("oldest", version)
    if type(version) is not int or type(oldest) is not int:
        raise FrameError("a HELLO without version")
    # Told from the other side's point of view. Between the two lies what both can speak.
    if version < PROTOCOL_OLDEST:
        raise HandshakeRefusal(Code.TOO_OLD)
    if oldest > PROTOCOL_VERSION:
        raise HandshakeRefusal(Code.TOO_NEW)
    return bytes.fromhex(_matching(hello, "nonce", _NONCE))


def _transcript(mesh: MeshId, dialer: NodeId, acceptor: NodeId, first: bytes, second: bytes) -> bytes:
    return b"".join((bytes.fromhex(mesh), bytes.fromhex(dialer), bytes.fromhex(acceptor), first, second))


def _about(me: Self, node: NodeId, *, credential: bool = True) -> dict[str, Any]:
    body: dict[str, Any] = {"instance": me.instance, "gone": me.gone(node)}
    if credential:
        body["credential"] = credentials.to_text(me.membership.credential)
    return body


def _check(membership: Membership, node: NodeId, body: dict[str, Any]) -> tuple[Role, Credential]:
    mesh = membership.mesh
    assert mesh is not None
    try:
        credential = credentials.from_text(body.get("credential"))
        role = credentials.check(credential, mesh, node)
    except CredentialRefused:
        raise HandshakeRefusal(Code.WRONG) from None
    if (revocation := membership.revocations.strikes(credential)) is not None:
        raise HandshakeRefusal(Code.REVOKED, revocation=revocation)
    return role, credential


def _introduction(
    body: dict[str, Any], node: NodeId, role: Role, credential: Credential, transcript: bytes
) -> Introduction:
    gone = body.get("gone")
    if not isinstance(gone, list) or len(gone) > GONE_LIMIT or not all(isinstance(id, str) for id in gone):
        raise FrameError("a malformed list of ended connections")
    return Introduction(
        node=node,
        role=role,
        credential=credential,
        instance=_matching(body, "instance", _SHORT),
        link=hashlib.sha256(b"mesh-llm link 1\0" + transcript).hexdigest()[:16],
        gone=frozenset(gone),
    )


def _matching(body: dict[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FrameError(f"a malformed {key}")
    return value
