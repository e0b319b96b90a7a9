"""Members of one mesh, two and three of them in one process: connections, messages, streams, ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mesh_llm.errors import CredentialRefused, Expelled, JoinRefused, MeshError, PeerLost
from mesh_llm.transport import network
from mesh_llm.transport.close_codes import Code
from mesh_llm.transport.credential import issuers_of
from mesh_llm.transport.framing import HEAD
from mesh_llm.transport.iroh_library import iroh
from mesh_llm.transport.network import Membership, Network, NetworkConfig
from mesh_llm.types import Address, LinkKind, MeshId, NodeId, Role
from tests.support.members import (
    WITHIN_S,
    Member,
    Mesh,
    Recorder,
    broken,
    mesh_of_members,
    new_identity,
    ordered_identities,
    read_all,
)


@pytest.fixture
async def mesh(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Mesh]:
    async with mesh_of_members() as mesh:
        yield mesh
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- getting together ----------------------------------------------------------------------------


async def test_joining_by_token(mesh: Mesh) -> None:
    first, second = await mesh.creator(), await mesh.member()
    token = first.token()

    peer, welcome = await second.network.join(token)

    assert welcome == {"welcome": second.id, "as": "node"}
    assert (peer.id, peer.role, peer.credential) == (first.id, Role.OWNER, ())
    assert second.network.mesh.mesh == MeshId(first.id)
    assert second.network.mesh.role(second.id) is Role.NODE
    assert [grant.invite for grant in second.network.mesh.credential] == [token.id]
    assert await first.handler.wait("peer") == [(second.id, Role.NODE)]
    assert second.handler.of("peer") == [(first.id, Role.OWNER)]
    assert first.peer(second).credential == second.network.mesh.credential
    assert [invite.uses for invite in first.network.mesh.admissions.invites()] == [1]


async def test_messages_arrive_whole_and_in_order(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    bodies = [{"number": number, "text": "ü" * number * 10} for number in range(300)]

    for body in bodies:
        first.peer(second).send(body)
        second.peer(first).send(body)

    assert await second.handler.wait("message", 300) == [(first.id, body) for body in bodies]
    assert await first.handler.wait("message", 300) == [(second.id, body) for body in bodies]


async def test_both_return_without_a_token(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    await first.network.close()
    await second.network.close()

    first_again = await mesh.member(first.written(), first.identity)
    second_again = await mesh.member(second.written(), second.identity)
    peer = await second_again.connect(first_again)

    assert (peer.id, peer.role) == (first.id, Role.OWNER)
    assert await first_again.handler.wait("peer") == [(second.id, Role.NODE)]


async def test_the_invited_invite(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    third = await mesh.member()

    await third.network.join(second.token(role=Role.CLIENT))
    peer = await third.connect(first)

    assert peer.id == first.id
    assert (third.id, Role.CLIENT) in await first.handler.wait("peer", 2)
    issuers = issuers_of(first.peer(third).credential, MeshId(first.id))
    assert issuers == (first.id, second.id)
    with pytest.raises(CredentialRefused, match=r"^a client cannot invite others$"):
        third.invite()


@pytest.mark.parametrize("round", range(20))
async def test_both_dial_at_once(mesh: Mesh, round: int) -> None:
    first, second = await mesh.pair()
    first.peer(second).close("to dial anew")
    await second.handler.wait("lost")
    await first.handler.wait("lost")

    peers = await asyncio.gather(
        first.connect(second), second.connect(first), first.connect(second), second.connect(first)
    )

    # One connection, the same one on both sides, and it works both ways.
    assert len({peer.link for peer in peers}) == 1
    assert len(first.handler.of("peer")) == len(second.handler.of("peer")) == 2
    peers[0].send({"from": "first"})
    peers[1].send({"from": "second"})
    await first.handler.wait("message")
    await second.handler.wait("message")
    assert len(first.handler.of("lost")) == len(second.handler.of("lost")) == 1


@pytest.mark.parametrize("arbiter_dials", [True, False])
async def test_a_connection_that_one_side_has_given_up_is_replaced(mesh: Mesh, arbiter_dials: bool) -> None:
    small, large = ordered_identities()
    dialler_identity, other_identity = (small, large) if arbiter_dials else (large, small)
    other = await mesh.creator(other_identity)
    dialler = await mesh.member(identity=dialler_identity)
    await dialler.network.join(other.token())
    await other.handler.wait("peer")
    # As when its closing is lost on a dead path: the other side knows nothing.
    silent = dialler.peer(other)
    roster = dialler.network._roster
    del roster.peers[other.id]
    roster.remember_gone(other.id, silent.link)

    peer = await dialler.connect(other)

    assert await other.handler.wait("peer", 2) == [(dialler.id, Role.NODE)] * 2
    assert other.handler.of("lost") == [(dialler.id, "replaced by a newer connection")]
    assert other.peer(dialler).link == peer.link != silent.link


async def test_a_node_that_started_anew_replaces_itself(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    clone = await mesh.member(second.written(), second.identity)
    await clone.connect(first)

    await first.handler.wait("peer", 2)
    assert [event for event, _, _ in first.handler.events] == ["peer", "lost", "peer"]
    # Had it been restarted, nobody would hear this. It is one peer's word, and ends nobody.
    said = "another node runs with this node's identity"
    assert await second.handler.wait("lost") == [(first.id, said)]
    assert second.handler.of("duplicate") == clone.handler.of("duplicate") == []


async def test_a_member_that_is_not_there(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    await first.network.close()
    await second.handler.wait("lost")

    with pytest.raises(PeerLost) as caught:
        await second.connect(first, timeout_s=0.5)

    where = first.network.address.direct[0]
    assert caught.value.message == f"no answer from node {first.id[:10]} within 0 s; tried {where}"


async def test_malformed_addresses_do_not_spoil_the_rest(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    second.peer(first).close()
    await first.handler.wait("lost")
    good = first.network.address.direct
    told = Address(direct=("nonsense", "1.2.3.4:99999", *good, ""), relay="ftp://nonsense")

    assert (await second.network.connect(first.id, told)).id == first.id


@pytest.mark.parametrize("node", ["02" + "00" * 31, "abc", ""])
async def test_ids_that_are_no_keys(mesh: Mesh, node: str) -> None:
    first = await mesh.creator()

    with pytest.raises(PeerLost, match=r"has an id that is not a valid key$"):
        await first.network.connect(NodeId(node), Address(direct=("127.0.0.1:9",)))


async def test_dialling_oneself(mesh: Mesh) -> None:
    first = await mesh.creator()

    with pytest.raises(PeerLost, match=r": Connecting to ourself is not supported$"):
        await first.connect(first)


async def test_one_that_is_no_member_dials_nobody(mesh: Mesh) -> None:
    first, second = await mesh.creator(), await mesh.member()

    with pytest.raises(CredentialRefused, match=r"^this node has not joined a mesh$"):
        await second.connect(first)


async def test_members_of_different_meshes_refuse_each_other(mesh: Mesh) -> None:
    first, second = await mesh.creator(), await mesh.creator()

    with pytest.raises(JoinRefused) as caught:
        await second.connect(first)

    assert caught.value.message == f"node {first.id[:10]} does not accept this node as a member of its mesh"
    assert first.handler.events == [("refused", second.id, "it knows no invite of this mesh")]
    assert second.handler.events == []


async def test_a_credential_is_worth_nothing_in_other_hands(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    thief = await mesh.member(second.written())

    with pytest.raises(CredentialRefused):
        await thief.connect(first)
    # Its own check does not count.
    with pytest.raises(JoinRefused, match="does not accept this node as a member"):
        await thief.network._connect(first.id, first.network.address, WITHIN_S)


# -- going apart ---------------------------------------------------------------------------------


async def test_leaving_is_noticed_at_once_with_its_reason(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    await second.network.close("the lid was closed")

    assert await first.handler.wait("lost") == [(second.id, "the lid was closed")]
    assert first.network.peers == {}
    assert second.handler.of("lost") == []


async def test_closing_one_peer(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    peer = first.peer(second)

    peer.close("no answer to pings")
    peer.send({"into": "the void"})

    assert await first.handler.wait("lost") == [(second.id, "no answer to pings")]
    assert await second.handler.wait("lost") == [(first.id, "no answer to pings")]
    assert second.handler.of("message") == []
    with pytest.raises(PeerLost):
        await peer.open("echo", {})


async def test_revoking_expels(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    third, bystander = await mesh.member(), await mesh.member()
    await third.network.join(second.token())
    await third.connect(first)
    await bystander.network.join(first.token())
    await first.handler.wait("peer", 3)

    first.revoke(first.network.mesh.admissions.invites()[0].id)

    lost = await first.handler.wait("lost", 2)
    reason = "expelled: the invite was revoked"
    assert sorted(lost) == sorted([(second.id, reason), (third.id, reason)])
    assert list(first.network.peers) == [bystander.id]
    assert (await second.handler.wait("lost"))[0] == (first.id, reason)
    # Until it hears of it, it would take the old connection for a good one.
    await third.handler.until(lambda: first.id not in third.network.peers, "third hears of it, too")
    for expelled in (second, third):
        with pytest.raises(Expelled, match=r"^this node was expelled from its mesh: "):
            await expelled.connect(first)


async def test_news_of_revoked_invites(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    third = await mesh.member()
    token = first.token()
    await third.network.join(token)
    await second.connect(third)
    await third.handler.wait("peer", 2)

    first.network.mesh.revoke(token.id, first.identity)
    [news] = second.network.mesh.take_revocations(first.network.mesh.revocations.signed)
    assert (news.invite, news.signer) == (token.id, first.id)
    second.network.expel()

    assert await second.handler.wait("lost") == [(third.id, "expelled: the invite was revoked")]
    assert list(second.network.peers) == [first.id]


async def test_a_network_closes_with_all_that_goes_on(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    stream = await second.peer(first).open("hang", {})
    await first.handler.wait("stream")
    reading = asyncio.create_task(broken(stream))
    nowhere = asyncio.create_task(second.network.connect(new_identity().id, Address(direct=("127.0.0.1:9",))))
    await asyncio.sleep(0)

    await first.network.close()
    await first.network.close()

    assert first.handler.cancelled_streams == 1
    assert await reading == "the connection to the other node is gone"
    await second.network.close()
    with pytest.raises(PeerLost, match=r"^this node's network is closing$"):
        await nowhere
    stream.reset()


async def test_a_port_that_is_taken(mesh: Mesh) -> None:
    first = await mesh.creator()
    port = int(first.network.address.direct[0].rpartition(":")[2])
    config = NetworkConfig(identity=new_identity(), bind_ip="127.0.0.1", bind_port=port, no_relay=True)

    with pytest.raises(MeshError, match=rf"^cannot bind QUIC to 127\.0\.0\.1:{port}: "):
        await Network(config, Membership(), Recorder()).start()


async def test_nothing_is_open_beyond_the_address_asked_for(mesh: Mesh) -> None:
    first = await mesh.creator()

    bound = first.network._endpoint.bound_sockets()
    assert {address.rpartition(":")[0] for address in bound} == {"127.0.0.1", "[::1]"}
    assert [address.rpartition(":")[0] for address in first.network.address.direct] == ["127.0.0.1"]


async def test_a_change_of_address_is_told(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ADDRESS_POLL_S", 0.01)
    first = await mesh.creator()
    before = first.network.address
    # As if it had been bound to every interface: then all its addresses count.
    first.network.config = replace(first.network.config, bind_ip=None)

    await first.network._endpoint.add_external_addr("192.0.2.9:1234")

    # The system may tell of other changes first.
    await first.handler.until(lambda: "192.0.2.9:1234" in first.network.address.direct, "the address")
    assert first.handler.of("address")
    assert before.direct == first.network.address.direct[1:2]
    assert first.network.address.direct[0] == "192.0.2.9:1234"
    assert "192.0.2.9:1234" in [*first.token().address.direct]


# -- streams -------------------------------------------------------------------------------------


async def test_streams_both_ways(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    for here, there in ((first, second), (second, first)):
        stream = await here.peer(there).open("echo", {"a": [1, 2]})
        await stream.write(b"some ")
        await stream.write(b"bytes")
        await stream.finish()
        assert await read_all(stream) == b"some bytes"
        assert await there.handler.wait("stream") == [(here.id, ("echo", {"a": [1, 2]}))]


async def test_many_streams_at_once(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    async def one(number: int) -> bytes:
        stream = await second.peer(first).open("echo", {"number": number})
        await stream.write(b"%d" % number * 1000)
        await stream.finish()
        return await read_all(stream)

    answers = await asyncio.gather(*(one(number) for number in range(150)))

    assert answers == [b"%d" % number * 1000 for number in range(150)]


async def test_a_reader_that_stalls_stalls_its_writer(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    stream = await second.peer(first).open("sink", {})
    chunk, total, written = bytes(1 << 16), 64 << 20, 0

    async def write() -> None:
        nonlocal written
        while written < total:
            await stream.write(chunk)
            written += len(chunk)
        await stream.finish()

    writing = asyncio.create_task(write())
    # It has stalled when a message that was sent after a while of writing gets ahead of the bytes.
    seen = -1
    while seen != written or not written:
        seen = written
        second.peer(first).send({"written": written})
        await first.handler.wait("message", len(first.handler.of("message")) + 1)
        await asyncio.sleep(0.2)
    assert 0 < written < 16 << 20
    assert not writing.done()

    first.handler.sink_may_read.set()
    await writing

    assert await read_all(stream) == str(total).encode()


async def test_documents(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    stream = await second.peer(first).open("document", {})
    await stream.write_document({"a": "ß"})
    assert await stream.read_document() == {"got": {"a": "ß"}}

    stream = await second.peer(first).open("document", {})
    await stream.write_document({"a": "x" * 1000})
    assert await broken(stream) == "the other node refused the stream"

    stream = await second.peer(first).open("document", {})
    await stream.write(b"\0\0\0\x02[]")
    assert await broken(stream) == "the other node refused the stream"

    stream = await second.peer(first).open("document", {})
    await stream.finish()
    assert await broken(stream) == "the other node cancelled the stream"


@pytest.mark.parametrize("kind", ["unheard of", "", "x" * 1000])
async def test_kinds_that_nobody_serves(mesh: Mesh, kind: str) -> None:
    first, second = await mesh.pair()

    stream = await second.peer(first).open(kind, {})

    assert await broken(stream) == "the other node refused the stream"
    assert first.peer(second).refused_streams == 1
    assert first.handler.of("stream") == []


async def test_a_client_may_open_less(mesh: Mesh) -> None:
    first, client = await mesh.pair(role=Role.CLIENT)

    assert await broken(await client.peer(first).open("sink", {})) == "the other node refused the stream"
    stream = await client.peer(first).open("echo", {})
    await stream.write(b"x")
    assert await stream.read_exactly(1) == b"x"


async def test_a_stream_that_begins_wrongly(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    connection = second.peer(first)._connection

    for start in (b"\xff\xff\xff\xff", b"\0\0\0\x02{]", b'\0\0\0\x0f{"kind":"echo"}'):
        pair = await connection.open_bi()
        await pair.send().write_all(start)
        with pytest.raises(iroh().IrohError) as caught:
            await asyncio.wait_for(pair.recv().read(10), WITHIN_S)
        assert caught.value.message() == "Reset(1)"
    assert list(second.network.peers) == [first.id]
    assert first.handler.of("stream") == []


async def test_a_mistake_in_a_handler_costs_one_stream(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    first, second = await mesh.pair()

    stream = await second.peer(first).open("fail", {})

    assert await broken(stream) == "the other node failed at the stream"
    assert list(first.network.peers) == [second.id]
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"failed to serve a stream kind=fail peer={second.id}"
    ]
    caplog.clear()


async def test_resetting_ends_what_waits(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    stream = await second.peer(first).open("echo", {})
    await stream.write(b"x")
    assert await stream.read(1) == b"x"
    reading = asyncio.create_task(broken(stream))
    await asyncio.sleep(0)

    stream.reset()
    stream.reset()

    assert await reading == "the stream was reset"
    assert await broken(stream) == "the stream was reset"
    await stream.finish()


async def test_a_reset_reaches_a_writer_on_the_other_side(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    stream = await second.peer(first).open("sink", {})
    await first.handler.wait("stream")

    async def write_for_ever() -> None:
        while True:
            await stream.write(bytes(1 << 16))

    writing = asyncio.create_task(write_for_ever())
    await asyncio.sleep(0)
    first.peer(second).close("gone")

    with pytest.raises(PeerLost):
        await asyncio.wait_for(writing, WITHIN_S)


async def test_the_path(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    path = second.peer(first).path()

    assert path.kind is LinkKind.QUIC
    # Which of the two, IPv4 or IPv6, is iroh's choice.
    assert path.remote in first.network._endpoint.bound_sockets()
    assert 0 <= path.rtt_s < 10


async def test_bytes_are_counted_whether_or_not_iroh_knows_of_a_path(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await mesh.pair()
    peer = second.peer(first)
    monkeypatch.setattr(type(peer._connection), "paths", lambda self: [])

    before = peer.crossed()
    assert before.sent_bytes > 1000 < before.received_bytes
    peer.send({"x": "y" * 100_000})
    await first.handler.wait("message")

    assert peer.crossed().sent_bytes > before.sent_bytes + 100_000
    peer.close("gone")
    assert peer.crossed().sent_bytes > before.sent_bytes + 100_000


# -- control frames ------------------------------------------------------------------------------


async def test_a_message_that_is_too_large(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, and ends nobody: what others have said may be part of it."""
    first, second = await mesh.pair()

    first.peer(second).send({"x": "y" * (256 << 10)})
    first.peer(second).send({"x": "y" * (255 << 10)})

    [(_, body)] = await second.handler.wait("message")
    assert len(body["x"]) == 255 << 10
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"message not sent peer={second.id[:8]}: a frame of {(256 << 10) + 8} bytes; the limit is {256 << 10}"
    ]
    caplog.clear()


