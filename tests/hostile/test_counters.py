"""Numbers that only ever grow: nobody ends a mesh by counting to the end of them."""

from __future__ import annotations

import time

import pytest

from mesh_llm.membership.checked_fields import counts_up_to
from tests.hostile.adversary import FORGERIES, LARGEST
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    comes_to,
    id_of,
    remembered,
    restarted,
    serves,
    soon,
)
from tests.support.joining import LAYERS, PLAN, JoiningNode, Lab, host_of

CLAIMS = 10
"""More than a node bears that has a copy of its home to fear."""


def agree(*nodes: JoiningNode) -> None:
    """All serve by the same plan of the same host."""

    def plans() -> set[tuple[str, int]]:
        found = [node.status() for node in nodes]
        ready = all(s["node"]["state"] == "serving" and s["plan"] for s in found)
        return {(host_of(s), s["plan"]["epoch"]) for s in found} if ready else set()

    nodes[0].until(lambda: len(plans()) == 1, what="all agree on a plan", within_s=QUICK_S)
    assert len({serves(node) for node in nodes}) == 1


def have_heard(epoch: int, *nodes: JoiningNode, expected: bool) -> bool:
    return comes_to(lambda: all(remembered(node.home)["epoch"] >= epoch for node in nodes), expected=expected)


@pytest.mark.full
def test_a_mesh_outlives_an_epoch_that_is_the_last(nodes: Lab, villain: Villain) -> None:
    """Of a plan that a member says to host itself, as it may."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    agree(one, two)

    for believed in (False, True):
        bad = villain(one.token())
        epoch = counts_up_to(time.time()) if believed else LARGEST
        bad.introduce(state="serving", serving=bad.serving(epoch=epoch, layers=LAYERS))
        assert have_heard(epoch, one, two, expected=believed) == believed
        bad.end()
        one.until_nodes("one", "two")
        agree(one, two)

    two.stop()
    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    two = nodes.start("two").until_ready()
    one.until_nodes("one", "two")
    agree(one, two)


@pytest.mark.parametrize("victim", ["the creator", pytest.param("a joiner", marks=pytest.mark.full)])
def test_a_node_outlives_an_incarnation_that_is_the_last(nodes: Lab, villain: Villain, victim: str) -> None:
    """Said of it by another one, who has no right to: to itself, and to one who hears of it."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    wronged, witness = (one, two) if victim == "the creator" else (two, one)
    bad = villain(one.token())
    wronged_id = id_of(wronged)
    bad.connect(id_of(two), address_of(two))
    said = {
        **{way: bad.altered(wronged_id, way, incarnation=LARGEST, address={}) for way in FORGERIES},
        "dead": bad.hint(wronged_id, "dead", incarnation=LARGEST, sequence=1),
        "left": bad.hint(wronged_id, "left", incarnation=LARGEST, sequence=1),
    }

    for what, claim in said.items():
        for node in (witness, wronged):
            bad.connect(id_of(node), address_of(node))
            stays = bad.tell(claim, to=id_of(node))
            assert stays == (what not in FORGERIES), "who forges is sent away, and nobody else"
    soon(lambda: not wronged.running, within_s=3.0)

    assert wronged.running, f"it ended: {wronged.stderr}"
    bad.end()
    for node in (one, two):
        node.until_nodes("one", "two")
    assert serves(one) == serves(two)


@pytest.mark.full
def test_claims_of_a_node_by_another_do_not_end_it(nodes: Lab, villain: Villain) -> None:
    """As if a copy of its home were running: an incarnation above its own, again and again."""
    one = nodes.create("one")
    bad = villain(one.token())
    node, address = id_of(one), address_of(one)
    incarnation, sequence = bad.version_of(node)

    for number in range(1, CLAIMS):
        above = incarnation + 10 * number
        assert bad.tell(bad.hint(node, "dead", incarnation=bad.version_of(node)[0], sequence=sequence))
        for way in FORGERIES:
            assert not bad.tell(bad.altered(node, way, incarnation=above))
            assert "signature does not hold" in bad.refusal() or "somebody else" in bad.refusal()
            bad.connect(node, address)

    assert not soon(lambda: not one.running, within_s=3.0), f"it ended: {one.stderr}"
    serves(one)
