"""Other nodes' gateways at an engine: real streams, real sockets, and the host's own gateway between them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import pytest

from mesh_llm.gateway import guests
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import SlotRequest
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.mesh import Mesh as NodeMesh
from mesh_llm.transport.network import Peer, Stream
from mesh_llm.types import NodeId
from tests.support.members import Member, broken, mesh_of_members
from tests.support.raw_http import RawClient, connect, request_bytes
from tests.support.series import Scrape
from tests.support.upstream import KEY, SSE_HEAD, WAIT_S, FakeEngine, FakeNode, Seen, Wire, plain, sends

HTTP = "hang"
"""The kind of the streams: one that members of these tests let in."""
PATH = "/v1/embeddings"
"""Makes the engine compute."""


class Paths:
    """What a passage needs of the node's mesh here: streams to the other one."""

    def __init__(self, me: Member) -> None:
        self._me = me

    async def open(self, node: NodeId, kind: str, header: dict[str, Any]) -> Stream:
        assert kind == "http"
        return await self._me.network.peers[node].open(HTTP, header)


async def _no_link(node: NodeId, purpose: dict[str, Any], link: socket.socket) -> None:
    raise AssertionError("no link was asked for")


async def _no_guest(link: socket.socket, guest: object) -> None:
    raise AssertionError("nobody was to come")


class Host:
    """A node with an engine, a gateway and its queue; `data_links` is another node's way there."""

    def __init__(
        self,
        engine: FakeEngine,
        node: FakeNode,
        gateway: Gateway,
        turns: SlotQueue,
        me: Member,
        other: Member,
    ) -> None:
        self.engine, self.node, self.gateway, self.turns = engine, node, gateway, turns
        self.id, self.guest = me.id, other
        self.headers: list[dict[str, Any]] = []
        self.streams = 0
        """That are served."""
        self.account = ""
        """Of the next stream; empty: its node's."""
        self.began: list[str] = []
        """Bodies of requests that the engine computes, in order."""
        self._may_end = asyncio.Semaphore(0)
        self.here = DataLinks(
            cast(NodeMesh, Paths(me)), receive=_no_link, answer=gateway.serve_guest, bind_ip=None
        )
        self.data_links = DataLinks(
            cast(NodeMesh, Paths(other)), receive=_no_link, answer=_no_guest, bind_ip=None
        )
        me.handler.on_stream = self._serve  # type: ignore[method-assign]
        engine.on(PATH, self._work)

    async def _serve(self, peer: Peer, kind: str, header: dict[str, Any], stream: Stream) -> None:
        self.headers.append(header)
        self.streams += 1
        try:
            await self.here.serve_http(self.account or peer.id, header, stream)
        finally:
            self.streams -= 1

    async def _work(self, seen: Seen, wire: Wire) -> None:
        """Until the test lets it finish."""
        self.began.append(seen.body[:100].decode("latin-1"))
        await self._may_end.acquire()
        await wire.send(plain(b"done " + seen.body[:100]))

    def finish(self, count: int = 1) -> None:
        for _ in range(count):
            self._may_end.release()

    async def until(self, *, taken: int | None = None, waiting: int | None = None) -> None:
        async with asyncio.timeout(WAIT_S):
            while (taken not in (None, self.turns.taken)) or (waiting not in (None, self.turns.waiting)):
                await asyncio.sleep(0.001)

    async def ended(self) -> None:
        """Everything of it."""
        self.finish(1000)
        async with asyncio.timeout(WAIT_S):
            while self.streams or self.engine.open:
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def connect(self, client: str | None, **more: Any) -> AsyncIterator[RawClient]:
        turn = None if client is None else SlotRequest(client=client, **more)
        link = await self.data_links.http(self.id, 1, turn)
        reader, writer = await asyncio.open_connection(sock=link)
        try:
            yield RawClient(reader=reader, writer=writer)
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def ask(self, client: str | None, body: bytes = b"x", **more: Any) -> AsyncIterator[RawClient]:
        """One that makes the engine compute, and has its turn or its place in the queue."""
        known = self.turns.taken + self.turns.waiting
        async with self.connect(client, **more) as guest:
            await guest.send(request_bytes("POST", PATH, body=body))
            async with asyncio.timeout(WAIT_S):
                while self.turns.taken + self.turns.waiting == known:
                    await asyncio.sleep(0.001)
            yield guest


