"""Revoked invites: who may take back whose, what owners do to each other, and bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest

from mesh_llm.errors import Forged, MeshError
from mesh_llm.transport import revocations
from mesh_llm.transport.claims import Claim
from mesh_llm.transport.revocations import Revocations, read_revocation, revocation_text
from mesh_llm.types import Role, Signed
from tests.support.claims import Person, creator

CREATOR = creator(1)
ANNE = CREATOR.invites(2)
BERT = ANNE.invites(3)
CARL = BERT.invites(4)
DORA = CREATOR.invites(5)
"""ANNE's sibling."""
CLIENT = ANNE.invites(6, Role.CLIENT)
OLGA = CREATOR.invites(7, Role.OWNER)
OTTO = OLGA.invites(8, Role.OWNER)
MESH = CREATOR.mesh


def struck(person: Person, *signed: Signed) -> bool:
    known = Revocations(MESH)
    known.add(signed)
    return known.strikes(person.credential) is not None


# -- who may revoke whom -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "counts"),
    [
        pytest.param(BERT, True, id="who made it"),
        pytest.param(ANNE, True, id="one above"),
        pytest.param(CREATOR, True, id="the creator"),
        pytest.param(OLGA, True, id="an owner"),
        pytest.param(OTTO, True, id="an owner far away"),
        pytest.param(CARL, False, id="who came in by it"),
        pytest.param(DORA, False, id="a sibling of one above"),
        pytest.param(ANNE.invites(9), False, id="a sibling of who made it"),
    ],
)
def test_who_may_revoke(by: Person, counts: bool) -> None:
    assert struck(CARL, by.revokes(CARL.invite)) is counts


def test_those_behind_are_out_as_well() -> None:
    for by in (CREATOR, OLGA):
        signed = by.revokes(ANNE.invite)
        assert all(struck(person, signed) for person in (ANNE, BERT, CARL, CLIENT))
        assert not any(struck(person, signed) for person in (CREATOR, DORA, OLGA, OTTO))


def test_nobody_revokes_those_above() -> None:
    assert not struck(ANNE, BERT.revokes(ANNE.invite))
    assert not struck(BERT, BERT.revokes(ANNE.invite))
    # It made none of that id: whoever comes in by an invite with the same id is somebody else's guest.
    assert not struck(DORA, BERT.revokes(DORA.invite))


def test_an_id_that_two_have_given_out() -> None:
    """Ids of invites are drawn by those who make them: nobody gets a hold on others by choosing one."""
    shadow = BERT.invites(10, invite=DORA.invite)

    signed = BERT.revokes(DORA.invite)

    assert struck(shadow, signed)
    assert not struck(DORA, signed)


def test_the_revocation_is_what_one_is_shown() -> None:
    known = Revocations(MESH)
    [news] = known.add([ANNE.revokes(BERT.invite)])

    assert known.strikes(CARL.credential) is news
    assert (news.invite, news.signer, news.role) == (BERT.invite, ANNE.id, Role.NODE)
    assert known.signed == [ANNE.revokes(BERT.invite)]


def test_one_who_is_out_is_not_heard_any_more() -> None:
    """In whichever order the two arrive: everybody comes to the same end."""
    out, later = CREATOR.revokes(ANNE.invite), ANNE.revokes(CLIENT.invite)
    beside = replace(CLIENT, credential=CREATOR.invites(6, Role.CLIENT, invite=CLIENT.invite).credential)

    for order in permutations((out, later)):
        assert not struck(beside, *order)
        assert struck(CLIENT, *order)


# -- owners --------------------------------------------------------------------------------------


def test_the_creator_cannot_be_revoked() -> None:
    signed = [OLGA.revokes(OLGA.invite), OLGA.revokes("00" * 8), OTTO.revokes(OLGA.invite)]

    assert not struck(CREATOR, *signed)


def test_of_two_owners_the_one_nearer_to_the_creator_is_heard() -> None:
    down, up = OLGA.revokes(OTTO.invite), OTTO.revokes(OLGA.invite)

    for order in permutations((down, up)):
        assert not struck(OLGA, *order)
        assert struck(OTTO, *order)


def test_the_creator_takes_an_owners_word_back() -> None:
    signed = (OLGA.revokes(DORA.invite), CREATOR.revokes(OLGA.invite))

    for order in permutations(signed):
        assert struck(OLGA, *order)
        assert struck(OTTO, *order)
        assert not struck(DORA, *order)


def test_two_of_the_same_rank_come_to_one_end_everywhere() -> None:
    peer = CREATOR.invites(11, Role.OWNER)
    signed = (OLGA.revokes(peer.invite), peer.revokes(OLGA.invite))
    ends = {(struck(OLGA, *order), struck(peer, *order)) for order in permutations((*signed, *signed[:1]))}

    assert len(ends) == 1
    assert sorted(ends.pop()) == [False, True]


