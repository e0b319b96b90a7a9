"""Who may expel whom: an invite's maker its guests, and nobody else anybody."""

from __future__ import annotations

import pytest

from mesh_llm.types import NodeId
from tests.hostile.conftest import Villain
from tests.hostile.honest import QUICK_S, address_of, id_of, is_expelled, restarted, serves, soon
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, Lab, names_of, refused, said

FULL = 10_000
"""As many revocations as a node keeps."""
EXPELLED = "this node was expelled from its mesh: its invite was revoked"


def invented(count: int) -> list[str]:
    return [f"{number:016x}" for number in range(count)]


def test_invented_revocations_leave_room_for_a_real_one(nodes: Lab, villain: Villain) -> None:
    one = nodes.create("one")
    invite = one.invite()
    two = nodes.start("two", "--join", invite["token"]).until_ready()
    one.until_nodes("one", "two")
    bad = villain(one.token())
    bad.send(bad.revocations(invented(FULL)))
    bad.settle()

    answer = said(mesh_llm("invite", "revoke", invite["id"], "--home", one.home, "--json"))

    assert answer == {"id": invite["id"], "expelled": ["two"]}
    assert refused(two.wait(within_s=QUICK_S)) == EXPELLED
    one.until_status(lambda status: "two" not in names_of(status), what="two is out")
    # Nor does it come back, whoever is asked.
    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    assert refused(nodes.start("two").wait(within_s=QUICK_S)) == EXPELLED
    serves(one)


@pytest.mark.parametrize("told", ["by its invite", "by its id"])
def test_a_member_cannot_expel_another_one(nodes: Lab, villain: Villain, told: str) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    bad = villain(one.token())
    two_id = id_of(two)
    bad.connect(two_id, address_of(two))
    theirs = bad.invites_of(two_id)
    said_so = {
        "by its invite": bad.revocations(theirs),
        "by its id": bad.revocations(invented(1), [two_id]),
    }[told]

    bad.send(said_so)
    bad.send(said_so, to=two_id)
    soon(lambda: not two.running or "two" not in names_of(one.status()))

    assert two.running, f"two ended: {two.stderr}"
    assert not is_expelled(two.home)
    one.until_status(lambda status: "two" in names_of(status), what="two is a member", within_s=QUICK_S)
    assert serves(two) == serves(one)
    two = restarted(nodes, two)
    two.until_status(lambda status: "one" in names_of(status), what="it is back", within_s=QUICK_S)


def test_a_member_cannot_expel_the_creator(nodes: Lab, villain: Villain) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    two.until_nodes("one", "two")
    bad = villain(one.token())
    creator = NodeId(str(one.status()["mesh"]["id"]))
    bad.connect(id_of(two), address_of(two))

    for to in (creator, id_of(two)):
        bad.send(bad.revocations(invented(1), [creator]), to=to)
        bad.settle(to)

    assert {"one", "two"} <= set(names_of(two.status()))
    assert serves(two) == serves(one)
