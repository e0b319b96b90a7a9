"""What a client's token is good for: asking. It is handed out lightly."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from mesh_llm.errors import JoinRefused
from tests.hostile.adversary import Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import QUICK_S, restarted, serves, soon
from tests.support.background import Background
from tests.support.joining import PLAN, Lab

AT_ONCE = 16
"""Connections that one client token is good for."""
ATTEMPTS = 24


@pytest.fixture
def ear() -> Iterator[socket.socket]:
    """Would notice any packet."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.setblocking(False)
        yield ear


def rings(ear: socket.socket) -> bool:
    try:
        return bool(ear.recv(1))
    except BlockingIOError:
        return False


def test_a_client_does_not_send_nodes_anywhere(nodes: Lab, villain: Villain, ear: socket.socket) -> None:
    """A node dials members at the addresses that they tell: not at a client's."""
    one = nodes.create("one")
    bad = villain(one.token(role="client"))
    place = f"127.0.0.1:{ear.getsockname()[1]}"
    bad.introduce(address=bad.place(place))

    assert not soon(lambda: rings(ear)), "a packet went to where a client said, while it was there"
    bad.end()
    assert not soon(lambda: rings(ear)), "a packet went to where a client said, after it had gone"
    one = restarted(nodes, one, "--model", nodes.model, *PLAN)
    assert not soon(lambda: rings(ear)), "a packet went to where a client said, after a restart"
    serves(one)


def test_a_client_that_is_lost_is_not_dialled(nodes: Lab, villain: Villain, ear: socket.socket) -> None:
    """Not by the one that let it in, and not by another one, which heard of it."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    bad = villain(one.token(role="client"))
    place = f"127.0.0.1:{ear.getsockname()[1]}"
    bad.introduce(address=bad.place(place))
    # A member may not pass that on, either.
    other = villain(one.token())
    bad.sequence += 1
    assert not other.tell(bad.record(facts=bad.facts(address=bad.place(place))))
    assert "by somebody else than its node" in other.refusal()

    assert not soon(lambda: rings(ear)), "a packet went to where a client said"
    bad.handler.silent.set()
    assert not soon(lambda: rings(ear)), "a packet went to where a silent client said"
    assert serves(two) == serves(one)


def test_one_client_token_does_not_fill_a_node(nodes: Lab, villain: Villain, loop: Background) -> None:
    """Under as many ids as there are."""
    one = nodes.create("one")
    token = one.token(role="client")
    many: list[Adversary] = []
    try:
        for _ in range(ATTEMPTS):
            many.append(Adversary(loop))
            try:
                many[-1].join(token, timeout_s=2.0)
            except JoinRefused:
                break
        # Some may have been closed for the others' sake, a moment later.
        soon(lambda: sum(bad.connected for bad in many) <= AT_ONCE)
        connected = sum(bad.connected for bad in many)
        assert connected <= AT_ONCE, f"{connected} connections by one client's token"
        villain(one.token(role="client"), timeout_s=QUICK_S)
        two = nodes.join("two", one)
        assert serves(two) == serves(one)
    finally:
        for bad in many:
            bad.end()
