"""Who may expel whom: an invite's maker its guests, an owner anybody but the creator, nobody else anybody."""

from __future__ import annotations

import pytest

from mesh_llm.transport.revocations import REVOKED_PER_BRANCH, REVOKED_PER_NODE
from tests.hostile.adversary import FORGERIES, Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    id_of,
    is_expelled,
    membership,
    restarted,
    serves,
    soon,
)
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, Lab, names_of, refused, said

AT_ONCE = 64
"""In one message."""
EXPELLED = "this node was expelled from its mesh: its invite was revoked"


def invented(count: int, first: int = 0) -> list[str]:
    return [f"{number:016x}" for number in range(first, first + count)]


def fill(bad: Adversary) -> None:
    """All the room that it and those whom it lets in have; more than they have."""
    signed = [bad.revoked(invite) for invite in invented(REVOKED_PER_NODE + 10)]
    for number, who in enumerate(bad.below(REVOKED_PER_BRANCH // REVOKED_PER_NODE), 1):
        signed += [bad.revoked_by(who, invite) for invite in invented(REVOKED_PER_NODE, number << 16)]
    for start in range(0, len(signed), AT_ONCE):
        assert bad.said(bad.claims(revocations=signed[start : start + AT_ONCE])), bad.refusal()


@pytest.mark.full
def test_invented_revocations_leave_room_for_real_ones(nodes: Lab, villain: Villain) -> None:
    """The creator's, and those of a node that has let somebody in."""
    one = nodes.create("one")
    invite = one.invite()
    two = nodes.start("two", "--join", invite["token"]).until_ready()
    theirs = two.invite()
    three = nodes.start("three", "--join", theirs["token"]).until_ready()
    one.until_nodes("one", "three", "two")
    bad = villain(one.token())

    fill(bad)

    one.until(
        lambda: len(membership(one.home).revocations) >= REVOKED_PER_BRANCH, what="they were taken for real"
    )
    assert len(membership(one.home).revocations) == REVOKED_PER_BRANCH
    answer = said(mesh_llm("invite", "revoke", theirs["id"], "--home", two.home, "--json"))
    assert answer == {"id": theirs["id"], "expelled": ["three"]}
    assert refused(three.wait(within_s=QUICK_S)) == EXPELLED
    answer = said(mesh_llm("invite", "revoke", invite["id"], "--home", one.home, "--json"))
    assert answer == {"id": invite["id"], "expelled": ["two"]}
    assert refused(two.wait(within_s=QUICK_S)) == EXPELLED
    one.until_status(lambda status: "two" not in names_of(status), what="two is out")
    # Nor does it come back, whoever is asked.
    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    assert refused(nodes.start("two").wait(within_s=QUICK_S)) == EXPELLED
    serves(one)


def test_a_member_cannot_expel_another_one(nodes: Lab, villain: Villain) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    bad = villain(one.token())
    two_id = id_of(two)
    bad.connect(two_id, address_of(two))
    [invite] = bad.invites_of(two_id)

    for way in FORGERIES:
        for node in (one, two):
            bad.connect(id_of(node), address_of(node))
            stays = bad.said(bad.claims(revocations=[bad.revoked(invite, way)]), to=id_of(node))
            assert stays == (way == "its own name"), "who forges is sent away, and nobody else"
    soon(lambda: not two.running or "two" not in names_of(one.status()), within_s=3.0)

    assert two.running, f"two ended: {two.stderr}"
    assert not is_expelled(two.home)
    one.until_status(lambda status: "two" in names_of(status), what="two is a member", within_s=QUICK_S)
    assert serves(two) == serves(one)
    two = restarted(nodes, two)
    two.until_status(lambda status: "one" in names_of(status), what="it is back", within_s=QUICK_S)


@pytest.mark.full
def test_an_owner_expels_anybody_but_the_creator(nodes: Lab, villain: Villain) -> None:
    """Whom it revoked may come back once it is revoked itself: the creator is heard first."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    owner = one.invite(role="owner")
    bad = villain(owner["token"])
    two_id = id_of(two)
    bad.connect(two_id, address_of(two))
    [theirs] = bad.invites_of(two_id)
    creator = one.status()["mesh"]["id"]

    # The creator has no invite: its own id, cut as one, and its own invites that nobody came in by.
    unused = one.invite()["id"]
    words = [bad.revoked(each) for each in (creator[:16], unused, "00" * 8)]
    assert bad.said(bad.claims(revocations=words)), bad.refusal()
    assert bad.said(bad.claims(revocations=words), to=two_id), bad.refusal(two_id)
    assert {"one", "two"} <= set(names_of(two.status()))
    assert serves(two) == serves(one)

    bad.send(bad.claims(revocations=[bad.revoked(theirs)]))
    assert refused(two.wait(within_s=QUICK_S)) == EXPELLED
    one.until_status(lambda status: "two" not in names_of(status), what="an owner may do that")
    assert not is_expelled(one.home)
    said(mesh_llm("invite", "revoke", owner["id"], "--home", one.home, "--json"))
    one.until(lambda: not bad.connected, what="the owner is out", within_s=QUICK_S)
    # By the credential that it had: what an owner said who is out counts no more.
    assert membership(one.home).revocations.strikes(membership(two.home).credential) is None
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    assert serves(two) == serves(one)
