"""Strangers: tokens that are of no use, floods of them, and those who do not keep to the protocol."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.defaults import HANDSHAKES_LIMIT, PROTOCOL_VERSION
from mesh_llm.errors import InviteRefused, JoinRefused
from mesh_llm.transport import failed_attempts, handshake, invite
from mesh_llm.transport.close_codes import CloseReason, Code, closing_of
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.dialler import connect_refused, join_refused
from mesh_llm.transport.failed_attempts import FAILED_OVERALL, FAILED_OVERALL_REFILL_S
from mesh_llm.transport.framing import HEAD, FrameParser, FrameType, encode_frame
from mesh_llm.transport.handshake import Dropped
from mesh_llm.transport.invite import Invite
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.network import Membership
from mesh_llm.types import Address, NodeId, Role
from tests.support.members import WITHIN_S, Member, Mesh, Stranger, mesh_of_members, new_identity

NOT_ACCEPTED = "the token was not accepted: it is wrong, or belongs to another mesh"


@pytest.fixture
async def mesh(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Mesh]:
    async with mesh_of_members() as mesh:
        yield mesh
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def refusal(joiner: Member, token: Invite, **options: Any) -> str:
    with pytest.raises(JoinRefused) as caught:
        await joiner.network.join(token, **options)
    assert joiner.network.mesh.mesh is None
    assert joiner.handler.events == []
    return caught.value.message


# -- tokens --------------------------------------------------------------------------------------


async def test_wrong_unknown_and_foreign_tokens_look_the_same(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    token = first.token()

    assert await refusal(joiner, replace(token, secret=secrets.token_bytes(16))) == NOT_ACCEPTED
    assert await refusal(joiner, replace(token, id="00" * 8)) == NOT_ACCEPTED
    first.network.mesh.adopt(new_mesh(), ())
    assert await refusal(joiner, token) == NOT_ACCEPTED
    told = ("refused", joiner.network.id, "it knows no invite of this mesh")
    assert first.handler.events == [told] * 3
    assert first.network.pending.attempts.count == 3


async def test_a_right_token_for_another_mesh(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()

    assert await refusal(joiner, replace(first.token(), mesh=new_mesh())) == NOT_ACCEPTED


def new_mesh() -> Any:
    return Membership.create(new_identity()).mesh


async def test_expired_by_the_inviters_clock(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    issued, _ = first.invite()
    token = first.token()
    first.network.mesh.admissions._invites[token.id] = replace(
        issued, id=token.id, secret=token.secret, expires=1
    )

    assert await refusal(joiner, token) == "the token has expired"
    assert first.handler.events == [("refused", joiner.network.id, "its invite has expired")]
    # Not for one who does not know the secret.
    assert await refusal(joiner, replace(token, secret=bytes(16))) == NOT_ACCEPTED


async def test_expired_by_ones_own_clock_sends_nothing(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()

    message = await refusal(joiner, replace(first.token(), expires=0))

    assert message == "the token expired on 1970-01-01 at 00:00 UTC"
    assert first.network.pending.attempts.count == 0


async def test_revoked(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    token = first.token()
    first.revoke(token.id)

    assert await refusal(joiner, token) == "the token was revoked"
    assert first.handler.events == [("refused", joiner.network.id, "its invite was revoked")]
    assert await refusal(joiner, replace(token, secret=bytes(16))) == NOT_ACCEPTED


async def test_truncated(mesh: Mesh) -> None:
    first = await mesh.creator()

    with pytest.raises(InviteRefused, match=r"^the token is damaged: a part of it is missing or altered$"):
        invite.decode(first.invite()[1][:-1])


async def test_ones_own_token(mesh: Mesh) -> None:
    first = await mesh.creator()

    with pytest.raises(JoinRefused, match=r"^this node made the token itself$"):
        await first.network.join(first.token())


async def test_an_inviter_that_has_left_its_mesh(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    token = first.token()
    first.network.mesh.mesh = None

    assert await refusal(joiner, token) == NOT_ACCEPTED


async def test_an_inviter_that_was_expelled_grants_nothing(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    joiner = await mesh.member()
    token = second.token()
    first.network.mesh.revoke(second.network.mesh.credential[0].invite, first.identity)
    second.network.mesh.take_revocations(first.network.mesh.revocations.signed)

    assert await refusal(joiner, token) == "the token was revoked"


async def test_nobody_there(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    token = first.token()
    await first.network.close()

    message = await refusal(joiner, token, timeout_s=1)

    assert message == f"no answer from the inviter within 1 s; tried {token.address.direct[0]}"


async def test_an_impostor_at_the_inviters_address(mesh: Mesh) -> None:
    """QUIC itself finds out: the key is not the inviter's."""
    first, joiner, impostor = await mesh.creator(), await mesh.member(), await mesh.creator()
    token = replace(first.token(), address=impostor.network.address)

    assert "no answer from the inviter within 1 s" in await refusal(joiner, token, timeout_s=1)
    assert impostor.handler.events == []