@pytest.fixture
def turns() -> SlotQueue:
    return SlotQueue(1, limit=3, per_client=2)


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
async def host(engine: FakeEngine, node: FakeNode, turns: SlotQueue, limits: Limits) -> AsyncIterator[Host]:
    node.turns = turns
    gateway = Gateway(GatewayConfig(port=0, limits=limits), node)
    await gateway.start()
    async with mesh_of_members() as mesh:
        first, second = await mesh.pair()
        host = Host(engine, node, gateway, turns, first, second)
        try:
            yield host
        finally:
            await host.data_links.close()
            await host.until(taken=0, waiting=0)
            await gateway.stop()
            await host.ended()


# -- whose turn it is ---------------------------------------------------------------------------


async def test_next_when_the_answer_before_has_ended(host: Host) -> None:
    body = random.Random(1).randbytes(100_000)
    async with host.ask("a", b"one") as first, host.ask("b", body) as second:
        assert (host.turns.taken, host.turns.waiting) == (1, 1)
        host.finish()
        assert (await first.answer()).body == b"done one"
        # The first one's connection is still open: its turn is over all the same.
        host.finish()
        assert (await second.answer()).status == 200
        assert host.engine.seen[1].body == body
        await host.until(taken=0)


@pytest.mark.parametrize("turns", [SlotQueue(2)])
@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/embed", request_bytes("POST", PATH, "Content-Length: 9") + b"half"]
)
async def test_those_who_say_nothing_hold_no_turn(host: Host, turns: SlotQueue, begun: bytes) -> None:
    async with AsyncExitStack() as stack:
        for number in range(4):
            silent = await stack.enter_async_context(host.connect(f"silent {number}"))
            await silent.send(begun)
        async with host.ask("honest", b"hello") as honest:
            host.finish()
            assert (await honest.answer()).body == b"done hello"


async def test_without_a_client_it_waits_as_others_do(host: Host) -> None:
    async with host.ask("a", b"first"), host.ask(None, b"second") as nameless:
        assert (host.turns.taken, host.turns.waiting) == (1, 1)
        # What computes nothing is not asked to wait, and its connection is kept.
        async with host.connect(None) as client:
            for _ in range(2):
                assert (await client.request("GET", "/v1/models")).status == 200
        host.finish(2)
        assert (await nameless.answer()).body == b"done second"
    assert host.began == ["first", "second"]


async def test_whatever_it_says_what_computes_takes_a_turn(host: Host) -> None:
    """A connection without a turn, kept, and then used for something that needs one."""
    async with host.ask("a"), host.connect(None) as client:
        assert (await client.request("POST", "/tokenize", body=b"{}")).status == 200
        await client.send(request_bytes("POST", "/v1%2Fembeddings", body=b"second"))
        await host.until(waiting=1)
        host.finish(2)
        assert (await client.answer()).body == b"done second"


async def test_full(host: Host) -> None:
    async with host.ask("a"), host.ask("a"), host.ask("a"):
        await host.until(taken=1, waiting=2)
        async with host.connect("a") as refused:
            await refused.send(request_bytes("POST", PATH, body=bytes(100_000)))
            answer = await refused.answer()
            assert (answer.version, answer.status, answer.reason) == ("HTTP/1.1", 429, "Too Many Requests")
            assert answer.header("Retry-After") == ["10"]
            assert answer.json() == {
                "error": {
                    "message": "too many requests are waiting already; try again in 10 s",
                    "type": "rate_limit_error",
                    "code": "queue_full",
                }
            }
        async with host.ask("b"):
            await host.until(waiting=3)
        await host.until(waiting=2)
    assert len(host.engine.seen) == 1


