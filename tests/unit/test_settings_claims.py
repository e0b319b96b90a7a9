"""The mesh's settings: signed by its owners, the highest version in force, whoever passes them on."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from mesh_llm.errors import Forged
from mesh_llm.membership.checked_fields import counts_up_to
from mesh_llm.membership.settings_documents import settings_to_document
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.transport import own_membership as memberships
from mesh_llm.transport.claims import Claim
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Fingerprint, Role, Signed
from tests.support.claims import Person, creator

CREATOR = creator(1)
ANNE = CREATOR.invites(2)
CLIENT = CREATOR.invites(3, Role.CLIENT)
OLGA = CREATOR.invites(4, Role.OWNER)
OTTO = OLGA.invites(5, Role.OWNER)
NOW = 1_800_000_000.0


def settings(version: int = 1, **others: Any) -> MeshSettings:
    known = MeshSettings(version=version, model="tiny", fingerprint=Fingerprint("ab" * 32), alias="tiny")
    return replace(known, **others)


def sets(person: Person, version: int = 1, **others: Any) -> Signed:
    document = {"settings": settings_to_document(settings(version, **others))}
    return person.says(Claim.SETTINGS, json.dumps(document, separators=(",", ":")))


def told(*signed: Signed, revoked: tuple[Signed, ...] = ()) -> Membership:
    """A member that has heard all of this."""
    membership = ANNE.membership()
    for each in signed:
        membership.take_settings(each, now=NOW)
    membership.take_revocations(revoked)
    return membership


def test_nobody_has_set_anything() -> None:
    assert (told().settings, told().in_force) == (None, None)


@pytest.mark.parametrize("owner", [CREATOR, OLGA, OTTO])
def test_any_owner_sets_them(owner: Person) -> None:
    membership = told(sets(owner, context=4096))

    assert membership.settings == settings(context=4096)
    assert membership.in_force is not None
    assert membership.in_force.signer.node == owner.id


def test_an_owner_signs_what_it_sets() -> None:
    owner = OLGA.membership()
    owner.set(settings(3, digest="cd" * 32), OLGA.identity, now=NOW)
    [signed], revoked = owner.claims()

    assert owner.settings == told(signed).settings == settings(3, digest="cd" * 32)
    assert revoked == []


def test_the_highest_version_is_in_force() -> None:
    everything = (sets(CREATOR, 2, slots=2), sets(OLGA, 3, slots=3), sets(OTTO, 1, slots=1))

    for order in permutations(everything):
        assert told(*order).settings == settings(3, slots=3)


def test_an_owners_later_word_replaces_its_earlier_one() -> None:
    membership = told(sets(CREATOR, 1))

    assert membership.take_settings(sets(CREATOR, 2), now=NOW)
    assert not membership.take_settings(sets(CREATOR, 2), now=NOW)
    assert not membership.take_settings(sets(CREATOR, 1), now=NOW)
    assert membership.settings == settings(2)
    assert len(membership.claims()[0]) == 1


def test_two_owners_and_one_version() -> None:
    """Everybody has to choose the same one of them."""
    tie = (sets(CREATOR, 2, slots=2), sets(OLGA, 2, slots=3), sets(OTTO, 2, slots=4))

    assert len({told(*order).settings for order in permutations(tie)}) == 1


def test_one_owner_and_one_version_twice() -> None:
    tie = (sets(OLGA, 2, slots=2), sets(OLGA, 2, slots=3))

    assert len({told(*order).settings for order in permutations(tie)}) == 1


@pytest.mark.parametrize("person", [ANNE, CLIENT, creator(9), creator(9).invites(8, Role.OWNER)])
def test_others_set_nothing(person: Person) -> None:
    membership = told(sets(CREATOR, 1))

    with pytest.raises(Forged):
        membership.take_settings(sets(person, 2), now=NOW)

    assert membership.settings == settings(1)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "[" * 100_000, '{"settings":null}', '{"settings":{"version":1}}']
)
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(Forged, match=r"^malformed settings$"):
        told(OLGA.says(Claim.SETTINGS, text))


def test_altered_on_the_way() -> None:
    signed = sets(OLGA, 2)

    with pytest.raises(Forged, match="invalid signature"):
        told(replace(signed, text=signed.text.replace('"version":2', '"version":3')))
    with pytest.raises(Forged, match="invalid signature"):
        told(replace(signed, credential=sets(OTTO).credential))


def test_a_version_that_nobody_can_have_come_to() -> None:
    """It would leave no higher one to the others. Left out, not forged: clocks differ."""
    membership = told(sets(CREATOR, 1))

    assert not membership.take_settings(sets(OLGA, counts_up_to(NOW) + 1), now=NOW)
    assert membership.settings == settings(1)
    assert membership.take_settings(sets(OLGA, counts_up_to(NOW)), now=NOW)
    assert membership.take_settings(sets(OTTO, counts_up_to(NOW) + 1), now=NOW + 0.001)


def test_a_revoked_owner_has_no_say() -> None:
    """What the others said last is in force, in whichever order one hears of it."""
    words = (sets(CREATOR, 1, slots=1), sets(OLGA, 5, slots=5))
    membership = told(*words)
    assert membership.settings == settings(5, slots=5)

    membership.take_revocations([CREATOR.revokes(OLGA.invite)])

    assert membership.settings == settings(1, slots=1)
    late = told(revoked=(CREATOR.revokes(OLGA.invite),))
    for each in words:
        late.take_settings(each, now=NOW)
    assert late.settings == settings(1, slots=1)


def test_owners_below_a_revoked_one_have_no_say_either() -> None:
    membership = told(sets(OTTO, 5), revoked=(CREATOR.revokes(OLGA.invite),))

    assert (membership.settings, membership.in_force) == (None, None)


def test_an_owner_that_was_let_in_again_has_its_say_again() -> None:
    """It counts from one, where nobody else has set anything: its word of before is none any more."""
    again = CREATOR.invites(4, Role.OWNER, invite="99" * 8)
    assert again.id == OLGA.id
    words = (sets(OLGA, 5, slots=5), sets(again, 1, slots=1))
    revoked = (CREATOR.revokes(OLGA.invite),)

    for order in permutations(words):
        assert told(*order, revoked=revoked).settings == settings(1, slots=1)


def test_so_many_owners_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memberships, "OWNERS_LIMIT", 3)
    membership = told(*(sets(CREATOR.invites(20 + number, Role.OWNER), 1) for number in range(3)))

    assert not membership.take_settings(sets(OLGA, 2), now=NOW)
    assert membership.take_settings(sets(CREATOR.invites(20, Role.OWNER), 2), now=NOW)
    assert len(membership.claims()[0]) == 3


def test_they_survive_their_document() -> None:
    before = told(sets(CREATOR, 1), sets(OLGA, 2), revoked=(CREATOR.revokes(OLGA.invite),))

    after = Membership.from_document(json.loads(json.dumps(before.to_document())), now=NOW)

    assert after.claims() == before.claims()
    assert after.settings == settings(1)