async def test_an_inviter_that_does_not_know_the_secret(mesh: Mesh) -> None:
    """The proof goes both ways: an inviter that says yes to everything is refused."""
    joiner, liar = await mesh.member(), await mesh.stranger()
    token = Invite(id="00" * 8, mesh=new_mesh(), secret=bytes(16), inviter=liar.id, address=liar.address)

    async def say_yes() -> Any:
        connection = await (await (await liar.endpoint.accept_next()).accept()).connect()
        control = ControlStream(await connection.accept_bi())
        await control.expect(FrameType.HELLO)
        await control.write(FrameType.HELLO, {"version": PROTOCOL_VERSION, "nonce": "00" * 16})
        await control.expect(FrameType.PROVE)
        body = {"proof": "00" * 32, "granted": "", "welcome": {}, "credential": ""}
        await control.write(FrameType.ADMITTED, {**body, "instance": "00" * 8, "gone": []})
        return connection

    liars_end = asyncio.create_task(say_yes())
    message = await refusal(joiner, token)

    assert message == "the inviter could not prove that it made the token"
    assert (await closing(await liars_end)).code is Code.WRONG


# -- versions ------------------------------------------------------------------------------------


async def test_another_protocol_altogether(mesh: Mesh) -> None:
    joiner, other = await mesh.member(), await mesh.stranger(alpn=b"mesh-llm/2")
    token = Invite(id="00" * 8, mesh=new_mesh(), secret=bytes(16), inviter=other.id, address=other.address)

    async def accept() -> None:
        incoming = await other.endpoint.accept_next()
        with pytest.raises(iroh().IrohError):
            await (await incoming.accept()).connect()

    accepting = asyncio.create_task(accept())
    with pytest.raises(JoinRefused) as caught:
        await joiner.network.join(token)
    await accepting

    assert caught.value.message == f"node {other.id[:10]} speaks another version of the mesh's protocol"
    assert caught.value.hint == "update mesh-llm on both machines"


@pytest.mark.parametrize(("version", "code"), [(0, Code.TOO_OLD), (1, Code.TOO_OLD), (3, Code.TOO_NEW)])
async def test_another_version_is_told_and_nothing_else(mesh: Mesh, version: int, code: Code) -> None:
    first, stranger = await mesh.creator(), await mesh.stranger()

    received, end = await say(stranger, first, encode_frame(FrameType.HELLO, {"version": version}))

    assert (received, end.code) == (b"", code)


@pytest.mark.parametrize("by_us", [True, False])
@pytest.mark.parametrize("we_are_older", [True, False])
def test_whom_to_update(we_are_older: bool, by_us: bool) -> None:
    # Whoever finds out tells the other about the other.
    code = Code.TOO_OLD if we_are_older is not by_us else Code.TOO_NEW

    error = join_refused(Dropped(CloseReason(code=code, reason=""), by_us=by_us))

    if we_are_older:
        assert error.message == "the inviter runs a newer mesh-llm than this node"
        assert error.hint == "update mesh-llm on this machine"
    else:
        assert error.message == "the inviter runs an older mesh-llm than this node"
        assert error.hint == "update mesh-llm on the other machine"