@pytest.mark.parametrize("turns", [SlotQueue(1, per_account=2)])
async def test_one_account_does_not_fill_the_queue(host: Host, turns: SlotQueue) -> None:
    host.account = "client:one"
    async with host.ask("a"), host.ask("b"), host.ask("c"):
        async with host.connect("d") as refused:
            assert (await refused.request("POST", PATH, body=b"x")).status == 429
        host.account = "client:two"
        async with host.ask("d"), connect(host.gateway.port) as here:
            await here.send(request_bytes("POST", PATH, body=b"x"))
            await host.until(waiting=4)


@pytest.mark.parametrize("turns", [SlotQueue(1)])
async def test_fair_between_accounts_first(host: Host, turns: SlotQueue) -> None:
    """However many clients one node has, or invents."""
    async with AsyncExitStack() as stack:
        host.account = "client:many"
        for number in range(6):
            await stack.enter_async_context(host.ask(f"client {number}", b"many"))
        host.account = "client:one"
        await stack.enter_async_context(host.ask("single", b"one"))
        async with connect(host.gateway.port) as here:
            await here.send(request_bytes("POST", PATH, body=b"here"))
            await host.until(waiting=7)
            host.finish(8)
            await host.until(taken=0, waiting=0)
    assert host.began == ["many", "one", "here", *["many"] * 5]


async def test_tokenizing_takes_turns_of_its_own(host: Host) -> None:
    """It needs a processor and no slot: many do it one after another, and nobody who computes waits."""
    host.engine.on("/tokenize", host._work)
    host.engine.on("/v1/rerank", sends(plain(b"computed")))
    async with AsyncExitStack() as stack:
        host.account = "client:many"
        for number in range(4):
            many = await stack.enter_async_context(host.connect(f"client {number}"))
            await many.send(request_bytes("POST", "/tokenize", body=b"many"))
        async with asyncio.timeout(WAIT_S):
            while host.streams < 4:
                await asyncio.sleep(0.001)
        host.account = "client:one"
        one = await stack.enter_async_context(host.connect("single"))
        await one.send(request_bytes("POST", "/tokenize", body=b"one"))
        assert host.gateway._guests is not None
        async with asyncio.timeout(WAIT_S):
            while host.gateway._guests._tokenizing.waiting < 4 or not host.began:
                await asyncio.sleep(0.001)
        async with host.connect("other") as computes:
            assert (await computes.request("POST", "/v1/rerank", body=b"x")).body == b"computed"
        assert host.began == ["many"]
        host.finish(2)
        assert (await one.answer()).body == b"done one"
        assert host.began[:2] == ["many", "one"]


@pytest.mark.parametrize("turns", [SlotQueue(1, wait_s=0.05)])
async def test_late(host: Host, turns: SlotQueue) -> None:
    async with host.ask("a"):
        async with host.connect("b") as late:
            answer = await late.request("POST", PATH, body=b"x")
            assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_late")
            assert answer.header("Retry-After") == ["1"]
        assert (turns.taken, turns.waiting) == (1, 0)


@pytest.mark.parametrize("body_bytes", [1, 100_000])
async def test_leaving_the_queue(host: Host, body_bytes: int) -> None:
    async with host.ask("a") as first:
        async with host.ask("b", bytes(body_bytes)):
            assert host.turns.waiting == 1
        await host.until(waiting=0)
        assert host.turns.taken == 1
        async with host.ask("c", b"here") as third:
            first.writer.transport.abort()
            host.finish(2)
            assert (await third.answer()).status == 200
    assert host.began == ["x", "here"]


async def test_resumed_first(host: Host) -> None:
    async with host.ask("a", b"first"), host.ask("b", b"second"), host.ask("c", b"third", resumed=True):
        assert host.turns.waiting == 2
        host.finish(3)
        await host.until(taken=0, waiting=0)
    assert host.began == ["first", "third", "second"]


