"""A gateway whose engine has one slot: who gets it, who waits, who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from tests.support.raw_http import Answer, RawClient, connect, request_bytes
from tests.support.series import Scrape
from tests.support.upstream import WAIT_S, FakeEngine, FakeNode, Seen, Wire, plain

PATH = "/v1/embeddings"
"""Makes the engine compute, and is passed on as it is."""
Ask = Callable[[str], Awaitable[RawClient]]


class Slot:
    """The engine works on one request until the test lets it finish; `began` is who came, in order."""

    def __init__(self, engine: FakeEngine) -> None:
        self.began: list[str] = []
        self._may_end = asyncio.Semaphore(0)
        engine.on(PATH, self._work)

    async def _work(self, seen: Seen, wire: Wire) -> None:
        self.began.append(seen.body.decode())
        await self._may_end.acquire()
        await wire.send(plain(b"done " + seen.body))

    def finish(self, count: int = 1) -> None:
        for _ in range(count):
            self._may_end.release()


@pytest.fixture
def turns() -> SlotQueue:
    return SlotQueue(1, limit=8, per_client=6)


@pytest.fixture
async def gateway(node: FakeNode, turns: SlotQueue) -> AsyncIterator[Gateway]:
    node.turns = turns
    gateway = Gateway(GatewayConfig(port=0), node)
    turns.on_wait = gateway.on_wait
    await gateway.start()
    yield gateway
    await gateway.stop()
    assert (turns.taken, turns.waiting) == (0, 0)


@pytest.fixture
def slot(engine: FakeEngine) -> Slot:
    return Slot(engine)


@pytest.fixture
async def send(gateway: Gateway) -> AsyncIterator[Ask]:
    """Sends a request: `client.number`, or `client.name.number` where the client uses names of its own."""
    async with AsyncExitStack() as stack:

        async def one(name: str) -> RawClient:
            client = await stack.enter_async_context(connect(gateway.port))
            who, *own = name.split(".")[:-1]
            headers = [f"User-Agent: {who}", *(f"x-mesh-llm-client: {one}" for one in own)]
            await client.send(request_bytes("POST", PATH, *headers, body=name.encode()))
            return client

        yield one


@pytest.fixture
def ask(send: Ask, turns: SlotQueue) -> Ask:
    """The same, and it has its turn, or its place in the queue."""

    async def one(name: str) -> RawClient:
        known = turns.taken + turns.waiting
        client = await send(name)
        await until(lambda: turns.taken + turns.waiting == known + 1)
        return client

    return one


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def body_of(client: RawClient) -> str:
    answer = await client.answer()
    assert answer.status == 200
    return answer.body.decode()


async def test_one_after_the_other_and_fair(
    ask: Ask, slot: Slot, gateway: Gateway, engine: FakeEngine
) -> None:
    heavy = [await ask(f"heavy.{number}") for number in range(5)]
    light = await ask("light.0")
    await until(lambda: slot.began)
    assert slot.began == ["heavy.0"]
    slot.finish()
    assert await body_of(heavy[0]) == "done heavy.0"
    await until(lambda: len(slot.began) == 2)
    slot.finish(5)
    assert await body_of(light) == "done light.0"
    assert [await body_of(client) for client in heavy[1:]] == [f"done heavy.{n}" for n in range(1, 5)]
    assert slot.began == ["heavy.0", "light.0", "heavy.1", "heavy.2", "heavy.3", "heavy.4"]

    async def nothing(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b""))

    engine.on("/metrics", nothing)
    async with connect(gateway.port) as client:
        seen = Scrape((await client.request("GET", "/metrics")).body)
    assert seen.value("mesh_llm_gateway_queue_seconds_count") == 6


async def test_refused_when_full(ask: Ask, send: Ask, slot: Slot, turns: SlotQueue, gateway: Gateway) -> None:
    for number in range(7):
        await ask(f"heavy.{number}")
    assert (turns.taken, turns.waiting) == (1, 6)
    refused: Answer = await (await send("heavy.7")).answer()
    assert (refused.status, refused.reason) == (429, "Too Many Requests")
    assert refused.header("Retry-After") == ["30"]
    assert refused.json() == {
        "error": {
            "message": "too many requests are waiting already; try again in 30 s",
            "type": "rate_limit_error",
            "code": "queue_full",
        }
    }
    # Another client still finds room, and what computes nothing is not asked to wait.
    await ask("light.0")
    assert turns.waiting == 7
    async with connect(gateway.port) as other:
        assert (await other.request("GET", "/v1/models")).status == 200
    slot.finish(8)
    await until(lambda: turns.taken == 0)


async def test_names_of_its_own_buy_a_client_nothing(
    ask: Ask, send: Ask, slot: Slot, turns: SlotQueue
) -> None:
    for number in range(7):
        await ask(f"many.name{number}.0")
    refused = await (await send("many.another.0")).answer()
    assert refused.status == 429
    await ask("one.0")
    slot.finish(8)
    await until(lambda: turns.taken == 0)
    assert slot.began[:3] == ["many.name0.0", "one.0", "many.name1.0"]


async def test_leaving_gives_the_place_back(ask: Ask, slot: Slot, turns: SlotQueue) -> None:
    first, second, third = await ask("a.0"), await ask("b.0"), await ask("c.0")
    second.writer.transport.abort()
    await until(lambda: turns.waiting == 1)
    first.writer.transport.abort()
    await until(lambda: slot.began == ["a.0", "c.0"])
    # The engine's fake works on for the first one; the real one stops.
    slot.finish(2)
    assert await body_of(third) == "done c.0"


@pytest.mark.parametrize("turns", [SlotQueue(1, wait_s=0.05)])
async def test_late(ask: Ask, send: Ask, slot: Slot, turns: SlotQueue) -> None:
    first = await ask("a.0")
    late = await (await send("b.0")).answer()
    assert (late.status, late.json()["error"]["code"]) == (503, "queue_late")
    assert late.header("Retry-After") == ["1"]
    slot.finish()
    assert await body_of(first) == "done a.0"


async def test_a_large_body_that_stops_coming_gives_its_turn_back(
    node: FakeNode, turns: SlotQueue, slot: Slot
) -> None:
    """It is too large to be read before its turn."""
    limits = Limits(replay_bytes=1000, upload_late_s=0.3)
    node.turns = turns
    gateway = Gateway(GatewayConfig(port=0, limits=limits), node)
    await gateway.start()
    async with connect(gateway.port) as silent, connect(gateway.port) as honest:
        await silent.send(request_bytes("POST", PATH, "Content-Length: 5000") + b"half")
        await until(lambda: turns.taken == 1)
        await honest.send(request_bytes("POST", PATH, body=b"hello"))
        await until(lambda: slot.began == ["hello"])
        answer = await silent.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (408, "body_late")
        slot.finish()
        assert await body_of(honest) == "done hello"
    await gateway.stop()