async def test_a_peer_that_does_not_keep_up_is_closed(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    peer = first.peer(second)

    for _ in range(20):
        peer.send({"x": "y" * (250 << 10)})

    reason = "too many messages wait to be sent"
    assert await first.handler.wait("lost") == [(second.id, reason)]
    assert await second.handler.wait("lost") == [(first.id, reason)]
    assert peer.closing is not None
    assert peer.closing.code is Code.OVERFLOW


async def test_unknown_frames_are_counted_and_ignored(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    await second.peer(first)._control.write_encoded(HEAD.pack(2, 1, 200) + b"{}" + HEAD.pack(2, 1, 1) + b"{}")
    second.peer(first).send({"after": "it"})

    assert await first.handler.wait("message") == [(second.id, {"after": "it"})]
    assert first.peer(second).unknown_frames == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xff\x01\x10", "a frame of 4294967295 bytes; the limit is 262144"),
        (HEAD.pack(2, 7, 16) + b"{}", "a frame of version 7; this is version 1"),
        (HEAD.pack(2, 1, 16) + b"[]", "a body that is not a JSON object"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of version 47; this is version 1"),
    ],
)
async def test_malformed_frames_end_the_connection(mesh: Mesh, data: bytes, reason: str) -> None:
    first, second = await mesh.pair()

    await second.peer(first)._control.write_encoded(data)

    said = f"not of this protocol: {reason}"
    assert await first.handler.wait("lost") == [(second.id, said)]
    assert await second.handler.wait("lost") == [(first.id, said)]


async def test_one_way_streams_end_the_connection(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    stream = await second.peer(first)._connection.open_uni()
    await stream.write_all(b"x")

    assert await first.handler.wait("lost") == [(second.id, "what was sent is not of this protocol")]


async def test_a_full_house_of_three(mesh: Mesh) -> None:
    """Everybody connects to everybody at the same time."""
    first, second = await mesh.pair()
    third = await mesh.member()
    await third.network.join(second.token())
    everybody: tuple[Member, ...] = (first, second, third)

    await asyncio.gather(
        *(one.connect(other) for one in everybody for other in everybody if one is not other)
    )

    for one in everybody:
        await one.handler.wait("peer", 2)
        others: set[NodeId] = {other.id for other in everybody} - {one.id}
        assert set(one.network.peers) == others
        assert one.handler.of("lost") == []
