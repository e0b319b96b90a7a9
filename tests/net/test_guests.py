"""Other nodes' gateways at an engine: real streams, real sockets, and a queue between them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest

from mesh_llm.defaults import GUEST_HELD_BYTES
from mesh_llm.gateway.turns import Turns
from mesh_llm.gateway.upstream import Turn
from mesh_llm.node import guests
from mesh_llm.node.mesh import Mesh as NodeMesh
from mesh_llm.node.passage import Passage
from mesh_llm.transport.network import Peer, Stream
from mesh_llm.types import NodeId
from tests.support.members import Member, broken, mesh_of_members
from tests.support.raw_http import RawClient, request_bytes
from tests.support.upstream import WAIT_S, FakeEngine, Seen, Wire

HTTP = "hang"
"""The kind of the streams: one that members of these tests let in."""


class Ways:
    """What a passage needs of the node's mesh here: streams to the other one."""

    def __init__(self, me: Member) -> None:
        self._me = me

    async def open(self, node: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        assert kind == "http"
        return await self._me.network.peers[node].open(HTTP, header)


async def _unused(node: NodeId, purpose: dict[str, Any], link: socket.socket) -> None:
    raise AssertionError("no link was asked for")


class Host:
    """A node with an engine and its queue; `passage` is another node's way there."""

    def __init__(self, engine: FakeEngine, turns: Turns, me: Member, other: Member) -> None:
        self.engine = engine
        self.turns = turns
        self.id, self.guest = me.id, other
        self.port: int | None = engine.port
        self.headers: list[dict[str, Any]] = []
        self.here = Passage(cast(NodeMesh, Ways(me)), receive=_unused, turns=turns, bind_ip=None)
        self.passage = Passage(cast(NodeMesh, Ways(other)), receive=_unused, turns=Turns(1), bind_ip=None)
        me.handler.on_stream = self._serve  # type: ignore[method-assign]

    async def _serve(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        self.headers.append(header)
        await self.here.serve_http(peer.id, header, stream, lambda: self.port)

    async def until(self, *, taken: int | None = None, waiting: int | None = None) -> None:
        async with asyncio.timeout(WAIT_S):
            while (taken not in (None, self.turns.taken)) or (waiting not in (None, self.turns.waiting)):
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def connect(self, client: str | None, **more: Any) -> AsyncIterator[RawClient]:
        turn = None if client is None else Turn(client=client, **more)
        link = await self.passage.http(self.host_id, 1, turn)
        reader, writer = await asyncio.open_connection(sock=link)
        try:
            yield RawClient(reader=reader, writer=writer)
        finally:
            writer.transport.abort()

    @property
    def host_id(self) -> NodeId:
        return self.id


@pytest.fixture
def turns() -> Turns:
    return Turns(1, limit=3, per_client=2)


@pytest.fixture
async def host(engine: FakeEngine, turns: Turns) -> AsyncIterator[Host]:
    async with mesh_of_members() as mesh:
        first, second = await mesh.pair()
        host = Host(engine, turns, first, second)
        try:
            yield host
        finally:
            await host.passage.close()
            await host.until(taken=0, waiting=0)


async def test_next_when_the_connection_before_has_ended(host: Host) -> None:
    body = random.Random(1).randbytes(100_000)
    async with host.connect("a") as first:
        assert (await first.request("GET", "/one")).status == 200
        async with host.connect("b") as second:
            await second.send(request_bytes("POST", "/two", body=body))
            await host.until(waiting=1)
            assert [seen.target for seen in host.engine.seen] == ["/one"]
            # Not when it is answered: such a connection is for one request.
            first.writer.transport.abort()
            answer = await second.answer()
            assert (answer.status, answer.json()["size"]) == (200, len(body))
            assert host.engine.seen[1].body == body
            assert (host.turns.taken, host.turns.waiting) == (1, 0)
    await host.until(taken=0)


@pytest.mark.parametrize("size", [GUEST_HELD_BYTES - 1000, GUEST_HELD_BYTES, 3_000_000])
async def test_long_requests_arrive_whole(host: Host, size: int) -> None:
    body = random.Random(size).randbytes(size)
    async with host.connect("a") as first, host.connect("b") as second:
        await host.until(taken=1, waiting=1)
        sending = asyncio.create_task(second.send(request_bytes("POST", "/two", body=body)))
        await asyncio.wait((sending,), timeout=0.1)
        first.writer.transport.abort()
        assert (await second.answer()).json()["size"] == size
        assert host.engine.seen[-1].body == body
        await sending


async def test_full(host: Host) -> None:
    async with host.connect("a"), host.connect("a"), host.connect("a"):
        await host.until(taken=1, waiting=2)
        async with host.connect("a") as refused:
            # A request that nobody reads must not stand in the way of the answer.
            await refused.send(request_bytes("POST", "/", body=bytes(100_000)))
            answer = await refused.answer()
            assert (answer.version, answer.status, answer.reason) == ("HTTP/1.1", 429, "Too Many Requests")
            assert answer.header("Connection") == ["close"]
            assert answer.header("Content-Type") == ["application/json; charset=utf-8"]
            assert answer.header("Retry-After") == ["10"]
            assert answer.json() == {
                "error": {
                    "message": "too many requests are waiting already; try again in 10 s",
                    "type": "rate_limit_error",
                    "code": "queue_full",
                }
            }
            assert await refused.end() == b""
        async with host.connect("b"):
            await host.until(waiting=3)
        await host.until(waiting=2)
    assert host.engine.seen == []


async def test_too_many_from_one_node(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "GUESTS_PER_NODE", 2)
    async with host.connect("a"), host.connect("b"):
        await host.until(taken=1, waiting=1)
        async with host.connect("c") as refused:
            assert (await refused.request("GET", "/")).status == 429
        async with host.connect(None) as refused:
            assert await refused.end() == b""
    assert host.engine.seen == []


@pytest.mark.parametrize("turns", [Turns(1, wait_s=0.05)])
async def test_late(host: Host, turns: Turns) -> None:
    async with host.connect("a"):
        await host.until(taken=1)
        async with host.connect("b") as late:
            answer = await late.request("GET", "/")
            assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_late")
            assert answer.header("Retry-After") == ["1"]
            await late.end()
        assert (turns.taken, turns.waiting) == (1, 0)


@pytest.mark.parametrize("body_bytes", [0, 100_000])
async def test_leaving_the_queue(host: Host, body_bytes: int) -> None:
    async with host.connect("a") as first:
        await host.until(taken=1)
        async with host.connect("b") as second:
            await second.send(request_bytes("POST", "/left", body=bytes(body_bytes)))
            await host.until(waiting=1)
        await host.until(waiting=0)
        assert host.turns.taken == 1
        async with host.connect("c") as third:
            await host.until(waiting=1)
            first.writer.transport.abort()
            assert (await third.request("GET", "/here")).status == 200
    assert [seen.target for seen in host.engine.seen] == ["/here"]


async def test_without_a_client_straight_through(host: Host) -> None:
    async with host.connect("a"), host.connect(None) as client:
        await host.until(taken=1)
        for _ in range(2):
            assert (await client.request("GET", "/v1/models")).status == 200
        assert (host.turns.taken, host.turns.waiting) == (1, 0)


async def test_resumed_first(host: Host) -> None:
    async with host.connect("a") as first, host.connect("b") as second:
        await host.until(taken=1, waiting=1)
        async with host.connect("c", resumed=True) as third:
            await host.until(waiting=2)
            await second.send(request_bytes("GET", "/second"))
            await third.send(request_bytes("GET", "/third"))
            first.writer.transport.abort()
            assert (await third.answer()).status == 200
            assert host.turns.waiting == 1
        assert (await second.answer()).status == 200
    assert [seen.target for seen in host.engine.seen] == ["/third", "/second"]


async def test_who_has_little_time_left_is_told_when_it_is_over(host: Host) -> None:
    """The queue alone would let it wait for minutes."""
    async with host.connect("a"):
        await host.until(taken=1)
        async with host.connect("b", resumed=True, within_s=0.05) as late:
            answer = await late.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_late")
        assert answer.json()["error"]["message"].startswith("the request has waited 0.05 s ")


async def test_engine_gone_when_the_turn_comes(host: Host) -> None:
    async with host.connect("a") as first, host.connect("b") as second:
        await host.until(taken=1, waiting=1)
        host.port = None
        first.writer.transport.abort()
        assert await second.end() == b""
    await host.until(taken=0)


async def test_gateway_leaves_in_the_middle_of_an_answer(host: Host) -> None:
    gone = asyncio.Event()

    async def endless(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await wire.send_chunk(b"token")
        await wire.gone()
        gone.set()
        wire.abort()

    host.engine.on("/endless", endless)
    async with host.connect("a") as client:
        await client.send(request_bytes("GET", "/endless"))
        await client.head()
        assert await client.chunk() == b"token"
    async with asyncio.timeout(WAIT_S):
        await gone.wait()
    await host.until(taken=0)


@pytest.mark.parametrize("turns", [Turns(1, per_client=2)])
async def test_names_of_its_own_find_no_more_room_than_their_client(host: Host, turns: Turns) -> None:
    async with AsyncExitStack() as stack:
        for number in range(3):
            await stack.enter_async_context(host.connect("10.0.0.7", name=f"number {number}"))
        await host.until(taken=1, waiting=2)
        refused = await stack.enter_async_context(host.connect("10.0.0.7", name="number 3"))
        assert (await refused.answer()).status == 429
        await stack.enter_async_context(host.connect("10.0.0.8"))
        await host.until(waiting=3)
    assert len({header["client"] for header in host.headers}) == 2
    assert "number" not in json.dumps(host.headers)


async def test_clients_are_told_apart_and_not_named(host: Host) -> None:
    async with host.connect("10.0.0.7"), host.connect("10.0.0.8"), host.connect("10.0.0.7"):
        await host.until(taken=1, waiting=2)
    names = [header["client"] for header in host.headers]
    assert len(set(names)) == 2
    assert all(len(name) == 32 for name in names)
    assert "10.0.0" not in json.dumps(host.headers)


@pytest.mark.parametrize(
    "header",
    [
        {"client": ""},
        {"client": "x" * 65},
        {"client": 5},
        {"client": "a", "resumed": "yes"},
        {"client": "a", "name": 5},
        {"client": "a", "name": "x" * 65},
        {"client": "a", "within_s": -1},
        {"client": "a", "within_s": "1"},
        {"client": "a", "within_s": True},
    ],
)
async def test_nonsense_is_refused(host: Host, header: dict[str, Any]) -> None:
    stream = await host.guest.network.peers[host.id].open(HTTP, {"epoch": 1, **header})
    assert await broken(stream) == "the other node refused the stream"
    assert (host.turns.taken, host.turns.waiting) == (0, 0)


@pytest.mark.parametrize("turns", [Turns(2)])
async def test_many_who_come_and_go(host: Host, turns: Turns) -> None:
    dice = random.Random(7)
    bodies = {number: dice.randbytes(dice.choice((10, 5_000, 200_000))) for number in range(60)}
    answered: set[int] = set()

    async def one(number: int, *, leaves_after_s: float | None) -> None:
        async with host.connect(f"client {number % 7}") as client:
            await client.send(request_bytes("POST", f"/{number}", body=bodies[number]))
            try:
                async with asyncio.timeout(leaves_after_s):
                    assert (await client.answer()).json()["size"] == len(bodies[number])
            except TimeoutError:
                return
            answered.add(number)

    leaving = {number: dice.uniform(0, 0.05) for number in bodies if dice.random() < 0.4}
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for number in bodies:
            group.create_task(one(number, leaves_after_s=leaving.get(number)))
    assert answered >= bodies.keys() - leaving.keys()
    for seen in host.engine.seen:
        assert seen.body == bodies[int(seen.target[1:])]
    await host.until(taken=0, waiting=0)
