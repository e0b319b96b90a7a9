"""Forwarded streams: who opened one is proven to the receiver, whoever is in the middle."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from mesh_llm.errors import Forged, MalformedMessage, PeerLost
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.messages import signed_from_fields, signed_to_document
from mesh_llm.peers.forwarding import Forwarded, challenge, prove
from mesh_llm.transport.claims import Claim
from mesh_llm.transport.credential import to_text
from mesh_llm.transport.network import Stream
from mesh_llm.types import NodeId, Role, Signed
from tests.support.claims import Person, creator

CREATOR = creator(1)
OPENER = CREATOR.invites(2)
RECEIVER = CREATOR.invites(3)
MIDDLE = CREATOR.invites(4)
CLIENT = CREATOR.invites(5, Role.CLIENT)
ASKED: dict[str, Any] = {"kind": "http", "header": {"path": "/v1/models"}}
WITHIN_S = 10.0


class Documents:
    """One end of a stream that carries documents."""

    def __init__(
        self, incoming: asyncio.Queue[dict[str, Any]], outgoing: asyncio.Queue[dict[str, Any]]
    ) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    async def read_document(self) -> dict[str, Any]:
        return await self._incoming.get()

    async def write_document(self, document: dict[str, Any]) -> None:
        # As it travels.
        self._outgoing.put_nowait(json.loads(json.dumps(document)))


def two_ends() -> tuple[Stream, Stream]:
    there: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    back: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    return cast(Stream, Documents(back, there)), cast(Stream, Documents(there, back))


async def asked_by(
    person: Person, *, to: NodeId = RECEIVER.id, revoked: tuple[Signed, ...] = ()
) -> Forwarded:
    near, far = two_ends()
    membership = RECEIVER.membership()
    membership.take_revocations(revoked)
    async with asyncio.timeout(WITHIN_S):
        proving = prove(near, person.membership(), person.identity, to=to, **ASKED)
        _, asked = await asyncio.gather(proving, challenge(far, membership, RECEIVER.id))
    return asked


async def answered_with(document: dict[str, Any]) -> Forwarded:
    """To whatever challenge."""
    near, far = two_ends()
    await near.write_document(document)
    async with asyncio.timeout(WITHIN_S):
        return await challenge(far, RECEIVER.membership(), RECEIVER.id)


@pytest.mark.parametrize(
    ("person", "role"), [(OPENER, Role.NODE), (CLIENT, Role.CLIENT), (CREATOR, Role.OWNER)]
)
async def test_who_opened_it_and_for_what(person: Person, role: Role) -> None:
    asked = await asked_by(person)

    assert (asked.opener.node, asked.opener.role) == (person.id, role)
    assert asked.opener.credential == person.credential
    assert (asked.kind, asked.header) == (ASKED["kind"], ASKED["header"])


async def test_one_that_was_opened_to_somebody_else() -> None:
    """The one in the middle passes on what was meant for another node."""
    with pytest.raises(Forged, match="opened to another node, or was used before"):
        await asked_by(OPENER, to=MIDDLE.id)


async def test_one_who_was_expelled() -> None:
    with pytest.raises(Forged, match="a node that was expelled"):
        await asked_by(OPENER, revoked=(CREATOR.revokes(OPENER.invite),))


async def test_nobody_of_this_mesh() -> None:
    with pytest.raises(Forged):
        await asked_by(creator(9).invites(2))


async def overheard() -> Signed:
    """An answer to a challenge, as the one in the middle sees it."""
    near, far = two_ends()
    await far.write_document({"nonce": "00" * 16})
    await prove(near, OPENER.membership(), OPENER.identity, to=RECEIVER.id, **ASKED)
    return signed_from_fields(Fields(await far.read_document(), "overheard"))


async def test_an_answer_is_good_once() -> None:
    with pytest.raises(Forged, match="opened to another node, or was used before"):
        await answered_with(signed_to_document(await overheard()))


async def test_an_answer_that_was_altered() -> None:
    signed = await overheard()

    for altered in (
        replace(signed, text=signed.text.replace("models", "secrets")),
        replace(signed, credential=to_text(MIDDLE.credential)),
        MIDDLE.says(Claim.RECORD, signed.text),
    ):
        with pytest.raises(Forged):
            await answered_with(signed_to_document(altered))


@pytest.mark.parametrize("document", [{}, {"text": 5}, {"text": "", "signature": "", "credential": 1}])
async def test_no_answer_at_all(document: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        await answered_with(document)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 50_000, '{"to":5}'])
async def test_an_answer_that_makes_no_sense(text: str) -> None:
    with pytest.raises(MalformedMessage):
        await answered_with(signed_to_document(OPENER.says(Claim.STREAM, text)))


@pytest.mark.parametrize("nonce", [None, 5, "00" * 1000])
async def test_a_receiver_that_sends_no_challenge(nonce: object) -> None:
    """What is signed is short: nobody gets this node to sign a text of its own."""
    near, far = two_ends()
    await far.write_document({"nonce": nonce})

    with pytest.raises(PeerLost, match="sent no challenge"):
        await prove(near, OPENER.membership(), OPENER.identity, to=RECEIVER.id, **ASKED)