async def test_who_has_little_time_left_is_told_when_it_is_over(host: Host) -> None:
    """The queue alone would let it wait for minutes."""
    async with host.ask("a"), host.connect("b", resumed=True, within_s=0.05) as late:
        answer = await late.request("POST", PATH, body=b"x")
        assert (answer.status, answer.json()["error"]["code"]) == (503, "queue_late")
        assert answer.json()["error"]["message"].startswith("the request has waited 0.05 s ")


@pytest.mark.parametrize("turns", [SlotQueue(1, per_client=2)])
async def test_names_of_its_own_find_no_more_room_than_their_client(host: Host, turns: SlotQueue) -> None:
    async with AsyncExitStack() as stack:
        for number in range(3):
            await stack.enter_async_context(host.ask("10.0.0.7", name=f"number {number}"))
        refused = await stack.enter_async_context(host.connect("10.0.0.7", name="number 3"))
        assert (await refused.request("POST", PATH, body=b"x")).status == 429
        await stack.enter_async_context(host.ask("10.0.0.8"))
        assert host.turns.waiting == 3
    assert len({header["client"] for header in host.headers}) == 2
    assert "number" not in json.dumps(host.headers)


async def test_clients_are_told_apart_and_not_named(host: Host) -> None:
    async with host.ask("10.0.0.7"), host.ask("10.0.0.8"), host.ask("10.0.0.7"):
        pass
    names = [header["client"] for header in host.headers]
    assert len(set(names)) == 2
    assert all(len(name) == 32 for name in names)
    assert "10.0.0" not in json.dumps(host.headers)


# -- what reaches the engine, and what comes back -----------------------------------------------


async def test_the_key_stays_here_and_other_headers_there(host: Host) -> None:
    async with host.connect("a") as client:
        answer = await client.request(
            "POST",
            "/tokenize?a=1",
            "Authorization: Bearer guess",
            "X-Conversation-Id: mine",
            "Cookie: a=1",
            "Content-Type: application/json",
            body=b"{}",
        )
    assert answer.status == 200
    [seen] = host.engine.seen
    assert seen.target == "/tokenize?a=1"
    assert sorted(seen.headers) == [
        ("Authorization", f"Bearer {KEY}"),
        ("Content-Length", "2"),
        ("Content-Type", "application/json"),
        ("Host", f"127.0.0.1:{host.engine.port}"),
    ]


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("GET", "/v1/stream?conv_id=x", 400, "not_offered"),
        ("POST", "/slots/0?action=erase", 400, "not_offered"),
        ("POST", "/props", 400, "not_offered"),
        ("GET", "/", 404, "not_found"),
        ("DELETE", PATH, 404, "not_found"),
    ],
)
async def test_routes_that_are_not_offered(
    host: Host, method: str, target: str, status: int, code: str
) -> None:
    async with host.connect("a") as client:
        answer = await client.request(method, target)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert host.engine.seen == []


async def test_the_engines_own_series(host: Host) -> None:
    """Another node's gateway adds them to its own."""
    async with host.connect(None) as client:
        assert (await client.request("GET", "/metrics")).json()["target"] == "/metrics"


async def test_paths_of_the_hosts_disk_stay_there(host: Host) -> None:
    async def props(_: Seen, wire: Wire) -> None:
        facts = {"model_alias": "tiny", "model_path": "/home/ann/tiny.gguf", "total_slots": 1}
        await wire.send(plain(json.dumps(facts).encode(), b"Content-Type: application/json"))

    async def adapters(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b'[{"id":0,"path":"/home/ann/style.gguf","scale":1.0}]'))

    async def slots(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b'[{"id":0,"prompt":"secret","generated":"secret","is_processing":true}]'))

    host.engine.on("/props", props)
    host.engine.on("/lora-adapters", adapters)
    host.engine.on("/slots", slots)
    async with host.connect(None) as guest, connect(host.gateway.port) as here:
        for client in (guest, here):
            assert (await client.request("GET", "/props")).json() == {
                "model_alias": "tiny",
                "model_path": "tiny",
                "total_slots": 1,
            }
            assert (await client.request("GET", "/lora-adapters")).json() == [
                {"id": 0, "path": "style.gguf", "scale": 1.0}
            ]
            assert (await client.request("GET", "/slots")).json() == [{"id": 0, "is_processing": True}]


