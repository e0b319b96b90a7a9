"""Tokens for so many, and the clients of one token: how many get in, and how many at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest

from mesh_llm.errors import JoinRefused, PeerLost
from mesh_llm.transport import connections, handshake
from mesh_llm.transport.connections import CLIENTS_PER_INVITE
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.credential import check
from mesh_llm.transport.invite import Invite
from mesh_llm.types import Role
from tests.support.members import Member, Mesh, mesh_of_members, ordered_identities

USED = "the token has been used up"


@pytest.fixture
async def mesh(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Mesh]:
    async with mesh_of_members() as mesh:
        yield mesh
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def uses(member: Member, token: Invite) -> int:
    invite = member.network.mesh.admissions.get(token.id)
    assert invite is not None
    return invite.uses


async def outcome(joiner: Member, token: Invite) -> str:
    try:
        await joiner.network.join(token)
    except JoinRefused as error:
        return error.message
    return "in"


# -- so many uses --------------------------------------------------------------------------------


async def test_so_many_get_in_and_no_more(mesh: Mesh) -> None:
    first = await mesh.creator()
    token = first.token(limit=2)
    joiners = [await mesh.member() for _ in range(3)]

    assert [await outcome(joiner, token) for joiner in joiners] == ["in", "in", USED]

    assert uses(first, token) == 2
    assert joiners[2].network.mesh.mesh is None
    told = (joiners[2].id, "its invite has been used up")
    assert await first.handler.wait("refused") == [told]


async def test_one_that_comes_again_is_counted_once(mesh: Mesh) -> None:
    first, joiner, late = await mesh.creator(), await mesh.member(), await mesh.member()
    token = first.token(limit=1)
    await joiner.network.join(token)
    await first.handler.wait("peer")
    await joiner.network.close()
    await first.handler.wait("lost")

    # As with a home that was lost, and the key kept.
    again = await mesh.member(identity=joiner.identity)
    assert await outcome(again, token) == "in"

    assert uses(first, token) == 1
    assert await outcome(late, token) == USED


@pytest.mark.parametrize("round", range(5))
async def test_of_two_at_once_one_gets_in(mesh: Mesh, round: int) -> None:
    first = await mesh.creator()
    joiners = [await mesh.member() for _ in range(4)]
    token = first.token(limit=1)

    outcomes = await asyncio.gather(*(outcome(joiner, token) for joiner in joiners))

    assert sorted(outcomes) == ["in", USED, USED, USED]
    assert uses(first, token) == 1
    members = [joiner for joiner in joiners if joiner.network.mesh.mesh is not None]
    assert [member.id for member in members] == [node for node, _ in await first.handler.wait("peer")]


async def test_a_use_is_counted_when_the_credential_is_given(mesh: Mesh) -> None:
    """One that takes it and says nothing more has had its use: it is a member wherever it shows it."""
    first, taker, late = await mesh.creator(), await mesh.member(), await mesh.member()
    token = first.token(limit=1)
    stranger = await mesh.stranger()
    connection = await stranger.dial(first)
    control = ControlStream(await connection.open_bi())
    me = handshake.Self(
        identity=replace(taker.identity, id=stranger.id),
        instance="00" * 8,
        membership=taker.network.mesh,
        gone=lambda node: [],
        welcome=lambda node, role: {},
    )
    _, joined = await handshake.prove_invite(control, me, token)
    connection.close(0, b"")

    assert check(joined.credential, token.mesh, stranger.id) is Role.NODE
    assert uses(first, token) == 1
    assert await outcome(late, token) == USED


# -- the clients of one token --------------------------------------------------------------------


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CLIENTS_PER_INVITE", 2)


async def client(mesh: Mesh, first: Member, token: Invite) -> Member:
    joiner = await mesh.member()
    await joiner.network.join(token)
    await first.handler.until(lambda: joiner.id in first.network.peers, "it is connected")
    return joiner


@pytest.mark.usefixtures("two_at_once")
@pytest.mark.parametrize("arbiter_dials", [True, False])
async def test_a_crowd_of_one_clients_token(mesh: Mesh, arbiter_dials: bool) -> None:
    small, large = ordered_identities()
    first = await mesh.creator(large if arbiter_dials else small)
    token = first.token(role=Role.CLIENT)
    [one, _] = [await client(mesh, first, token) for _ in range(2)]
    # It has come in before, and connects by its credential.
    third = await mesh.member(identity=small if arbiter_dials else large)
    await one.network.close()
    await first.handler.wait("lost")
    await third.network.join(token)
    await first.handler.until(lambda: third.id in first.network.peers, "there was room again")
    fourth = await mesh.member(one.written(), one.identity)

    with pytest.raises(PeerLost, match="too many clients with the same invite are connected"):
        await fourth.connect(first)
    fifth = await mesh.member()
    assert await outcome(fifth, token) == "too many clients with this token are connected"
    assert len(first.network.peers) == 2
    told = (fourth.id, "too many clients came by the same invite")
    assert told in await first.handler.wait("refused")


@pytest.mark.usefixtures("two_at_once")
async def test_others_get_in_beside_a_crowd(mesh: Mesh) -> None:
    first = await mesh.creator()
    token, other = first.token(role=Role.CLIENT), first.token(role=Role.CLIENT)
    for _ in range(2):
        await client(mesh, first, token)

    node, guest = await mesh.member(), await mesh.member()

    assert await outcome(node, first.token()) == "in"
    assert await outcome(guest, other) == "in"
    await first.handler.until(lambda: len(first.network.peers) == 4, "all are connected")


@pytest.mark.usefixtures("two_at_once")
async def test_one_of_a_crowd_may_start_anew(mesh: Mesh) -> None:
    """Its old connection makes room for the new one."""
    first = await mesh.creator()
    token = first.token(role=Role.CLIENT)
    [one, _] = [await client(mesh, first, token) for _ in range(2)]

    again = await mesh.member(one.written(), one.identity)

    assert (await again.connect(first)).id == first.id
    await first.handler.wait("peer", 3)
    assert len(first.network.peers) == 2


@pytest.mark.usefixtures("two_at_once")
async def test_nodes_are_no_crowd(mesh: Mesh) -> None:
    first = await mesh.creator()
    token = first.token()

    for _ in range(4):
        await client(mesh, first, token)

    assert len(first.network.peers) == 4


async def test_as_many_as_is_said(mesh: Mesh) -> None:
    """Sixteen, and then a node."""
    first = await mesh.creator()
    token = first.token(role=Role.CLIENT)
    for _ in range(CLIENTS_PER_INVITE):
        await client(mesh, first, token)
    late, node = await mesh.member(), await mesh.member()

    with suppress(JoinRefused):
        await late.network.join(token, timeout_s=1)
    assert await outcome(node, first.token()) == "in"

    told = (late.id, "too many clients came by the same invite")
    assert told in await first.handler.wait("refused")
    assert late.id not in first.network.peers
    await first.handler.until(lambda: node.id in first.network.peers, "the node is connected")
