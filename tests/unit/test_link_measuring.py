"""Asking another node for links to measure: what it answers, and what people are told."""

from __future__ import annotations

import socket
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.errors import LinkRefused, MeshError, UsageError
from mesh_llm.peers.link_measuring import MeasuredLinks, figures
from mesh_llm.transport import link_meter
from mesh_llm.transport.link_meter import LinkMeter
from mesh_llm.types import Role

TWO: Any = SimpleNamespace(id="22", facts=SimpleNamespace(name="two", role=Role.NODE, machine="desk"))
MESH: Any = SimpleNamespace(
    me="11",
    facts=SimpleNamespace(role=Role.NODE, machine="desk"),
    alive=lambda: [TWO],
    member=lambda _: TWO,
    name_of=lambda _: "two",
)


class Links:
    """Refuses as often as it is told to, then opens a link to this process."""

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)

    async def link_of(self, node: str, purpose: dict[str, Any], kind: str) -> socket.socket:
        if self.refusals:
            raise LinkRefused(self.refusals.pop(0))
        near, far = socket.socketpair()
        await answering.receive(TWO.id, purpose, far)
        return near


async def nobody(*_: object) -> None:
    raise LinkRefused("not for this purpose")


answering = MeasuredLinks(MESH, otherwise=nobody)


async def measure(links: Links, **asked: Any) -> dict[str, Any]:
    given: Any = links
    return await MeasuredLinks(MESH, otherwise=nobody).measure(given, {"node": "two", **asked})


async def test_a_node_that_is_busy_is_asked_again() -> None:
    busy = "the other node's links are being measured already; try again in half a minute"
    found = await measure(Links(busy, busy), kind="local", size=64)
    assert found["size"] == 64
    assert min(found["idle_s"] + found["busy_s"] + found["bytes_s"]) > 0


async def test_an_older_node_is_named() -> None:
    with pytest.raises(LinkRefused, match="two is too old to be measured"):
        await measure(Links("this link does not exist"), kind="quic", size=64)


async def test_what_cannot_be_measured_is_told() -> None:
    for asked in ({"kind": "post"}, {"kind": "quic"}, {"kind": "quic", "size": 1 << 30}):
        with pytest.raises(UsageError):
            await measure(Links(), **asked)
    with pytest.raises(MeshError, match="no other members are called 'three'"):
        await measure(Links(), node="three")


def test_a_link_is_given_up_when_its_time_is_over() -> None:
    near, far = socket.socketpair()
    with near:
        link_meter.answer(far, within_s=0.0)
        assert near.recv(1) == b""
    near, far = socket.socketpair()
    with far, LinkMeter(near, within_s=0.0) as meter, pytest.raises(MeshError, match="took more than 0 s"):
        figures(meter, meter, 64)


@pytest.mark.parametrize("what", [1, 2])
def test_messages_of_no_bytes_end_the_link(what: int) -> None:
    """They use up nothing of what a link may carry, and four billion of them take half an hour."""
    near, far = socket.socketpair()
    with near:
        near.sendall(struct.pack("!BII", what, 0, (1 << 32) - 1))
        answering = threading.Thread(target=link_meter.answer, args=(far,), daemon=True)
        answering.start()
        near.settimeout(10)
        assert near.recv(1) == b""
        answering.join(10)
    assert not answering.is_alive()
