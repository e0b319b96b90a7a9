"""What a client's token is good for: asking. It is handed out lightly.

That it holds no slot without asking, and learns no key and no path, is in tests/mesh/test_guests.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from mesh_llm.errors import JoinRefused, MeshError
from mesh_llm.types import NodeId
from tests.hostile.adversary import Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import QUICK_S, address_of, id_of, restarted, serves, settings_kept, soon
from tests.support.background import Background
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, Lab, names_of, said
from tests.support.node import ENDLESS
from tests.support.raw_http import request_bytes

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


@pytest.mark.full
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


@pytest.mark.full
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
    assert "that its own node did not sign" in other.refusal()

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


def test_a_client_changes_nothing(nodes: Lab, villain: Villain) -> None:
    """Nor does what it has signed, in the hands of a member."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    before, two_id = settings_kept(one), id_of(two)
    client, bad = villain(one.token(role="client"), name="client"), villain(one.token())
    bad.connect(two_id, address_of(two))
    [invite] = bad.invites_of(two_id)
    theirs = client.record_of(two_id)
    settings = client.settings_of_creator() | {"version": 1000, "alias": "mine"}
    claims = [client.settings_claim(settings), client.claims(revocations=[client.revoked(invite)])]
    gone = [
        theirs | {"is": "dead"},
        client.hint(two_id, "dead", incarnation=theirs["i"], sequence=theirs["s"]),
    ]

    assert client.said(*claims, client.update(*gone), client.promotion(client.credential)), client.refusal()
    for claim in claims:
        assert not bad.said(claim), "it may stay, although it brings what only it can have made up"
        bad.connect(bad.inviter, address_of(one))
    for kind in ("lease", "link", "file", "introduce", "forwarded"):
        assert client.open(kind, {}).document() is None, f"a client may open {kind}"

    assert settings_kept(one) == before
    assert {"one", "two"} <= set(names_of(one.status()))
    assert serves(two) == serves(one)


def test_a_client_does_not_outlive_its_revocation(nodes: Lab, villain: Villain) -> None:
    """The answer under way ends, at the one who let it in and at another one; no more are given."""
    one = nodes.create("one", "--ctx-size", "8192")
    two = nodes.join("two", one)
    two.until_nodes("one", "two")
    invite = one.invite(role="client")
    client = villain(invite["token"])
    client.connect(id_of(two), address_of(two))
    epoch = one.until_state("serving")["plan"]["epoch"]
    host = NodeId(one.status()["plan"]["host"])
    body = json.dumps(ENDLESS).encode()
    answer = client.open("http", client.to_http(epoch), to=host)
    answer.write(request_bytes("POST", "/v1/completions", body=body))
    assert answer.some().startswith(b"HTTP/1.1 200 OK")

    said(mesh_llm("invite", "revoke", invite["id"], "--home", one.home, "--json"))

    assert answer.all(within_s=QUICK_S) is None, "the answer came to its end"
    one.until(lambda: not client.connected, what="it is out everywhere", within_s=QUICK_S)
    for node in (one, two):
        with pytest.raises(MeshError):
            client.connect(id_of(node), address_of(node))
    with pytest.raises(JoinRefused):
        client.join(invite["token"], timeout_s=5.0)
    assert serves(two) == serves(one)
