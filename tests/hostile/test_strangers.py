"""What a token is good for that went to the wrong people. What one without a token learns: see tests/net."""

from __future__ import annotations

import pytest

from mesh_llm.errors import JoinRefused
from tests.hostile.adversary import Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import address_of, restarted, serves
from tests.support.background import Background
from tests.support.joining import PLAN, Lab

USED = "used up"


def test_an_invite_for_one_lets_one_in(nodes: Lab, villain: Villain, loop: Background) -> None:
    """Also after a restart of the one who made it; the one who came in may come again."""
    one = nodes.create("one")
    token = str(one.control("/api/invite", {"role": "node", "lifetime_s": 3600.0, "uses": 1})["token"])
    first = villain(token, name="first")
    second = Adversary(loop, name="second")
    try:
        with pytest.raises(JoinRefused, match=USED):
            second.join(token, timeout_s=10.0)
        one = restarted(nodes, one, "--model", nodes.model, *PLAN)
        with pytest.raises(JoinRefused, match=USED):
            second.join(token, timeout_s=10.0)
        assert not second.connected
    finally:
        second.end()
    first.connect(first.inviter, address_of(one))
    assert first.settle()
    first.end()
    again = villain(token, name="first", identity=first.identity)
    assert again.settle()
    serves(one)
