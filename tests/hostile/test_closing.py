"""A closing is a word of whoever closes: it ends a connection, and nothing else."""

from __future__ import annotations

import pytest

from mesh_llm.transport.close_codes import Code
from tests.hostile.adversary import FORGERIES
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    address_of,
    comes_to,
    id_of,
    is_expelled,
    remembers,
    restarted,
    serves,
    soon,
)
from tests.support.joining import PLAN, Lab


@pytest.mark.full
def test_a_member_that_refuses_does_not_end_those_who_dial_it(nodes: Lab, villain: Villain) -> None:
    """It says in the handshake that they were expelled, and shows what looks like a revocation."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    two_id = id_of(two)
    bad = villain(one.token())
    bad.connect(two_id, address_of(two))
    [invite] = bad.invites_of(two_id)
    shown = [bad.revoked(invite, way) for way in FORGERIES]
    bad.introduce(address=bad.open_door(Code.REVOKED, shown))
    two.until(lambda: remembers(two, bad.id), what="it keeps where it was told to dial")

    two = restarted(nodes, two)
    two.until(lambda: bad.dialled >= len(shown), what="it dials, again and again")
    soon(lambda: not two.running, within_s=2.0)

    assert two.running, f"it believes that it was expelled: {two.stderr}"
    assert not is_expelled(two.home)
    bad.end()
    serves(restarted(nodes, two))


@pytest.mark.full
@pytest.mark.parametrize("role", ["node", "client"])
def test_a_token_does_not_end_the_mesh_of_its_creator(nodes: Lab, villain: Villain, role: str) -> None:
    """The creator dials those whom it remembers; one of them says that it was expelled."""
    one = nodes.create("one")
    bad = villain(one.token(role=role))
    bad.introduce(address=bad.open_door(Code.REVOKED))
    is_node = role == "node"
    assert comes_to(lambda: remembers(one, bad.id), expected=is_node) == is_node

    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    assert comes_to(lambda: bad.dialled > 0, expected=is_node) == is_node
    soon(lambda: not one.running, within_s=2.0)

    assert not is_expelled(one.home), f"the creator believes that it was expelled: {one.stderr}"
    serves(one)
    serves(restarted(nodes, one, "--model", nodes.model, *PLAN))


def test_a_member_that_closes_does_not_end_others(nodes: Lab, villain: Villain) -> None:
    """Neither the creator nor one that joined."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    for code in (Code.REVOKED, Code.OWN_ID):
        bad = villain(one.token())
        bad.introduce()
        for node in (one, two):
            node.until_nodes("mallory", "one", "two")
            # Either side may have dialled first.
            bad.connect(id_of(node), address_of(node))
            bad.close(code, to=id_of(node))
        bad.end()
        for node in (one, two):
            node.until_nodes("one", "two")

    assert serves(one) == serves(two)
    assert not is_expelled(one.home)
    assert not is_expelled(two.home)
    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    assert serves(restarted(nodes, two)) == serves(one)
