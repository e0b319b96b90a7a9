"""A member that has its links measured, and does not stop, or asks for what nobody should hold."""

from __future__ import annotations

import struct

from mesh_llm.peers.link_measuring import LINKS_AT_ONCE
from mesh_llm.transport.link_meter import LINK_METER_BYTES, MESSAGE_LIMIT_BYTES
from tests.hostile.conftest import Villain
from tests.support.joining import Lab
from tests.support.waiting import until

LINK = {"way": "quic", "purpose": {"kind": "measure"}}
ECHO, SINK = 1, 2


def request(what: int, size: int, count: int) -> bytes:
    return struct.pack("!BII", what, size, count)


def test_so_many_links_at_once_and_no_more(nodes: Lab, villain: Villain) -> None:
    """Those that say nothing hold their places, for as long as one may; the next is told why not."""
    one = nodes.create("one")
    mallory = villain(one.token())
    held = [mallory.open("link", LINK) for _ in range(LINKS_AT_ONCE)]
    assert [link.document() for link in held] == [{"taken": True}] * LINKS_AT_ONCE
    refused = mallory.open("link", LINK).document()
    assert refused is not None
    assert "being measured already" in refused["refused"]
    held[0].write(request(ECHO, 5, 1) + b"token")
    assert held[0].some() == b"token"
    held[0].reset()

    def again() -> bool:
        return mallory.open("link", LINK).document() == {"taken": True}

    until(again, within_s=20, what="a place is free again")


def test_what_is_too_much_ends_the_link(nodes: Lab, villain: Villain) -> None:
    one = nodes.create("one")
    mallory = villain(one.token())
    for asked in (
        request(ECHO, MESSAGE_LIMIT_BYTES + 1, 1),
        request(SINK, MESSAGE_LIMIT_BYTES, LINK_METER_BYTES // MESSAGE_LIMIT_BYTES + 1),
        request(3, 5, 1),
        request(ECHO, 0, (1 << 32) - 1),
        b"\xff" * 9,
    ):
        link = mallory.open("link", LINK)
        assert link.document() == {"taken": True}
        link.write(asked)
        assert link.all() in (b"", None)
    assert one.status()["node"]["name"] == "one"
