"""Whether a node lives is not for others to say while it is heard."""

from __future__ import annotations

from tests.hostile.conftest import Villain
from tests.hostile.honest import id_of, serves
from tests.support.joining import Lab, names_of

LOOKS = 10
STANDINGS = ("suspect", "dead", "left")


def test_a_node_that_is_heard_stays_whatever_is_said_of_it(nodes: Lab, villain: Villain) -> None:
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
    incarnations = set()

    for look in range(LOOKS * len(STANDINGS)):
        standing = STANDINGS[look // LOOKS]
        theirs = bad.record_of(two_id)
        incarnation, sequence = int(theirs["i"]), int(theirs["s"])
        incarnations.add(incarnation)
        # Of the life that it lives, which it has to refute, and of lives that it has not begun.
        hints = [
            bad.hint(two_id, standing, incarnation=incarnation + above, sequence=sequence)
            for above in (0, 1, 1000 * look)
        ]
        # And with what it has signed itself, as if that had said so.
        assert bad.tell(*hints, theirs | {"is": standing}), bad.refusal()
        status = one.status()
        assert "two" in names_of(status), f"it was believed that two is {standing}"
        assert status["plan"]["epoch"] == epoch, f"a new plan: {status['plan']['reason']}"

    assert len(incarnations) > 1, "two never heard of it"
    assert two.running, f"it ended: {two.stderr}"
    assert serves(one) == text
    assert one.status()["plan"]["epoch"] == epoch