@pytest.mark.parametrize("by_us", [True, False])
@pytest.mark.parametrize("code", list(Code))
def test_every_refusal_has_a_sentence(code: Code, by_us: bool) -> None:
    dropped = Dropped(CloseReason(code=code, reason="said so"), by_us=by_us)

    for error in (join_refused(dropped), connect_refused(NodeId("ab" * 32), dropped)):
        assert error.message[-1].isalpha()
        assert len(error.message) > 15


# -- those who do not keep to the protocol -------------------------------------------------------


async def closing(connection: Any) -> CloseReason:
    # Not wait_for, which can take a cancellation for an answer.
    async with asyncio.timeout(WITHIN_S):
        return closing_of(await connection.closed())


async def say(stranger: Stranger, member: Member, data: bytes) -> tuple[bytes, CloseReason]:
    """Say something on the first stream: what comes back, and how it ends."""
    connection = await stranger.dial(member)
    received = b""
    try:
        async with asyncio.timeout(WITHIN_S):
            pair = await connection.open_bi()
            await pair.send().write_all(data)
            while part := await pair.recv().read(1 << 16):
                received += part
    except iroh().IrohError:
        pass
    return received, await closing(connection)


def hello() -> bytes:
    return encode_frame(FrameType.HELLO, {"version": PROTOCOL_VERSION, "nonce": "00" * 16})


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="another protocol"),
        pytest.param(bytes(range(256)) * 4000, id="a megabyte of garbage"),
        pytest.param(b"\xff\xff\xff\xff\x01\x01", id="a huge length"),
        pytest.param(HEAD.pack(16 * 1024 + 1, 1, 1), id="a length above the limit for strangers"),
        pytest.param(encode_frame(FrameType.MESSAGE, {"x": 1}), id="a message before anything else"),
        pytest.param(encode_frame(FrameType.CONFIRM, {}), id="the end before the beginning"),
        pytest.param(encode_frame(FrameType.HELLO, {}), id="a hello without version"),
        pytest.param(
            encode_frame(FrameType.HELLO, {"version": True, "nonce": "00" * 16}), id="a strange version"
        ),
        pytest.param(
            encode_frame(FrameType.HELLO, {"version": 2, "oldest": "1", "nonce": "00" * 16}),
            id="a strange oldest version",
        ),
        pytest.param(encode_frame(FrameType.HELLO, {"version": 2, "nonce": "0"}), id="a short nonce"),
        pytest.param(
            encode_frame(FrameType.HELLO, {"version": 2, "nonce": ["x"] * 32}), id="a strange nonce"
        ),
    ],
)
async def test_garbage_before_the_hello(mesh: Mesh, data: bytes) -> None:
    first, stranger = await mesh.creator(), await mesh.stranger()

    received, end = await say(stranger, first, data)

    assert received == b""
    assert end.code is Code.MALFORMED
    await nothing_happened(first)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (encode_frame(FrameType.PROVE, {}), Code.WRONG),
        (encode_frame(FrameType.PROVE, {"credential": "", "instance": "00" * 8, "gone": []}), Code.WRONG),
        (encode_frame(FrameType.PROVE, {"credential": [{"node": 1}]}), Code.WRONG),
        (encode_frame(FrameType.PROVE, {"credential": {"a": [[[]]]}}), Code.WRONG),
        (encode_frame(FrameType.PROVE, {"invite": "00" * 8}), Code.MALFORMED),
        (encode_frame(FrameType.PROVE, {"invite": 5, "proof": "00" * 32}), Code.MALFORMED),
        (encode_frame(FrameType.PROVE, {"invite": "00" * 8, "proof": "00" * 32}), Code.WRONG),
        (encode_frame(FrameType.MESSAGE, {}), Code.MALFORMED),
        (hello(), Code.MALFORMED),
        (HEAD.pack(2, 1, 99) + b"{}", Code.MALFORMED),
    ],
)
async def test_garbage_after_the_hello(mesh: Mesh, data: bytes, code: Code) -> None:
    first, stranger = await mesh.creator(), await mesh.stranger()

    received, end = await say(stranger, first, hello() + data)

    assert end.code is code
    # Versions and a nonce is all that one learns, if that.
    assert received == b"" or set(decoded(received)) == {"version", "oldest", "nonce"}
    assert first.id not in end.reason
    await nothing_happened(first)


