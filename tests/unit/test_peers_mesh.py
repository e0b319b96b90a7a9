"""What a node does when another one, through which it speaks or of which it speaks, lets it down."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.errors import MeshError, NodeUnreachable, PeerLost
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.members import Members
from mesh_llm.peers.mesh import Mesh
from mesh_llm.transport.network import Stream
from mesh_llm.types import NodeFacts, NodeId, Role, State
from tests.support.planning import node, settings

ANN, BEN, CLEO, DAN = (NodeId(letter * 64) for letter in "abcd")


def a_mesh(helpers: dict[NodeId, Any]) -> Mesh:
    """In which DAN is reached through helpers alone; each answers with what it has, or raises it."""
    facts = NodeFacts(name="ann", role=Role.NODE, version="1")
    mesh: Any = Mesh(ANN, facts, incarnation=1, on_change=lambda: None, on_refused=lambda *_: None)

    async def through(helper: Any, _node: NodeId, _kind: str, _header: object) -> Any:
        answer = helpers[helper.id]
        if isinstance(answer, Exception):
            raise answer
        return answer

    mesh.peer = lambda id: SimpleNamespace(id=id) if id in helpers else None
    mesh.paths = SimpleNamespace(between=lambda _: tuple(helpers))
    mesh._forwarding = SimpleNamespace(open=through)
    return cast(Mesh, mesh)


async def test_a_stream_goes_through_the_next_helper_where_the_first_fails() -> None:
    helpers = {BEN: NodeUnreachable("dan does not answer through ben"), CLEO: "a stream"}
    found: Any = await a_mesh(helpers).open(DAN, "http", {})
    assert found == "a stream"


async def test_the_last_helper_says_why_there_is_no_way() -> None:
    helpers = {BEN: NodeUnreachable("dan does not answer through ben"), CLEO: PeerLost("cleo went")}
    with pytest.raises(MeshError, match="cleo went"):
        await a_mesh(helpers).open(DAN, "http", {})
    with pytest.raises(NodeUnreachable, match="there is no path"):
        await a_mesh({}).open(DAN, "http", {})


@pytest.mark.parametrize(
    ("other", "quoted"),
    [
        (node("ben", state=State.WAITING, reason="need 28 GB"), "need 28 GB"),
        (node("ben", state=State.WAITING, reason="need 28 GB", models=()), ""),
        (node("ben", state=State.WAITING, reason="send me money", role=Role.CLIENT, models=()), ""),
        (node("ben", state=State.SERVING, reason=""), ""),
    ],
    ids=["has the model", "quotes others itself", "a lite client", "serves"],
)
def test_only_who_has_the_model_says_why_it_does_not_serve(other: Any, quoted: str) -> None:
    members: Any = SimpleNamespace(me=ANN, alive=lambda: [other], settings=settings)
    assert Members.others_reason(members) == quoted


@pytest.mark.parametrize("has_come", [False, True])
async def test_a_link_that_is_given_up_keeps_no_place(has_come: bool) -> None:
    arriving: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    here, there = socket.socketpair()
    here.settimeout(5)

    class Broken:
        async def write_document(self, _: object) -> None:
            if has_come:
                arriving.set_result(there)
            raise PeerLost("the stream broke")

    links: Any = SimpleNamespace(
        door=SimpleNamespace(expect=lambda _: arriving), _plain_port=lambda _: None, _receive=None
    )
    header = {"way": "local", "ticket": "00" * 32}
    with here, suppress(PeerLost):
        await DataLinks._serve_door(links, BEN, {}, header, cast(Stream, Broken()))
    assert arriving.done()
    if has_come:
        assert there.fileno() == -1
    else:
        assert arriving.cancelled()
        there.close()