def test_many_disagree_and_all_orders_come_to_one_end() -> None:
    people = (ANNE, BERT, CARL, DORA, CLIENT, OLGA, OTTO)
    signed = (
        OTTO.revokes(OLGA.invite),
        OLGA.revokes(ANNE.invite),
        ANNE.revokes(BERT.invite),
        CREATOR.revokes(OTTO.invite),
        BERT.revokes(CARL.invite),
    )

    ends = {tuple(struck(person, *order) for person in people) for order in permutations(signed)}

    assert ends == {(True, True, True, False, True, False, True)}


def test_one_who_becomes_an_owner_is_heard_as_one() -> None:
    """What it said as a node, when it had no say, does not stand in the way."""
    promoted = CREATOR.invites(5, Role.OWNER, invite="99" * 8)
    assert promoted.id == DORA.id
    signed = (DORA.revokes(CARL.invite), promoted.revokes(CARL.invite))

    assert not struck(CARL, signed[0])
    for order in permutations(signed):
        assert struck(CARL, *order)


# -- forged ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "signed",
    [
        pytest.param(CLIENT.revokes(CLIENT.invite), id="by a client"),
        pytest.param(creator(9).revokes(ANNE.invite), id="by nobody of this mesh"),
        pytest.param(replace(CREATOR.revokes(ANNE.invite), signature="A" * 88), id="no signature"),
        pytest.param(
            replace(CREATOR.revokes(ANNE.invite), text=CREATOR.revokes(OLGA.invite).text), id="another invite"
        ),
        pytest.param(CREATOR.says(Claim.SETTINGS, json.dumps({"revoke": ANNE.invite})), id="another claim"),
        *(
            pytest.param(CREATOR.says(Claim.REVOCATION, text), id=text[:20])
            for text in (
                *("", "{", "[]", "null", '"' + "11" * 8 + '"', "[" * 100_000, "{}"),
                *('{"revoke":null}', '{"revoke":5}', '{"revoke":"x"}', '{"revoke":["1111111111111111"]}'),
                '{"revoke":"' + "AB" * 8 + '"}',
            )
        ),
    ],
)
def test_forged(signed: Signed) -> None:
    good = CREATOR.revokes(DORA.invite)
    known = Revocations(MESH)

    with pytest.raises(Forged):
        read_revocation(signed, MESH)
    with pytest.raises(Forged):
        known.add([good, signed, CREATOR.revokes(BERT.invite)])

    # What came before it was good, and counts.
    assert known.signed == [good]
    assert known.strikes(DORA.credential) is not None
    assert known.strikes(ANNE.credential) is None


def test_known_ones_are_no_news() -> None:
    known = Revocations(MESH)
    signed = ANNE.revokes(BERT.invite)

    assert [each.invite for each in known.add([signed, signed])] == [BERT.invite]
    assert known.add([signed]) == []
    # Nor is the same word in another dress: it would go round for ever.
    again = ANNE.says(Claim.REVOCATION, json.dumps({"revoke": BERT.invite, "more": 1}))
    assert known.add([again]) == []
    assert len(known) == 1


# -- bounds --------------------------------------------------------------------------------------


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "REVOKED_PER_NODE", 3)
    monkeypatch.setattr(revocations, "REVOKED_PER_BRANCH", 5)
    monkeypatch.setattr(revocations, "REVOKED_PER_OWNER", 8)


def many(person: Person, count: int) -> list[Signed]:
    return [person.revokes(f"{number:016x}") for number in range(1000, 1000 + count)]


@pytest.mark.usefixtures("small_bounds")
def test_a_node_has_so_many_and_no_more() -> None:
    known = Revocations(MESH)

    assert len(known.add(many(ANNE, 10))) == 3
    assert not known.has_room(ANNE.id, ANNE.credential)
    # Others are not held up by it.
    assert len(known.add([DORA.revokes("00" * 8)])) == 1