def decoded(data: bytes) -> dict[str, Any]:
    parser = FrameParser()
    parser.feed(data)
    frame = parser.next()
    assert frame is not None
    assert not parser.has_rest
    return frame.body


async def nothing_happened(member: Member) -> None:
    await until(lambda: member.network.pending.waiting == 0)
    # Its node may hear that somebody was sent away, and nothing else of it.
    assert {what for what, _, _ in member.handler.events} <= {"refused"}
    assert member.network.peers == {}
    assert member.network.pending.attempts.count == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_streams_before_admission(mesh: Mesh) -> None:
    first, stranger = await mesh.creator(), await mesh.stranger()
    connection = await stranger.dial(first)

    async def open_many() -> None:
        for _ in range(1000):
            pair = await connection.open_bi()
            await pair.send().write_all(b"\0" * 1000)

    with pytest.raises(iroh().IrohError):
        await open_many()

    assert (await closing(connection)).code is Code.MALFORMED
    await nothing_happened(first)


async def test_a_one_way_stream_before_admission(mesh: Mesh) -> None:
    first, stranger = await mesh.creator(), await mesh.stranger()
    connection = await stranger.dial(first)

    await (await connection.open_uni()).write_all(b"x")

    assert (await closing(connection)).code is Code.MALFORMED
    await nothing_happened(first)