@pytest.mark.parametrize("size", [0, 200_000, 3_000_000])
async def test_long_requests_arrive_whole(host: Host, size: int) -> None:
    body = random.Random(size).randbytes(size)
    host.finish(2)
    async with host.connect("a") as client:
        await client.request("POST", PATH, "Content-Length: 0" if not body else "X: 1", body=body)
    assert host.engine.seen[-1].body == body


async def test_a_body_without_a_length(host: Host) -> None:
    host.finish()
    async with host.connect("a") as client:
        await client.send(request_bytes("POST", PATH, "Transfer-Encoding: chunked"))
        await client.send(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert (await client.answer()).body == b"done abcde"
    assert host.engine.seen[0].header("Content-Length") == ["5"]


@pytest.mark.parametrize("limits", [Limits(body_bytes=1 << 20)])
async def test_a_body_that_is_too_large(host: Host) -> None:
    async with host.connect("a") as client:
        await client.send(request_bytes("POST", PATH, f"Content-Length: {(1 << 20) + 1}"))
        assert (await client.answer()).status == 413
    assert host.engine.seen == []


async def test_what_is_tokenized_may_be_less(host: Host) -> None:
    async with host.connect("a") as client:
        await client.send(request_bytes("POST", "/tokenize", "Content-Length: 16777217"))
        assert (await client.answer()).status == 413
    assert host.engine.seen == []


async def test_bodies_that_are_kept_are_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "GUEST_KEPT_PER_ACCOUNT_BYTES", 100_000)
    async with host.ask("a", bytes(60_000)) as first:
        async with host.connect("b") as second:
            assert (await second.request("POST", PATH, body=bytes(60_000))).status == 429
        host.account = "client:other"
        async with host.ask("c", bytes(60_000)):
            pass
        host.finish(2)
        await first.answer()
    await host.until(taken=0, waiting=0)
    async with host.ask("a", bytes(60_000)):
        pass


@pytest.mark.parametrize("limits", [Limits(silence_s=0.2)])
async def test_a_body_that_does_not_come(host: Host) -> None:
    async with host.connect("a") as client:
        await client.send(request_bytes("POST", PATH, "Content-Length: 9") + b"half")
        answer = await client.answer()
    assert (answer.status, answer.json()["error"]["code"]) == (408, "body_late")


