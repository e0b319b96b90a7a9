"""Whom an owner means, and which invite: members choose their names themselves, and ids of invites, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.errors import MeshError
from mesh_llm.membership.member import Member, Standing
from mesh_llm.node.invites import Invites
from mesh_llm.node.joining import Joining
from mesh_llm.peers.mesh import Mesh
from mesh_llm.transport.credential import Credential
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import NodeFacts, NodeId, Role
from tests.support.claims import Person, creator

CREATOR = creator(1)
ANNE, BERT, CARL = (CREATOR.invites(number) for number in (2, 3, 4))
CLIENT = CREATOR.invites(5, Role.CLIENT)


class Here:
    """The creator's node, and whom it sees."""

    def __init__(self) -> None:
        self.me = CREATOR.id
        self.membership: Membership = CREATOR.membership()
        self.people: list[tuple[Person, str]] = []
        self.promoted: list[NodeId] = []
        self.expelled: set[NodeId] = set()
        joining = SimpleNamespace(
            membership=self.membership, is_owner=True, settings=None, write=lambda: None
        )
        self.invites = Invites(cast(Joining, joining), cast(Mesh, self), CREATOR.identity)

    def sees(self, person: Person, name: str) -> None:
        self.people.append((person, name))

    @property
    def members(self) -> list[Member]:
        return [_member(person, name) for person, name in self.people]

    def alive(self) -> list[Member]:
        return self.members

    def name_of(self, node: NodeId) -> str:
        return next(name for person, name in self.people if person.id == node)

    def credentials_of(self, *nodes: NodeId) -> list[Credential]:
        return [person.credential for person, _ in self.people if not nodes or person.id in nodes]

    def peer(self, node: NodeId) -> Any:
        return SimpleNamespace(send=lambda _: self.promoted.append(node))

    def claim(self) -> None:
        strikes = self.membership.revocations.strikes
        self.expelled |= {person.id for person, _ in self.people if strikes(person.credential)}


def _member(person: Person, name: str) -> Member:
    return Member(
        id=person.id,
        standing=Standing.ALIVE,
        incarnation=1,
        facts=NodeFacts(name=name, role=person.credential[-1].role, version="1"),
        rtt_s=None,
        connected=True,
        via=(),
        since=0.0,
    )


@pytest.fixture
def here() -> Here:
    return Here()


def test_an_id_means_one_member_whatever_others_call_themselves(here: Here) -> None:
    here.sees(ANNE, name=BERT.id)
    here.sees(BERT, name=ANNE.id)
    here.sees(CLIENT, name=CARL.id)
    here.sees(CARL, name="carl")

    assert here.invites.revoke(ANNE.id) == {"id": ANNE.invite, "expelled": [BERT.id]}
    assert here.expelled == {ANNE.id}
    assert here.invites.promote(CARL.id)["name"] == "carl"
    assert here.promoted == [CARL.id]
    here.invites.revoke(CARL.id)
    assert here.expelled == {ANNE.id, CARL.id}


def test_a_client_does_not_stand_in_the_way_of_a_node_of_its_name(here: Here) -> None:
    here.sees(CLIENT, name="carl")
    here.sees(CARL, name="carl")

    here.invites.promote("carl")
    assert here.promoted == [CARL.id]
    # Which of the two is to go nobody can guess.
    with pytest.raises(MeshError, match=r"^2 members are called carl$"):
        here.invites.revoke("carl")


def test_of_two_invites_with_one_id_the_maker_tells_which(here: Here) -> None:
    honest = ANNE.invites(6)
    puppet = BERT.invites(7, invite=honest.invite)
    for person, name in ((ANNE, "anne"), (BERT, "bert"), (honest, "dora"), (puppet, "puppet")):
        here.sees(person, name)
    # CARL has left, and somebody has taken its id for a name.
    gone = CARL.invites(8, invite=honest.invite)
    here.sees(CREATOR.invites(9), name=CARL.id)
    here.sees(gone, name="guest")

    with pytest.raises(MeshError, match=f"^3 nodes have made an invite {honest.invite}$") as caught:
        here.invites.revoke(honest.invite)
    assert caught.value.hint is not None
    assert "MAKER:ID" in caught.value.hint
    assert here.invites.revoke(f"bert:{puppet.invite}")["expelled"] == ["puppet"]
    assert here.invites.revoke(f"{ANNE.id}:{honest.invite}")["expelled"] == ["dora"]
    assert here.invites.revoke(f"{CARL.id}:{honest.invite}")["expelled"] == ["guest"]


def test_an_invite_of_this_nodes_own_hides_none_with_the_same_id(here: Here) -> None:
    own = here.membership.admissions.issue(role=Role.NODE, now=0.0, lifetime_s=None)
    mine, puppet = CREATOR.invites(6, invite=own.id), BERT.invites(7, invite=own.id)
    for person, name in ((BERT, "bert"), (mine, "mine"), (puppet, "puppet")):
        here.sees(person, name)

    unused = here.membership.admissions.issue(role=Role.NODE, now=0.0, lifetime_s=None)
    assert here.invites.revoke(f"{CREATOR.id}:{unused.id}")["id"] == unused.id
    assert here.invites.revoke(f"{BERT.id}:{own.id}")["expelled"] == ["puppet"]
    assert here.invites.revoke(own.id)["expelled"] == ["mine"]


def test_what_nobody_is_called_and_no_invite_is(here: Here) -> None:
    here.sees(ANNE, name="anne")

    for what in ("carl", f"anne:{'00' * 8}", f"carl:{ANNE.invite}", ":", "anne:", f":{BERT.invite}"):
        with pytest.raises(MeshError, match=r"^this node may not revoke"):
            here.invites.revoke(what)
    with pytest.raises(MeshError, match=r"^no members are called 'carl'$"):
        here.invites.promote("carl")