@pytest.mark.parametrize("data", [b"", hello()], ids=["nothing at all", "a hello and no more"])
async def test_silence(mesh: Mesh, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    first, stranger = await mesh.creator(), await mesh.stranger()
    connection = await stranger.dial(first)
    if data:
        # On a machine that pauses here the time may be up before it is said.
        with suppress(iroh().IrohError):
            pair = await connection.open_bi()
            await pair.send().write_all(data)

    assert (await closing(connection)).code is Code.TIMEOUT
    await nothing_happened(first)


async def test_one_who_leaves_at_once(mesh: Mesh) -> None:
    first, stranger = await mesh.creator(), await mesh.stranger()
    connection = await stranger.dial(first)

    connection.close(0, b"")

    await until(lambda: first.network.pending.attempts.count == 1)
    await nothing_happened(first)


async def test_one_who_says_nothing_more_after_being_admitted(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its confirmation it is no peer, whoever the arbiter is."""
    # Where a pause of the machine uses up the time before it is admitted, the next one gets more.
    for handshake_s in (0.3, 3.0, 10.0):
        monkeypatch.setattr(handshake, "HANDSHAKE_S", handshake_s)
        first, stranger = await mesh.creator(), await mesh.stranger()
        with suppress(iroh().IrohError):
            connection = await stranger.dial(first)
            # Held until the end: a stream that nobody holds is ended, which says something.
            control = ControlStream(await connection.open_bi())
            introduction, joined = await handshake.prove_invite(control, nobody(stranger), first.token())
            break
    else:
        raise AssertionError("it was never admitted")

    assert (introduction.node, joined.welcome["as"]) == (first.id, "node")
    assert (await closing(connection)).code is Code.TIMEOUT
    await nothing_happened(first)


def nobody(stranger: Stranger) -> handshake.Self:
    """A stranger as it is before it has joined anything."""
    return handshake.Self(
        identity=replace(new_identity(), id=stranger.id),
        instance="00" * 8,
        membership=Membership(),
        gone=lambda node: [],
        welcome=lambda node, role: {},
    )


async def test_a_proof_is_worth_nothing_on_another_connection(mesh: Mesh) -> None:
    first, joiner, stranger = await mesh.creator(), await mesh.member(), await mesh.stranger()
    token = first.token()
    seen: list[dict[str, Any]] = []

    class Overheard(ControlStream):
        async def write(self, type: FrameType, body: dict[str, Any]) -> None:
            seen.append(body)
            await super().write(type, body)

    connection = await stranger.dial(first)
    control = Overheard(await connection.open_bi())
    me = replace(joiner.network._self, identity=replace(joiner.identity, id=stranger.id))
    await handshake.prove_invite(control, me, token)
    connection.close(0, b"")

    first_nonce, prove = seen
    data = encode_frame(FrameType.HELLO, first_nonce) + encode_frame(FrameType.PROVE, prove)
    _, end = await say(stranger, first, data)

    assert end.code is Code.WRONG


# -- floods --------------------------------------------------------------------------------------


async def test_one_node_that_tries_too_often_waits(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # However long eight attempts take, none is forgiven meanwhile.
    monkeypatch.setattr(failed_attempts, "FAILED_PER_NODE_REFILL_S", 3600.0)
    first, stranger = await mesh.creator(), await mesh.stranger()
    wrong = hello() + encode_frame(FrameType.PROVE, {"invite": "00" * 8, "proof": "00" * 32})

    codes = [(await say(stranger, first, wrong))[1].code for _ in range(8)]

    assert codes == [Code.WRONG] * 5 + [Code.BUSY] * 3
    assert first.network.pending.attempts.count == 8


async def test_a_flood_of_wrong_tokens(mesh: Mesh) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    flood = [await mesh.stranger() for _ in range(40)]
    wrong = hello() + encode_frame(FrameType.PROVE, {"invite": "00" * 8, "proof": "00" * 32})
    most_at_once = 0
    started = time.monotonic()

    async def attempt(stranger: Stranger) -> None:
        nonlocal most_at_once
        while True:
            with suppress(iroh().IrohError):
                await say(stranger, first, wrong)
            most_at_once = max(most_at_once, first.network.pending.waiting)

    pouring = [asyncio.create_task(attempt(stranger)) for stranger in flood]
    try:
        await until(lambda: first.network.pending.attempts.count >= 60)
        # All of them share one loop: on a slow machine it has to come again several times.
        await joiner.network.join(first.token(), timeout_s=2 * WITHIN_S)
    finally:
        for task in pouring:
            task.cancel()
        await asyncio.wait(pouring)

    assert await first.handler.wait("peer") == [(joiner.id, Role.NODE)]
    borne = FAILED_OVERALL + (time.monotonic() - started) / FAILED_OVERALL_REFILL_S + HANDSHAKES_LIMIT
    assert 60 <= first.network.pending.attempts.count <= borne
    assert 0 < most_at_once <= HANDSHAKES_LIMIT


async def test_a_flood_of_silence(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """More strangers than there are places, who all say nothing; the oldest make room."""
    # Nobody goes because its time is up, however long it takes them all to come.
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 4 * WITHIN_S)
    first, joiner = await mesh.creator(), await mesh.member()
    strangers = [await mesh.stranger() for _ in range(HANDSHAKES_LIMIT)]
    connections = [await stranger.dial(first) for stranger in strangers]
    await until(lambda: first.network.pending.waiting == HANDSHAKES_LIMIT)

    await joiner.network.join(first.token())

    assert await first.handler.wait("peer") == [(joiner.id, Role.NODE)]
    assert first.network.pending.waiting >= HANDSHAKES_LIMIT - 2
    assert (await closing(connections[0])).code is Code.BUSY
    assert connections[-1].close_reason() is None


async def test_the_address_of_nobody(mesh: Mesh) -> None:
    joiner = await mesh.member()
    token = Invite(
        id="00" * 8, mesh=new_mesh(), secret=bytes(16), inviter=new_identity().id, address=Address()
    )

    message = await refusal(joiner, token, timeout_s=1)

    assert message == "no answer from the inviter within 1 s; tried its id alone"
