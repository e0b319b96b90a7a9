"""Chains of grants, the record of a membership, invites given out, and the bounds on failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.errors import CredentialRefused, MeshError
from mesh_llm.transport.admissions import Admissions, Verdict, proof
from mesh_llm.transport.attempts import FailedAttempts
from mesh_llm.transport.credential import Credential, check, extend, from_document, to_document
from mesh_llm.transport.identity import Identity, verify
from mesh_llm.transport.membership import Membership
from mesh_llm.types import MeshId, NodeId, Role

CREATOR, ANNE, BERT, CLIENT = (Identity.from_secret(bytes([number]) * 32) for number in range(4))
MESH = MeshId(CREATOR.id)
FIRST, SECOND = "11" * 8, "22" * 8
ANNES = extend((), CREATOR, ANNE.id, Role.NODE, FIRST)
BERTS = extend(ANNES, ANNE, BERT.id, Role.NODE, SECOND)
CLIENTS = extend(ANNES, ANNE, CLIENT.id, Role.CLIENT, SECOND)


def refusal(
    credential: Credential, node: NodeId, *, mesh: MeshId = MESH, revoked: tuple[str, ...] = ()
) -> str:
    with pytest.raises(CredentialRefused) as caught:
        check(credential, mesh, node, revoked)
    return caught.value.message


def test_signatures() -> None:
    signature = ANNE.sign(b"message")

    assert len(signature) == 64
    assert verify(ANNE.id, b"message", signature)
    assert not verify(ANNE.id, b"Message", signature)
    assert not verify(BERT.id, b"message", signature)
    assert not verify(ANNE.id, b"message", signature[:-1])
    assert not verify(NodeId("zz" * 32), b"message", signature)
    # Not every 32 bytes are a point on the curve.
    assert not verify(NodeId("02" + "00" * 31), b"message", signature)


def test_members() -> None:
    assert check((), MESH, CREATOR.id, ()) is Role.NODE
    assert check(ANNES, MESH, ANNE.id, ()) is Role.NODE
    assert check(BERTS, MESH, BERT.id, ("33" * 8,)) is Role.NODE
    assert check(CLIENTS, MESH, CLIENT.id, ()) is Role.CLIENT


OTHERS = "the credential belongs to another node or another mesh"
NOT_FROM_HERE = "the credential does not go back to this mesh's creator"
WRONG = "the credential's signature is wrong"


def test_somebody_elses() -> None:
    assert refusal((), ANNE.id) == OTHERS
    assert refusal(ANNES, BERT.id) == OTHERS
    assert refusal(ANNES, ANNE.id, mesh=MeshId(BERT.id)) == NOT_FROM_HERE
    assert refusal(extend((), BERT, ANNE.id, Role.NODE, FIRST), ANNE.id) == NOT_FROM_HERE
    assert refusal(BERTS[1:], BERT.id) == NOT_FROM_HERE


@pytest.mark.parametrize(
    "change",
    [{"role": Role.CLIENT}, {"invite": SECOND}, {"signature": bytes(64)}],
    ids=lambda change: next(iter(change)),
)
def test_altered(change: dict[str, Any]) -> None:
    assert refusal((replace(ANNES[0], **change),), ANNE.id) == WRONG
    assert refusal((replace(ANNES[0], **change), BERTS[1]), BERT.id) == WRONG


def test_chains_cannot_be_put_together_from_pieces() -> None:
    again = extend((), CREATOR, ANNE.id, Role.NODE, "33" * 8)

    assert check(again, MESH, ANNE.id, (FIRST,)) is Role.NODE
    assert refusal((*again, BERTS[1]), BERT.id) == WRONG


def test_revoking_reaches_those_behind() -> None:
    message = f"the invite {FIRST} was revoked, and with it the membership of those who came in by it"

    assert refusal(ANNES, ANNE.id, revoked=(FIRST,)) == message
    assert refusal(BERTS, BERT.id, revoked=(FIRST,)) == message
    assert check(ANNES, MESH, ANNE.id, (SECOND,)) is Role.NODE


def test_clients_invite_nobody() -> None:
    with pytest.raises(CredentialRefused, match=r"^a client cannot invite others$"):
        extend(CLIENTS, CLIENT, BERT.id, Role.NODE, FIRST)
    as_if = extend(
        (replace(CLIENTS[0]), replace(CLIENTS[1], role=Role.NODE)), CLIENT, BERT.id, Role.NODE, FIRST
    )
    forged = (*CLIENTS, as_if[2])
    assert refusal(forged, BERT.id) == "the credential was issued by a client, which cannot invite"


def test_chains_end_somewhere() -> None:
    chain: Credential = ()
    holder = CREATOR
    for number in range(8):
        following = Identity.from_secret(bytes([100 + number]) * 32)
        chain, holder = extend(chain, holder, following.id, Role.NODE, FIRST), following

    assert check(chain, MESH, holder.id, ()) is Role.NODE
    with pytest.raises(CredentialRefused, match="8 invites away from the mesh's creator"):
        extend(chain, holder, BERT.id, Role.NODE, FIRST)
    assert "longer" in refusal((*chain, chain[-1]), holder.id)


def test_documents() -> None:
    document = json.loads(json.dumps(to_document(BERTS)))

    assert from_document(document) == BERTS
    assert from_document([]) == ()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda grants: {},
        lambda grants: None,
        lambda grants: grants * 9,
        lambda grants: [None],
        lambda grants: [{**grants[0], "more": 1}],
        lambda grants: [{key: value for key, value in grants[0].items() if key != "role"}],
        *(
            lambda grants, key=key, value=value: [{**grants[0], key: value}]
            for key, value in [
                *(("node", value) for value in (1, None, "", "AB" * 32, "ab" * 33, ["ab" * 32])),
                *(("issuer", value) for value in (1, "ab" * 31)),
                *(("role", value) for value in ("king", None, ["node"], True)),
                *(("invite", value) for value in ("", "xx" * 8, 5)),
                *(("signature", value) for value in ("ab" * 63, None, "AB" * 64)),
            ]
        ),
    ],
)
def test_malformed_documents(spoil: Callable[[Any], Any]) -> None:
    with pytest.raises(CredentialRefused):
        from_document(spoil(to_document(ANNES)))


# -- memberships ---------------------------------------------------------------------------------


def test_a_membership_survives_its_document() -> None:
    before = Membership(mesh=MESH, credential=BERTS, revoked={FIRST})
    before.admissions.issue(role=Role.CLIENT, now=1000.5, lifetime_s=None)
    before.admissions.issue(role=Role.NODE, now=2000.0, lifetime_s=60)

    after = Membership.from_document(json.loads(json.dumps(before.to_document())))

    assert (after.mesh, after.credential, after.revoked) == (MESH, BERTS, {FIRST})
    assert after.admissions.invites() == before.admissions.invites()


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": "x"},
        {"mesh": 5},
        {"revoked": ["x"]},
        {"revoked": {}},
        {"credential": None},
        {"invites": {}},
        {"invites": [{}]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_membership(change: dict[str, Any]) -> None:
    with pytest.raises(MeshError, match=r"^the record of this node's mesh is damaged: "):
        Membership.from_document({**Membership.create(CREATOR).to_document(), **change})


def test_who_has_joined_nothing_is_nobody() -> None:
    with pytest.raises(CredentialRefused, match=r"^this node has joined no mesh$"):
        Membership().role(ANNE.id)


def test_another_mesh_starts_afresh() -> None:
    membership = Membership.create(ANNE)
    membership.admissions.issue(role=Role.NODE, now=0, lifetime_s=None)
    membership.add_revoked([FIRST])

    membership.adopt(MESH, ANNES)

    assert membership.role(ANNE.id) is Role.NODE
    assert (membership.revoked, membership.admissions.invites()) == (set(), ())


def test_revoked_invites_are_checked_and_bounded() -> None:
    membership = Membership.create(CREATOR)

    assert membership.add_revoked([FIRST, "nonsense", FIRST, "../../x"]) == {FIRST}
    assert membership.add_revoked([FIRST]) == set()
    membership.add_revoked(f"{number:016x}" for number in range(20_000))
    assert len(membership.revoked) == 10_000


# -- invites given out ---------------------------------------------------------------------------


def verdict(
    admissions: Admissions, *, id: str, secret: bytes, now: float = 0, label: bytes = b"joiner"
) -> Verdict:
    return admissions.verify(
        id=id, label=b"joiner", transcript=b"both ids", given=proof(secret, label, b"both ids"), now=now
    )


def test_proofs() -> None:
    admissions = Admissions()
    invite = admissions.issue(role=Role.NODE, now=0, lifetime_s=60)
    other = admissions.issue(role=Role.NODE, now=0, lifetime_s=None)

    assert verdict(admissions, id=invite.id, secret=invite.secret) is Verdict.RIGHT
    assert verdict(admissions, id=invite.id, secret=other.secret) is Verdict.WRONG
    assert verdict(admissions, id="00" * 8, secret=invite.secret) is Verdict.WRONG
    assert verdict(admissions, id=invite.id, secret=invite.secret, label=b"inviter") is Verdict.WRONG
    assert verdict(admissions, id=invite.id, secret=invite.secret, now=60) is Verdict.EXPIRED
    assert verdict(admissions, id=invite.id, secret=other.secret, now=60) is Verdict.WRONG
    assert verdict(admissions, id=other.id, secret=other.secret, now=1e12) is Verdict.RIGHT


def test_revoking() -> None:
    admissions = Admissions()
    invite = admissions.issue(role=Role.NODE, now=0, lifetime_s=60)

    assert admissions.revoke(invite.id).state(0) == "revoked"
    assert verdict(admissions, id=invite.id, secret=invite.secret) is Verdict.REVOKED
    assert verdict(admissions, id=invite.id, secret=bytes(16)) is Verdict.WRONG
    with pytest.raises(MeshError, match=r"^this node made no invite 'x'$"):
        admissions.revoke("x")


def test_invites_are_bounded() -> None:
    admissions = Admissions()
    for number in range(1000):
        admissions.issue(role=Role.NODE, now=number, lifetime_s=None)
    with pytest.raises(MeshError, match=r"^this node has 1000 open invites$"):
        admissions.issue(role=Role.NODE, now=1000, lifetime_s=None)
    oldest, *_, newest = admissions.invites()
    admissions.revoke(newest.id)

    admissions.issue(role=Role.NODE, now=1000, lifetime_s=None)

    assert admissions.get(newest.id) is None
    assert admissions.get(oldest.id) is not None
    assert len(admissions.invites()) == 1000


@pytest.mark.parametrize("lifetime_s", [0, -5, 1e12])
def test_absurd_lifetimes(lifetime_s: float) -> None:
    with pytest.raises(MeshError, match=r"^an invite's lifetime must be a second or more"):
        Admissions().issue(role=Role.NODE, now=1000.5, lifetime_s=lifetime_s)


# -- failed attempts -----------------------------------------------------------------------------


def test_one_node_may_fail_a_few_times() -> None:
    attempts = FailedAttempts(now=0)
    for _ in range(5):
        assert attempts.allow_node(ANNE.id, 0)
        attempts.failed(source="here", node=ANNE.id, now=0)

    assert not attempts.allow_node(ANNE.id, 0)
    assert not attempts.allow_node(ANNE.id, 9.9)
    assert attempts.allow_node(ANNE.id, 10)
    assert attempts.allow_node(BERT.id, 0)


@pytest.mark.parametrize("together", [1, 20])
def test_all_together_may_fail_at_a_rate(together: int) -> None:
    """A token lets in whoever comes before the first of them has failed; each of them pays."""
    attempts = FailedAttempts(now=0)
    borne = 0
    for step in range(1000):
        now = step / 100
        if attempts.is_calm(now):
            for number in range(together):
                borne += 1
                attempts.failed(source="192.0.2.1", node=NodeId(f"{step:032x}{number:032x}"), now=now)

    # A hundred at first, fifty a second after.
    assert abs(borne - 598) <= 3 + together
    assert attempts.is_calm(20)


def test_those_from_elsewhere_get_through_a_flood() -> None:
    attempts = FailedAttempts(now=0)
    for number in range(5000):
        attempts.failed(source="192.0.2.1", node=NodeId(f"{number:064x}"), now=0)

    assert not attempts.is_calm(0)
    assert not attempts.allow_source("192.0.2.1", 0)
    assert attempts.allow_source("192.0.2.2", 0)
    assert attempts.allow_source("192.0.2.1", 1)
    assert len(attempts._nodes) == 1024


def test_a_clock_that_goes_back_harms_nobody() -> None:
    attempts = FailedAttempts(now=1000)
    for _ in range(5):
        attempts.failed(source="here", node=ANNE.id, now=1000)

    assert not attempts.allow_node(ANNE.id, 0)
    assert attempts.allow_node(ANNE.id, 10)