@pytest.mark.usefixtures("small_bounds")
def test_a_branch_has_so_many_and_no_more() -> None:
    """Ids cost nothing: a node could let in a thousand of its own making, each with a bound of its own."""
    known = Revocations(MESH)
    puppets = [ANNE.invites(100 + number) for number in range(10)]

    kept = [len(known.add(many(puppet, 10))) for puppet in puppets]

    assert kept == [3, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert len(known.add(many(DORA, 10))) == 3
    # Whoever let them in has room all the same: those below make way.
    assert len(known.add(many(ANNE, 10))) == 3
    assert {each.signer for each in known._all.values()} & {puppet.id for puppet in puppets}
    assert len(known.add(many(CREATOR, 10))) == 10


@pytest.mark.usefixtures("small_bounds")
def test_ids_that_came_by_one_invite_are_one_branch() -> None:
    known = Revocations(MESH)
    many_ids = [CREATOR.invites(200 + number, invite="77" * 8) for number in range(10)]

    assert sum(len(known.add(many(each, 3))) for each in many_ids) == 5


@pytest.mark.usefixtures("small_bounds")
def test_all_together_have_so_many_and_the_creator_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "REVOKED_IN_ALL", 6)
    known = Revocations(MESH)
    for number in range(10):
        known.add(many(CREATOR.invites(300 + number), 3))

    assert len(known) == 6
    assert known.add([CREATOR.revokes(CARL.invite)])
    assert len(known) == 6
    assert known.strikes(CARL.credential) is not None


@pytest.mark.usefixtures("small_bounds")
def test_one_makes_way_where_its_branch_and_all_together_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "REVOKED_IN_ALL", 5)
    known = Revocations(MESH)
    known.add([each for puppet in (BERT, ANNE.invites(12)) for each in many(puppet, 3)])
    assert len(known) == 5

    assert known.add([ANNE.revokes(BERT.invite)])
    assert len(known) == 5


@pytest.mark.usefixtures("small_bounds")
def test_nobody_makes_way_for_one_that_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch is full of those that stay; what others further down have revoked stays, too."""
    monkeypatch.setattr(revocations, "REVOKED_IN_ALL", 8)
    known = Revocations(MESH)
    known.add(many(DORA.invites(12), 3))
    ids = [CREATOR.invites(200 + number, invite="77" * 8) for number in range(4)]
    known.add([each for puppet in ids[:2] for each in many(puppet, 3)])
    before = known.signed
    assert len(before) == 8

    assert known.add(many(ids[2], 3)) == []
    assert known.signed == before


def test_a_revocation_names_whose_invite_it_is() -> None:
    """Somebody lets a puppet in by an invite of the same id: to revoke that one hurts nobody else."""
    puppet = ANNE.invites(60, invite=DORA.invite)
    signed = CREATOR.says(Claim.REVOCATION, revocation_text(DORA.invite, ANNE.id))

    assert struck(puppet, signed)
    assert not struck(DORA, signed)


def test_one_who_is_out_adds_nothing() -> None:
    known = Revocations(MESH)
    known.add([CREATOR.revokes(ANNE.invite)])

    assert known.add(many(ANNE, 3)) == []
    with pytest.raises(Forged):
        known.add([DORA.says(Claim.REVOCATION, revocation_text("11" * 8) + " " * 300)])


@pytest.mark.usefixtures("small_bounds")
def test_what_is_only_looked_at_moves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "REVOKED_IN_ALL", 3)
    known = Revocations(MESH)
    known.add(many(BERT, 3))
    before = known.signed

    seen = known.beside(ANNE.revokes(BERT.invite))

    assert seen.strikes(BERT.credential) is not None
    assert known.strikes(BERT.credential) is None
    assert known.signed == before
    with pytest.raises(Forged):
        known.beside(CLIENT.revokes(BERT.invite))


@pytest.mark.usefixtures("small_bounds")
def test_an_owner_has_so_many_and_shares_its_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "REVOKED_PER_BRANCH", 10)
    known = Revocations(MESH)

    assert len(known.add(many(OTTO, 20))) == 8
    # One nearer to the creator is not held up by it.
    assert len(known.add(many(OLGA, 20))) == 8
    assert len(known) == 10


@pytest.mark.usefixtures("small_bounds")
def test_whoever_has_no_room_left_is_told() -> None:
    membership = ANNE.membership()
    for number in range(3):
        membership.revoke(f"{number:016x}", ANNE.identity)

    with pytest.raises(
        MeshError, match=r"^this node has revoked as many invites as other nodes keep for it$"
    ):
        membership.revoke("ff" * 8, ANNE.identity)


@pytest.mark.usefixtures("small_bounds")
def test_whoever_finds_no_room_beside_others_is_told() -> None:
    """Ids that came by the same invite have taken all of its branch."""
    membership = ANNE.membership()
    twins = [CREATOR.invites(200 + number, invite=ANNE.invite) for number in range(2)]
    membership.take_revocations([each for twin in twins for each in many(twin, 3)])

    with pytest.raises(MeshError, match=r"^no more revocations are kept from members"):
        membership.revoke("ff" * 8, ANNE.identity)
    owner = OLGA.membership()
    for _ in range(2):
        owner.revoke(ANNE.invite, OLGA.identity)
    assert len(owner.revocations) == 1