async def test_a_request_that_does_not_come(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.node.turns = host.turns
    gateway = Gateway(GatewayConfig(port=0), host.node)
    monkeypatch.setattr(guests, "GUEST_IDLE_S", 0.2)
    await gateway.start()
    host.here._answer = gateway.serve_guest
    async with host.connect("a") as client:
        assert await client.end() == b""
    await gateway.stop()


# -- how it ends --------------------------------------------------------------------------------


async def test_too_many_from_one_account(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.node.turns = host.turns
    gateway = Gateway(GatewayConfig(port=0, limits=Limits(connections_per_account=2)), host.node)
    await gateway.start()
    host.here._answer = gateway.serve_guest
    async with host.ask("a"), host.ask("b"):
        async with host.connect("c") as refused:
            assert (await refused.answer()).status == 429
        host.account = "client:other"
        async with host.connect("c") as client:
            assert (await client.request("GET", "/v1/models")).status == 200
    await host.until(taken=0, waiting=0)
    await gateway.stop()


async def test_engine_gone_when_the_turn_comes(host: Host) -> None:
    async with host.ask("a"), host.ask("b") as second:
        assert host.turns.waiting == 1
        host.node.where = None
        host.finish()
        assert await second.end() == b""
    await host.until(taken=0)


@pytest.mark.parametrize("left", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
async def test_engine_dies_before_it_answers(host: Host, left: bytes) -> None:
    async def dies(_: Seen, wire: Wire) -> None:
        await wire.send(left)
        wire.writer.close()

    host.engine.on("/tokenize", dies)
    async with host.connect("a") as client:
        await client.send(request_bytes("POST", "/tokenize", body=b"{}"))
        # No words of ours: the other gateway takes it for what it is, and asks elsewhere.
        with suppress(ConnectionResetError):
            assert await client.end() == b""


async def test_engine_dies_in_the_middle_of_a_stream(host: Host) -> None:
    async def dies(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b"data: one\n\n")
        wire.abort()

    host.engine.on("/tokenize", dies)
    async with host.connect("a") as client:
        answer = await client.request("POST", "/tokenize", body=b"{}")
    assert (answer.status, answer.whole) == (200, False)
    assert answer.body in (b"data: one\n\n", b"")


async def test_gateway_leaves_in_the_middle_of_an_answer(host: Host) -> None:
    gone = asyncio.Event()

    async def endless(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await wire.send_chunk(b"token")
        await wire.gone()
        gone.set()
        wire.abort()

    host.engine.on(PATH, endless)
    async with host.ask("a") as client:
        await client.head()
        assert await client.chunk() == b"token"
    async with asyncio.timeout(WAIT_S):
        await gone.wait()
    await host.until(taken=0)


async def test_who_does_not_read_loses_its_turn(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "GUEST_STUCK_S", 0.3)

    async def endless(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await wire.send_chunk(bytes(1 << 16))

    host.engine.on(PATH, endless)
    async with host.ask("a") as client:
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await host.until(taken=0)


@pytest.mark.parametrize(
    "header",
    [
        {"client": "x" * 65},
        {"client": 5},
        {"client": None},
        {"client": "a", "resumed": "yes"},
        {"client": "a", "name": 5},
        {"client": "a", "name": "x" * 65},
        {"client": "a", "within_s": -1},
        {"client": "a", "within_s": "1"},
        {"client": "a", "within_s": True},
        {"epoch": "1"},
        {"epoch": True},
    ],
)
async def test_nonsense_is_refused(host: Host, header: dict[str, Any]) -> None:
    stream = await host.guest.network.peers[host.id].open(HTTP, {"epoch": 1, **header})
    assert await broken(stream) == "the other node refused the stream"
    assert (host.turns.taken, host.turns.waiting) == (0, 0)


async def test_they_are_counted_apart(host: Host) -> None:
    async with host.connect("a") as client:
        await client.request("GET", "/v1/models")
        await client.request("GET", "/nothing")
    async with connect(host.gateway.port) as here:
        seen = Scrape((await here.request("GET", "/metrics")).body.partition(b'{"connection"')[0])
    assert seen.value("mesh_llm_gateway_guest_requests_total", status="200") == 1
    assert seen.value("mesh_llm_gateway_guest_requests_total", status="404") == 1


@pytest.mark.parametrize("turns", [SlotQueue(2)])
async def test_many_who_come_and_go(host: Host, turns: SlotQueue) -> None:
    dice = random.Random(7)
    bodies = {number: dice.randbytes(dice.choice((10, 5_000, 200_000))) for number in range(60)}
    answered: set[int] = set()
    host.finish(len(bodies))

    async def one(number: int, *, leaves_after_s: float | None) -> None:
        async with host.connect(f"client {number % 7}") as client:
            await client.send(request_bytes("POST", f"{PATH}?{number}", body=bodies[number]))
            try:
                async with asyncio.timeout(leaves_after_s):
                    assert (await client.answer()).status == 200
            except TimeoutError:
                return
            answered.add(number)

    leaving = {number: dice.uniform(0, 0.05) for number in bodies if dice.random() < 0.4}
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for number in bodies:
            group.create_task(one(number, leaves_after_s=leaving.get(number)))
    assert answered >= bodies.keys() - leaving.keys()
    for seen in host.engine.seen:
        assert seen.body == bodies[int(seen.target.partition("?")[2])]
    await host.until(taken=0, waiting=0)
