"""Chains of grants, the record of a membership, invites given out, and the bounds on failures."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.errors import CredentialRefused, Expelled, MeshError
from mesh_llm.transport.admissions import Admissions, Verdict, proof
from mesh_llm.transport.credential import Credential, Grant, check, extend, from_text, role_of, to_text
from mesh_llm.transport.failed_attempts import FailedAttempts
from mesh_llm.transport.identity import Identity, verify
from mesh_llm.transport.own_membership import Membership
from mesh_llm.transport.pending_connections import source_of
from mesh_llm.transport.revocations import Revocations
from mesh_llm.types import MeshId, NodeId, Role

CREATOR, ANNE, BERT, CLIENT, OLGA = (Identity.from_secret(bytes([number]) * 32) for number in range(5))
MESH = MeshId(CREATOR.id)
NOW = 1_800_000_000.0
FIRST, SECOND, THIRD = "11" * 8, "22" * 8, "33" * 8
ANNES = extend((), MESH, CREATOR, ANNE.id, Role.NODE, FIRST)
BERTS = extend(ANNES, MESH, ANNE, BERT.id, Role.NODE, SECOND)
CLIENTS = extend(ANNES, MESH, ANNE, CLIENT.id, Role.CLIENT, SECOND)
OLGAS = extend((), MESH, CREATOR, OLGA.id, Role.OWNER, THIRD)


def refusal(credential: Credential, node: NodeId, *, mesh: MeshId = MESH) -> str:
    with pytest.raises(CredentialRefused) as caught:
        check(credential, mesh, node)
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
    assert check((), MESH, CREATOR.id) is Role.OWNER
    assert check(ANNES, MESH, ANNE.id) is Role.NODE
    assert check(BERTS, MESH, BERT.id) is Role.NODE
    assert check(CLIENTS, MESH, CLIENT.id) is Role.CLIENT
    assert check(OLGAS, MESH, OLGA.id) is Role.OWNER


OTHERS = "the credential belongs to another node or another mesh"
WRONG = "the credential's signature is wrong, or it is of another mesh"


def test_somebody_elses() -> None:
    assert refusal((), ANNE.id) == OTHERS
    assert refusal(ANNES, BERT.id) == OTHERS
    assert refusal((), CREATOR.id, mesh=MeshId(BERT.id)) == OTHERS
    assert refusal(ANNES, ANNE.id, mesh=MeshId(BERT.id)) == WRONG
    assert refusal(extend((), MESH, BERT, ANNE.id, Role.NODE, FIRST), ANNE.id) == WRONG
    assert refusal(BERTS[1:], BERT.id) == WRONG


@pytest.mark.parametrize(
    "change",
    [{"role": Role.CLIENT}, {"role": Role.OWNER}, {"invite": SECOND}, {"signature": bytes(64)}],
    ids=str,
)
def test_altered(change: dict[str, Any]) -> None:
    assert refusal((replace(ANNES[0], **change),), ANNE.id) == WRONG
    assert refusal((replace(ANNES[0], **change), BERTS[1]), BERT.id) == WRONG


def test_chains_cannot_be_put_together_from_pieces() -> None:
    again = extend((), MESH, CREATOR, ANNE.id, Role.NODE, THIRD)

    assert check(again, MESH, ANNE.id) is Role.NODE
    assert refusal((*again, BERTS[1]), BERT.id) == WRONG


def granted_all_the_same(
    credential: Credential, identity: Identity, node: NodeId, role: Role, invite: str
) -> Credential:
    """Signed by one who may not, as if it were an owner."""
    as_if = (*credential[:-1], replace(credential[-1], role=Role.OWNER))
    return (*credential, extend(as_if, MESH, identity, node, role, invite)[-1])


def test_clients_invite_nobody() -> None:
    with pytest.raises(CredentialRefused, match=r"^a client cannot invite others$"):
        extend(CLIENTS, MESH, CLIENT, BERT.id, Role.NODE, FIRST)

    for role in Role:
        forged = granted_all_the_same(CLIENTS, CLIENT, BERT.id, role, FIRST)
        assert refusal(forged, BERT.id) == "the credential was issued by a client, which cannot do that"


def test_only_owners_make_owners() -> None:
    with pytest.raises(CredentialRefused, match=r"^only an owner of the mesh can make another owner$"):
        extend(ANNES, MESH, ANNE, BERT.id, Role.OWNER, SECOND)

    forged = granted_all_the_same(ANNES, ANNE, BERT.id, Role.OWNER, SECOND)
    assert refusal(forged, BERT.id) == "the credential was issued by a node, which cannot do that"
    # And so for everybody behind it.
    behind = extend(forged, MESH, BERT, CLIENT.id, Role.NODE, THIRD)
    assert refusal(behind, CLIENT.id) == "the credential was issued by a node, which cannot do that"


def test_owners_make_owners_and_nodes_below_them_do_not() -> None:
    below = extend(OLGAS, MESH, OLGA, ANNE.id, Role.OWNER, FIRST)
    node = extend(below, MESH, ANNE, BERT.id, Role.NODE, SECOND)

    assert check(below, MESH, ANNE.id) is Role.OWNER
    assert check(node, MESH, BERT.id) is Role.NODE
    with pytest.raises(CredentialRefused, match="only an owner"):
        extend(node, MESH, BERT, CLIENT.id, Role.OWNER, THIRD)
    assert [role_of(chain) for chain in ((), below, node)] == [Role.OWNER, Role.OWNER, Role.NODE]


def test_chains_end_somewhere() -> None:
    chain: Credential = ()
    holder = CREATOR
    for number in range(8):
        following = Identity.from_secret(bytes([100 + number]) * 32)
        chain, holder = extend(chain, MESH, holder, following.id, Role.NODE, FIRST), following

    assert check(chain, MESH, holder.id) is Role.NODE
    with pytest.raises(CredentialRefused, match="8 invites away from the mesh's creator"):
        extend(chain, MESH, holder, BERT.id, Role.NODE, FIRST)
    assert "longer" in refusal((*chain, chain[-1]), holder.id)


@pytest.mark.parametrize("credential", [(), ANNES, BERTS, CLIENTS, OLGAS])
def test_a_text_and_back(credential: Credential) -> None:
    assert from_text(to_text(credential)) == credential


def test_texts_are_short() -> None:
    """Each claim travels with one."""
    assert [len(to_text(chain)) for chain in ((), ANNES, BERTS)] == [0, 140, 280]


def grant_with(role: int) -> str:
    data = bytearray(base64.urlsafe_b64decode(to_text(ANNES)))
    data[32] = role
    return base64.urlsafe_b64encode(data).decode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is not a text"),
        ([], "is not a text"),
        (b"", "is not a text"),
        ("?", "is not base64"),
        ("ä" * 140, "is not base64"),
        (to_text(ANNES)[:-1] + "\n", "is not base64"),
        ("A", "is not base64"),
        (to_text(ANNES)[:-4], "is not a list of grants"),
        (to_text(ANNES) + "AAAA", "is not a list of grants"),
        (to_text(ANNES) * 9, "is not a list of grants"),
        (grant_with(3), "has a role that this version does not know"),
        (grant_with(255), "has a role that this version does not know"),
    ],
)
def test_malformed_texts(text: object, reason: str) -> None:
    with pytest.raises(CredentialRefused, match=rf"^the credential {reason}$"):
        from_text(text)


def test_there_is_one_text_for_a_credential() -> None:
    """What can be written in two ways would be two claims that say the same."""
    data = bytes.fromhex(ANNE.id) + b"\0" + bytes.fromhex(FIRST) + bytes(64)
    text = base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    assert to_text((Grant(node=ANNE.id, role=Role.NODE, invite=FIRST, signature=bytes(64)),)) == text

    for other in _spellings(to_text(BERTS)):
        with pytest.raises(CredentialRefused):
            from_text(other)


def _spellings(text: str) -> list[str]:
    """That some readers of base64 take for the same bytes."""
    standard = text.replace("-", "+").replace("_", "/")
    return [
        *([standard] if standard != text else []),
        text + "=",
        text + "====",
        text[:10] + "\n" + text[10:],
    ]


# -- memberships ---------------------------------------------------------------------------------


def test_a_membership_survives_its_document() -> None:
    before = Membership(mesh=MESH, credential=BERTS, revocations=Revocations(MESH))
    before.admissions.issue(role=Role.CLIENT, now=1000.5, lifetime_s=None)
    limited = before.admissions.issue(role=Role.NODE, now=2000.0, lifetime_s=60, limit=2)
    before.admissions.use(limited.id, ANNE.id)
    before.revoke(limited.id, BERT)

    after = Membership.from_document(json.loads(json.dumps(before.to_document())), now=NOW)

    assert (after.mesh, after.credential) == (MESH, BERTS)
    assert after.claims() == before.claims()
    assert [each.invite for each in after.revocations.add(before.revocations.signed)] == []
    assert after.admissions.invites() == before.admissions.invites()
    assert after.admissions.invites()[1].nodes == (ANNE.id,)


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": "x"},
        {"mesh": 5},
        {"mesh": None},
        {"revocations": ["x"]},
        {"revocations": None},
        {"revocations": [{"text": "{}", "signature": "", "credential": ""}]},
        {"settings": [{}]},
        {"settings": [{"text": "{}", "signature": "", "credential": ""}]},
        {"credential": None},
        {"credential": "A"},
        {"invites": {}},
        {"invites": [{}]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_membership(change: dict[str, Any]) -> None:
    with pytest.raises(MeshError, match=r"^the record of this node's mesh is damaged: "):
        Membership.from_document({**Membership.create(CREATOR).to_document(), **change}, now=NOW)


def test_who_has_joined_nothing_is_nobody() -> None:
    with pytest.raises(CredentialRefused, match=r"^this node has not joined a mesh$"):
        Membership().role(ANNE.id)


def test_who_was_expelled_is_told() -> None:
    creator = Membership.create(CREATOR)
    creator.revoke(FIRST, CREATOR)
    membership = Membership(mesh=MESH, credential=BERTS, revocations=Revocations(MESH))
    assert membership.role(BERT.id) is Role.NODE

    membership.take_revocations(creator.revocations.signed)

    with pytest.raises(Expelled, match=r"^this node was expelled from its mesh: "):
        membership.role(BERT.id)


def test_another_mesh_starts_afresh() -> None:
    membership = Membership.create(ANNE)
    membership.admissions.issue(role=Role.NODE, now=0, lifetime_s=None)
    membership.revoke(FIRST, ANNE)

    membership.adopt(MESH, ANNES)

    assert membership.role(ANNE.id) is Role.NODE
    assert (membership.claims(), membership.admissions.invites()) == (([], []), ())


def test_the_same_mesh_by_another_invite_keeps_what_is_known() -> None:
    membership = Membership(mesh=MESH, credential=ANNES, revocations=Revocations(MESH))
    issued = membership.admissions.issue(role=Role.NODE, now=0, lifetime_s=None)
    membership.revoke(issued.id, ANNE)

    membership.adopt(MESH, extend((), MESH, CREATOR, ANNE.id, Role.NODE, THIRD))

    assert len(membership.revocations) == 1
    assert membership.admissions.invites() == (replace(issued, revoked=True),)


# -- invites given out ---------------------------------------------------------------------------


def verdict(
    admissions: Admissions,
    *,
    id: str,
    secret: bytes,
    now: float = 0,
    label: bytes = b"joiner",
    node: NodeId = ANNE.id,
) -> Verdict:
    given = proof(secret, label, b"both ids")
    return admissions.verify(id=id, node=node, label=b"joiner", transcript=b"both ids", given=given, now=now)


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

    admissions.revoke(invite.id)
    admissions.revoke("of another node")

    assert [invite.state(0) for invite in admissions.invites()] == ["revoked"]
    assert verdict(admissions, id=invite.id, secret=invite.secret) is Verdict.REVOKED
    assert verdict(admissions, id=invite.id, secret=bytes(16)) is Verdict.WRONG


def test_a_limited_invite() -> None:
    admissions = Admissions()
    invite = admissions.issue(role=Role.NODE, now=0, lifetime_s=60, limit=2)

    def asked(node: Identity, *, secret: bytes = invite.secret, now: float = 0) -> Verdict:
        return verdict(admissions, id=invite.id, secret=secret, node=node.id, now=now)

    assert admissions.use(invite.id, ANNE.id)
    assert admissions.use(invite.id, ANNE.id)
    assert asked(BERT) is Verdict.RIGHT
    assert admissions.use(invite.id, BERT.id)

    assert [(each.uses, each.state(0)) for each in admissions.invites()] == [(2, "used")]
    assert asked(CLIENT) is Verdict.USED
    assert not admissions.use(invite.id, CLIENT.id)
    # Those who are in may come again, as long as it is good at all; its state is no stranger's business.
    assert asked(ANNE) is Verdict.RIGHT
    assert asked(ANNE, now=60) is Verdict.EXPIRED
    assert asked(CLIENT, secret=bytes(16)) is Verdict.WRONG
    assert not admissions.use("of another node", ANNE.id)


def test_who_came_in_is_remembered_within_bounds() -> None:
    admissions = Admissions()
    invite = admissions.issue(role=Role.CLIENT, now=0, lifetime_s=None)
    for number in range(100):
        assert admissions.use(invite.id, NodeId(f"{number:064x}"))

    [used] = admissions.invites()
    assert (used.uses, len(used.nodes), used.state(0)) == (100, 64, "open")


@pytest.mark.parametrize(
    "change",
    [{"limit": -1}, {"limit": "2"}, {"limit": True}, {"nodes": None}, {"nodes": ["x"]}, {"uses": -1}],
)
def test_damaged_invites(change: dict[str, Any]) -> None:
    admissions = Admissions()
    admissions.issue(role=Role.NODE, now=0, lifetime_s=None, limit=3)
    [entry] = admissions.to_document()

    assert Admissions.from_document([entry]).invites() == admissions.invites()
    with pytest.raises(ValueError, match="malformed"):
        Admissions.from_document([{**entry, **change}])


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


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("192.0.2.7:9", "192.0.2.7"),
        ("[2001:db8:1:2:3:4:5:6]:9", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::1]:7", "2001:db8:1:2::/64"),
    ],
)
async def test_those_of_one_customers_network_count_as_one(place: str, source: str) -> None:
    class Incoming:
        async def remote_addr(self) -> object:
            return SimpleNamespace(is_ip=lambda: True, addr=place)

    assert await source_of(Incoming()) == source


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
