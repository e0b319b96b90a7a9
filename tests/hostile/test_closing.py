"""A closing is a word of whoever closes: it ends a connection, and nothing else."""

from __future__ import annotations

import pytest

from mesh_llm.transport.closing import Code
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    address_of,
    id_of,
    is_expelled,
    remembers,
    restarted,
    serves,
    soon,
)
from tests.support.joining import PLAN, Lab


@pytest.mark.parametrize("role", ["client", "node"])
def test_a_token_does_not_end_the_mesh_of_its_creator(nodes: Lab, villain: Villain, role: str) -> None:
    """The creator dials those whom it remembers; one of them says that it was expelled."""
    one = nodes.create("one")
    bad = villain(one.token(role=role))
    bad.introduce(settle=False, address=bad.open_door(Code.REVOKED))
    soon(lambda: remembers(one, bad.id))

    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    soon(lambda: bad.dialled > 0 and not one.running)

    assert not is_expelled(one.home), f"the creator believes that it was expelled: {one.stderr}"
    serves(one)
    serves(restarted(nodes, one, "--model", nodes.model, *PLAN))


@pytest.mark.parametrize("code", [Code.REVOKED, Code.OWN_ID], ids=lambda code: code.name)
def test_a_member_that_closes_does_not_end_the_creator(nodes: Lab, villain: Villain, code: Code) -> None:
    one = nodes.create("one")
    bad = villain(one.token())
    bad.introduce()
    one.until_nodes("mallory", "one")

    bad.close(code)
    bad.end()

    one.until_nodes("one")
    serves(one)
    assert not is_expelled(one.home)
    serves(restarted(nodes, one, "--model", nodes.model, *PLAN))


@pytest.mark.parametrize("code", [Code.REVOKED, Code.OWN_ID], ids=lambda code: code.name)
def test_a_member_that_closes_does_not_end_a_node_that_joined(
    nodes: Lab, villain: Villain, code: Code
) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    bad = villain(one.token())
    bad.introduce()
    two.until_nodes("mallory", "one", "two")
    # Either side may have dialled first.
    bad.connect(id_of(two), address_of(two))

    bad.close(code, to=id_of(two))
    bad.end()

    two.until_nodes("one", "two")
    serves(two)
    assert not is_expelled(two.home)
    serves(restarted(nodes, two))
