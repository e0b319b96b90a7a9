"""Expelled nodes: convinced by the revocation alone, whatever a peer says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.defaults import PROTOCOL_VERSION
from mesh_llm.errors import Expelled, JoinRefused, PeerLost
from mesh_llm.membership.messages import signed_to_document
from mesh_llm.transport.claims import Claim
from mesh_llm.transport.close_codes import Code, close
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.framing import FrameType
from mesh_llm.transport.revocations import revocation_text
from mesh_llm.types import Role, Signed
from tests.support.members import WITHIN_S, Member, Mesh, Stranger, mesh_of_members


@pytest.fixture
async def mesh(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Mesh]:
    async with mesh_of_members() as mesh:
        yield mesh
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def answer(liar: Stranger, frames: list[tuple[FrameType, dict[str, Any]]], code: Code) -> None:
    """Hear a dialler's proof, say what a test wants said, and close."""
    connection = await (await (await liar.endpoint.accept_next()).accept()).connect()
    control = ControlStream(await connection.accept_bi())
    await control.expect(FrameType.HELLO)
    await control.write(FrameType.HELLO, {"version": PROTOCOL_VERSION, "nonce": "00" * 16})
    await control.expect(FrameType.PROVE)
    for type, body in frames:
        await control.write(type, body)
    if not frames:
        close(connection, code)
    await connection.closed()


async def told(dialler: Member, liar: Stranger, *frames: tuple[FrameType, dict[str, Any]], code: Code) -> str:
    """What a member makes of it: that this peer is lost, and no more."""
    answering = asyncio.create_task(answer(liar, list(frames), code))
    with pytest.raises(PeerLost) as caught:
        await dialler.network.connect(liar.id, liar.address)
    async with asyncio.timeout(WITHIN_S):
        await answering
    assert dialler.network.mesh.role(dialler.id) is Role.NODE
    return caught.value.message


def shown(signed: Signed) -> tuple[FrameType, dict[str, Any]]:
    return FrameType.EXPELLED, signed_to_document(signed)


async def test_a_code_convinces_nobody(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    liar = await mesh.stranger()

    message = await told(second, liar, code=Code.REVOKED)

    assert message == f"node {liar.id[:10]} says that this node was expelled, but does not prove it"
    # The connection that it has goes on.
    assert list(second.network.peers) == [first.id]
    assert second.handler.of("lost") == []


async def test_a_closed_connection_convinces_nobody(mesh: Mesh) -> None:
    first, second = await mesh.pair()

    first.network._roster.drop(first.peer(second), Code.REVOKED)

    assert await second.handler.wait("lost") == [(first.id, "expelled: the invite was revoked")]
    assert second.network.mesh.role(second.id) is Role.NODE
    assert (await second.connect(first)).id == first.id


async def test_revocations_that_do_not_concern_it(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    other, liar = await mesh.creator(), await mesh.stranger()
    mine = second.network.mesh.credential[0].invite
    claims = {
        "another invite": first.network.mesh.seal(
            first.identity, Claim.REVOCATION, revocation_text("00" * 8)
        ),
        "another mesh": other.network.mesh.seal(other.identity, Claim.REVOCATION, revocation_text(mine)),
        "its own word": second.network.mesh.seal(second.identity, Claim.REVOCATION, revocation_text(mine)),
        "another claim": first.network.mesh.seal(first.identity, Claim.SETTINGS, revocation_text(mine)),
    }
    claims["altered"] = replace(claims["another invite"], text=revocation_text(mine))

    for name, signed in claims.items():
        message = await told(second, liar, shown(signed), code=Code.REVOKED)
        expected = f"node {liar.id[:10]} says that this node was expelled, which is not true"
        assert message == expected, name


@pytest.mark.parametrize("body", [{}, {"text": 5}, {"text": "", "signature": "", "credential": ["x"]}])
async def test_a_malformed_revocation(mesh: Mesh, body: dict[str, Any]) -> None:
    _, second = await mesh.pair()
    liar = await mesh.stranger()

    answering = asyncio.create_task(answer(liar, [(FrameType.EXPELLED, body)], Code.REVOKED))
    with pytest.raises(JoinRefused, match="violates the mesh's protocol"):
        await second.network.connect(liar.id, liar.address)
    async with asyncio.timeout(WITHIN_S):
        await answering

    assert second.network.mesh.role(second.id) is Role.NODE


async def test_the_revocation_itself_convinces(mesh: Mesh) -> None:
    """Whoever shows it: here one that is no member at all."""
    first, second = await mesh.pair()
    liar = await mesh.stranger()
    invite = second.network.mesh.credential[0].invite
    signed = first.network.mesh.seal(first.identity, Claim.REVOCATION, revocation_text(invite))

    answering = asyncio.create_task(answer(liar, [shown(signed)], Code.REVOKED))
    with pytest.raises(Expelled, match=r"^this node was expelled from its mesh: "):
        await second.network.connect(liar.id, liar.address)
    async with asyncio.timeout(WITHIN_S):
        await answering

    # And it knows from now on.
    with pytest.raises(Expelled):
        await second.network.connect(liar.id, liar.address)
    with pytest.raises(Expelled):
        second.invite()


async def test_a_member_that_comes_back_is_shown_why_it_is_out(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    third = await mesh.member()
    await third.network.join(second.token())
    for member in (second, third):
        await member.network.close()
    invite = first.network.mesh.admissions.invites()[0].id
    first.revoke(invite)

    for member in (second, third):
        again = await mesh.member(member.written(), member.identity)
        with pytest.raises(Expelled, match=r"^this node was expelled from its mesh: "):
            await again.connect(first)
    refused = await first.handler.wait("refused", 2)
    assert [reason for _, reason in refused] == ["its invite was revoked"] * 2


async def test_a_member_that_was_expelled_is_refused_by_those_who_know(mesh: Mesh) -> None:
    """Also where the expelled one is the acceptor, and has heard of nothing."""
    first, second = await mesh.pair()
    first.revoke(first.network.mesh.admissions.invites()[0].id)
    await second.handler.wait("lost")

    with pytest.raises(JoinRefused, match="was expelled from the mesh"):
        await first.connect(second)

    assert second.network.mesh.role(second.id) is Role.NODE


async def test_an_owner_expels_whom_it_has_not_invited(mesh: Mesh) -> None:
    first = await mesh.creator()
    owner, node = await mesh.member(), await mesh.member()
    await owner.network.join(first.token(role=Role.OWNER))
    await node.network.join(first.token())
    await node.connect(owner)
    await owner.handler.wait("peer", 2)

    owner.revoke(node.network.mesh.credential[0].invite, first.id)

    assert await owner.handler.wait("lost") == [(node.id, "expelled: the invite was revoked")]
    await node.handler.wait("lost")
    with pytest.raises(Expelled):
        await node.connect(owner)


async def test_a_node_has_no_say_over_others(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    third = await mesh.member()
    await third.network.join(first.token())
    await third.connect(second)
    await second.handler.wait("peer", 2)

    second.revoke(third.network.mesh.credential[0].invite, first.id)

    assert set(second.network.peers) == {first.id, third.id}
    assert (await third.connect(second)).id == second.id


async def test_one_comes_back_by_another_invite(mesh: Mesh) -> None:
    first, second = await mesh.pair()
    first.revoke(first.network.mesh.admissions.invites()[0].id)
    await second.handler.wait("lost")
    with pytest.raises(Expelled):
        await second.connect(first)

    await second.network.join(first.token())

    assert second.network.mesh.role(second.id) is Role.NODE
    assert await first.handler.wait("peer", 2) == [(second.id, Role.NODE)] * 2
