"""Whether a node lives is not for others to say while it is heard."""

from __future__ import annotations

import time

import pytest

from tests.hostile.conftest import Villain
from tests.hostile.honest import id_of, serves
from tests.support.joining import Lab, names_of

AGAIN = 12
PAUSE_S = 0.25


@pytest.mark.parametrize(
    ("standing", "ahead"), [("suspect", 1), ("dead", 0), ("dead", 1000), ("left", 0), ("left", 1000)]
)
def test_a_node_that_is_heard_stays_whatever_is_said_of_it(
    nodes: Lab, villain: Villain, standing: str, ahead: int
) -> None:
    """And so does the plan that it has a part in: its user notices nothing."""
    one = nodes.create("one", "--split")
    two = nodes.join("two", one)
    status = one.until_status(
        lambda status: status["node"]["state"] == "serving" and len(status["plan"]["stages"]) == 2,
        what="both compute",
    )
    epoch, text = status["plan"]["epoch"], serves(one)
    bad = villain(one.token())
    two_id = id_of(two)

    for _ in range(AGAIN):
        incarnation, sequence = bad.version_of(two_id)
        bad.tell(
            bad.record(two_id, incarnation=incarnation + ahead, sequence=sequence + 1, standing=standing)
        )
        # A little more than one look at the plan takes.
        time.sleep(PAUSE_S)
        status = one.status()
        assert "two" in names_of(status), f"it was believed that two is {standing}"
        assert status["plan"]["epoch"] == epoch, f"a new plan: {status['plan']['reason']}"

    assert two.running, f"it ended: {two.stderr}"
    assert serves(one) == text
    assert one.status()["plan"]["epoch"] == epoch
