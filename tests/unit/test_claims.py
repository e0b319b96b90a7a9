"""What members sign: who signed it, by which right, and everything that is somebody else's or altered."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh_llm.errors import Forged
from mesh_llm.transport.claims import Claim, sign, signer_of
from mesh_llm.transport.credential import to_text
from mesh_llm.types import MeshId, Role, Signed
from tests.support.claims import Person, creator

CREATOR = creator(1)
ANNE = CREATOR.invites(2)
BERT = ANNE.invites(3)
CLIENT = ANNE.invites(4, Role.CLIENT)
OLGA = CREATOR.invites(5, Role.OWNER)
MESH = CREATOR.mesh
TEXT = '{"what":"ever","and":"ü\\n"}'
NO_SIGNATURE = "a record with an invalid signature"


def forged(signed: Signed, *, mesh: MeshId = MESH, claim: Claim = Claim.RECORD) -> str:
    with pytest.raises(Forged) as caught:
        signer_of(signed, mesh, claim)
    return caught.value.message


@pytest.mark.parametrize(
    ("person", "role"),
    [
        (CREATOR, Role.OWNER),
        (OLGA, Role.OWNER),
        (ANNE, Role.NODE),
        (BERT, Role.NODE),
        (CLIENT, Role.CLIENT),
    ],
)
@pytest.mark.parametrize("claim", list(Claim))
def test_who_signed_it(person: Person, role: Role, claim: Claim) -> None:
    signer = signer_of(person.says(claim, TEXT), MESH, claim)

    assert (signer.node, signer.role, signer.credential) == (person.id, role, person.credential)


def test_a_claim_of_one_kind_is_none_of_another() -> None:
    for claim in Claim:
        for other in set(Claim) - {claim}:
            assert forged(ANNE.says(claim, TEXT), claim=other).endswith(" with an invalid signature")


def test_a_claim_in_one_mesh_is_none_in_another() -> None:
    """Also where the same node is a member of both, by the same invite's id."""
    other = creator(9)
    there = other.invites(2, invite=ANNE.invite)
    assert there.id == ANNE.id

    assert "not a member" in forged(ANNE.says(Claim.RECORD, TEXT), mesh=other.mesh)
    moved = replace(ANNE.says(Claim.RECORD, TEXT), credential=to_text(there.credential))
    assert forged(moved, mesh=other.mesh) == NO_SIGNATURE


def test_the_creator_of_another_mesh_is_nobody_here() -> None:
    other = creator(9)

    # Its credential is empty, as the creator's own: what it signs is taken for the creator's, and is not.
    assert forged(other.says(Claim.RECORD, TEXT)) == NO_SIGNATURE


@pytest.mark.parametrize(
    "text",
    ["", TEXT + " ", TEXT[:-1], TEXT.replace("ever", "else"), TEXT.replace("ü", "u\u0308"), "\udcff" + TEXT],
    ids=ascii,
)
def test_an_altered_text(text: str) -> None:
    assert forged(replace(ANNE.says(Claim.RECORD, TEXT), text=text)) == NO_SIGNATURE


def _flip(signature: str) -> str:
    data = bytearray(base64.urlsafe_b64decode(signature))
    data[0] ^= 1
    return base64.urlsafe_b64encode(data).decode()


@pytest.mark.parametrize(
    "alter",
    [
        _flip,
        lambda signature: "",
        lambda signature: "A" * 88,
        lambda signature: signature[:-4],
        lambda signature: signature + "AAAA",
        lambda signature: signature.rstrip("="),
        lambda signature: "not base64 at all!",
        lambda signature: "ä" * 88,
        lambda signature: "\udcff" * 88,
        lambda signature: BERT.says(Claim.RECORD, TEXT).signature,
    ],
)
def test_an_altered_signature(alter: Callable[[str], str]) -> None:
    signed = ANNE.says(Claim.RECORD, TEXT)

    assert forged(replace(signed, signature=alter(signed.signature))) == NO_SIGNATURE


@pytest.mark.parametrize(
    ("credential", "reason"),
    [
        ("", NO_SIGNATURE),
        (to_text(BERT.credential), NO_SIGNATURE),
        (to_text(OLGA.credential), NO_SIGNATURE),
        (to_text(BERT.credential[1:]), "not a member"),
        (to_text(ANNE.credential)[:-4], "not a member"),
        (to_text(ANNE.credential) + "=", "not a member"),
        ("!", "not a member"),
        (to_text(creator(9).invites(2).credential), "not a member"),
        (to_text((replace(ANNE.credential[0], role=Role.OWNER),)), "not a member"),
        (to_text((replace(ANNE.credential[0], invite="00" * 8),)), "not a member"),
    ],
)
def test_an_altered_credential(credential: str, reason: str) -> None:
    assert reason in forged(replace(ANNE.says(Claim.RECORD, TEXT), credential=credential))


def test_a_right_that_one_has_given_oneself() -> None:
    """A node signs itself into a chain as an owner: the signature is good, the right is not there."""
    as_owner = replace(ANNE.credential[0], role=Role.OWNER)
    made_up = Person(identity=ANNE.identity, mesh=MESH, credential=(as_owner,)).invites(3, Role.OWNER)
    chain = (ANNE.credential[0], made_up.credential[-1])
    assert (chain[-1].node, chain[-1].role) == (BERT.id, Role.OWNER)

    signed = sign(BERT.identity, MESH, chain, Claim.SETTINGS, TEXT)

    assert forged(signed, claim=Claim.SETTINGS) == (
        "settings of a node that is not a member: the credential was issued by a node, which cannot do that"
    )


def test_the_size_is_what_it_takes_in_a_document() -> None:
    signed = ANNE.says(Claim.RECORD, TEXT)

    # Quotes and backslashes are escaped: the text is JSON in JSON.
    assert signed.size_bytes == len(TEXT.encode()) + 9 + 88 + 140
