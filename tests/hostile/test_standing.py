"""Whether a node lives is not for others to say while it is heard."""

from __future__ import annotations

import pytest

from tests.hostile.conftest import Villain
from tests.hostile.honest import id_of, serves
from tests.support.joining import Lab, names_of

LOOKS = 40
CLAIMS = 10
"""Between two looks, each above what the node has said of itself, and above the one before."""


@pytest.mark.parametrize("standing", ["suspect", "dead", "left"])
def test_a_node_that_is_heard_stays_whatever_is_said_of_it(
    nodes: Lab, villain: Villain, standing: str
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
    incarnation, sequence = bad.version_of(two_id)

    for look in range(LOOKS):
        for number in range(1, CLAIMS + 1):
            above = incarnation + 100 * (look * CLAIMS + number)
            bad.claim(bad.record(two_id, incarnation=above, sequence=sequence, standing=standing))
        status = one.status()
        assert "two" in names_of(status), f"it was believed that two is {standing}"
        assert status["plan"]["epoch"] == epoch, f"a new plan: {status['plan']['reason']}"

    assert two.running, f"it ended: {two.stderr}"
    assert serves(one) == text
    assert one.status()["plan"]["epoch"] == epoch
