"""A member that comes between a plan's workers."""

from __future__ import annotations

import pytest

from tests.hostile.conftest import Villain
from tests.hostile.honest import QUICK_S, address_of, id_of, serves
from tests.support.joining import Lab, host_of

MANY = 40


@pytest.mark.full
def test_only_workers_of_a_plan_link_to_its_workers(nodes: Lab, villain: Villain) -> None:
    """A link takes two threads and a descriptor of the worker's."""
    one = nodes.create("one", "--split", "--hosting", "prefer")
    two, three = nodes.join("two", one), nodes.join("three", one)
    status = one.until_status(
        lambda status: (
            status["node"]["state"] == "serving"
            and host_of(status) == "one"
            and len({stage["node"] for stage in status["plan"]["stages"]}) == 3
        ),
        what="all three serve",
        within_s=4 * QUICK_S,
    )
    bad = villain(one.token())
    before = serves(one)

    for worker in (two, three):
        node = id_of(worker)
        bad.connect(node, address_of(worker))
        for number in range(MANY):
            purpose = {"kind": "neighbour", "host": id_of(one), "epoch": status["plan"]["epoch"]}
            link = bad.open("link", {"way": "quic", "purpose": {**purpose, "number": number}}, to=node)
            assert link.document() == {
                "refused": "only the worker with the layers before these may link to it"
            }

    assert "workers not linked" not in (one.home / "logs" / "node.log").read_text()
    assert serves(one) == before
    assert one.status()["plan"]["epoch"] == status["plan"]["epoch"]
