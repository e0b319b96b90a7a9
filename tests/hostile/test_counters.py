"""Numbers that only ever grow: nobody ends a mesh by counting to the end of them."""

from __future__ import annotations

import pytest

from tests.hostile.adversary import LARGEST
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    id_of,
    remembered,
    restarted,
    serves,
    soon,
)
from tests.support.joining import LAYERS, PLAN, JoiningNode, Lab, host_of

CLAIMS = 20
"""More than a node bears that has a copy of its home to fear."""


def agree(*nodes: JoiningNode) -> None:
    """All serve by the same plan of the same host."""

    def plans() -> set[tuple[str, int]]:
        found = [node.status() for node in nodes]
        ready = all(s["node"]["state"] == "serving" and s["plan"] for s in found)
        return {(host_of(s), s["plan"]["epoch"]) for s in found} if ready else set()

    nodes[0].until(lambda: len(plans()) == 1, what="all agree on a plan", within_s=QUICK_S)
    assert len({serves(node) for node in nodes}) == 1


def test_a_mesh_outlives_an_epoch_that_is_the_last(nodes: Lab, villain: Villain) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    agree(one, two)
    bad = villain(one.token())
    bad.introduce(state="serving", serving=bad.serving(epoch=LARGEST, layers=LAYERS))
    soon(lambda: max(remembered(node.home)["epoch"] for node in (one, two)) == LARGEST)
    bad.end()

    one.until_nodes("one", "two")
    agree(one, two)
    two.stop()
    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    two = nodes.start("two").until_ready()
    one.until_nodes("one", "two")
    agree(one, two)


@pytest.mark.parametrize(
    ("victim", "standing"),
    [("the creator", None), ("the creator", "dead"), ("a joiner", None), ("a joiner", "left")],
)
def test_a_node_outlives_an_incarnation_that_is_the_last(
    nodes: Lab, villain: Villain, victim: str, standing: str | None
) -> None:
    """Said of it by another one, who has no right to."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    wronged, witness = (one, two) if victim == "the creator" else (two, one)
    bad = villain(one.token())
    bad.connect(id_of(two), address_of(two))
    facts = bad.facts(name=wronged.name, address={})
    claim = bad.record(
        id_of(wronged), incarnation=LARGEST, sequence=1, standing=standing, facts=None if standing else facts
    )

    bad.tell(claim, to=id_of(witness))
    soon(lambda: not wronged.running)

    assert wronged.running, f"it ended: {wronged.stderr}"
    bad.end()
    for node in (one, two):
        node.until_nodes("one", "two")
    assert serves(one) == serves(two)


def test_claims_of_a_node_by_another_do_not_end_it(nodes: Lab, villain: Villain) -> None:
    """As if a copy of its home were running: an incarnation above its own, again and again."""
    one = nodes.create("one")
    bad = villain(one.token())
    facts, node = bad.facts(name="one", address={}), id_of(one)
    incarnation, _ = bad.version_of(node)

    for number in range(1, CLAIMS):
        bad.claim(bad.record(node, incarnation=incarnation + 10 * number, sequence=0, facts=facts))

    assert not soon(lambda: not one.running), f"it ended: {one.stderr}"
    serves(one)
