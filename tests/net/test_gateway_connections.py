"""How many connections a gateway takes, and for how long it waits for what they have to say."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress

import pytest

from mesh_llm.gateway.client_connection import GATEWAY_HEAD_LIMIT_BYTES, GATEWAY_LINGER_S, GATEWAY_TURNED_AWAY
from mesh_llm.gateway.limits import GATEWAY_CONNECTIONS, Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Upstream
from tests.support.raw_http import Answer, RawClient, connect, request_bytes
from tests.support.upstream import SSE_HEAD, WAIT_S, FakeEngine, FakeNode, Seen, Wire

StartGateway = Callable[[GatewayConfig], Awaitable[Gateway]]
Open = Callable[[], Awaitable[RawClient]]

CROWDED = {
    "error": {
        "message": "too many connections are open already",
        "type": "unavailable_error",
        "code": "too_many_connections",
    }
}


SHORT = Limits(head_s=0.2)
"""For heads that do not come; those that come may take their time on a busy machine."""


@pytest.fixture
def limits() -> Limits:
    return Limits(connections=4, idle_connections=3, head_s=2 * WAIT_S)


@pytest.fixture
async def gateway(start_gateway: StartGateway, limits: Limits) -> Gateway:
    return await start_gateway(GatewayConfig(port=0, limits=limits))


@pytest.fixture
async def another(gateway: Gateway) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def open_one() -> RawClient:
            return await stack.enter_async_context(connect(gateway.port))

        yield open_one


async def busy(open_one: Open, engine: FakeEngine) -> RawClient:
    """Asks for an answer that goes on until the client leaves."""

    async def endless(seen: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b": on\n\n")
        await wire.gone()

    engine.on("/v1/models", endless)
    client = await open_one()
    await client.send(request_bytes("GET", "/v1/models"))
    assert (await client.head()).status == 200
    return client


async def closed(client: RawClient) -> None:
    """Without another word."""
    with suppress(ConnectionResetError):
        assert await client.end() == b""


async def one_more(open_one: Open) -> Answer:
    """What the next connection gets to hear, unasked; its request must not undo it."""
    client = await open_one()
    await client.send(request_bytes("POST", "/tokenize", "Connection: close", body=bytes(10_000)))
    answer = await client.answer()
    await closed(client)
    return answer


async def test_beyond_the_limit_503(another: Open, engine: FakeEngine) -> None:
    clients = [await busy(another, engine) for _ in range(4)]
    for _ in range(3):
        answer = await one_more(another)
        assert (answer.status, answer.json()) == (503, CROWDED)
        assert answer.header("Connection") == ["close"]
        assert answer.header("Retry-After") == ["1"]
    # Those before are not disturbed, and a place that is given back can be had.
    assert all(not client.reader.at_eof() for client in clients)
    clients[2].writer.transport.abort()
    async with asyncio.timeout(WAIT_S):
        while (await one_more(another)).status == 503:
            pass
    assert [seen.target for seen in engine.seen].count("/tokenize") == 1


async def test_idle_ones_make_room(another: Open, engine: FakeEngine) -> None:
    for _ in range(2):
        await busy(another, engine)
    first, second = await another(), await another()
    for client in (first, second):
        assert (await client.request("GET", "/props")).status == 200
    third = await another()
    assert (await third.request("GET", "/props")).status == 200
    await closed(first)
    # Used since then: it is not the next to go. Some loops count time in milliseconds.
    for _ in range(2):
        await asyncio.sleep(0.005)
        assert (await second.request("GET", "/props")).status == 200
    last = await another()
    assert (await last.request("GET", "/props")).status == 200
    await closed(third)
    assert (await second.request("GET", "/props")).status == 200


async def test_idle_ones_have_a_limit_of_their_own(another: Open) -> None:
    clients = [await another() for _ in range(3)]
    for client in clients:
        assert (await client.request("GET", "/props")).status == 200
    second = await another()
    assert (await second.request("GET", "/props")).status == 200
    await closed(clients[0])
    for client in clients[1:]:
        assert (await client.request("GET", "/props")).status == 200


async def test_a_crowd_at_the_door(another: Open, engine: FakeEngine) -> None:
    for _ in range(4):
        await busy(another, engine)
    crowd = [await another() for _ in range(3 * GATEWAY_TURNED_AWAY)]

    async def heard(client: RawClient) -> bool:
        try:
            return b" 503 " in await client.end()
        except ConnectionResetError:
            return False

    told = sum(await asyncio.gather(*(heard(client) for client in crowd)))
    assert told >= GATEWAY_TURNED_AWAY
    # Nobody stays who was turned away: there is time for words again.
    for client in crowd:
        client.writer.close()
    async with asyncio.timeout(WAIT_S):
        while not await heard(await another()):
            pass


@pytest.mark.parametrize("limits", [SHORT])
async def test_slow_headers(another: Open, engine: FakeEngine) -> None:
    client = await another()
    for byte in b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ":
        await client.send(bytes([byte]))
    # One more byte now and then does not help.
    dripping = asyncio.create_task(_drip(client))
    answer = await client.answer()
    assert (answer.status, answer.json()["error"]["code"]) == (408, "header_late")
    assert answer.json()["error"]["message"] == "the headers of the request have not arrived within 0.2 s"
    await closed(client)
    await dripping
    assert engine.seen == []


async def _drip(client: RawClient) -> None:
    try:
        while not client.reader.at_eof():
            await client.send(b"x")
            await asyncio.sleep(0.01)
    except ConnectionError:
        pass


@pytest.mark.parametrize("limits", [SHORT])
async def test_slow_headers_of_a_second_request(another: Open) -> None:
    client = await another()
    assert (await client.request("GET", "/props")).status == 200
    await client.send(b"GET / HT")
    assert (await client.answer()).status == 408
    await closed(client)


@pytest.mark.parametrize("limits", [SHORT])
async def test_time_to_think_between_requests(another: Open, limits: Limits) -> None:
    """The limit is on a head that has begun, not on connections that say nothing, nor on bodies."""
    client, slow = await another(), await another()
    assert (await client.request("GET", "/props")).status == 200
    await slow.send(request_bytes("POST", "/tokenize", "Content-Length: 4"))
    await asyncio.sleep(2 * limits.head_s)
    await slow.send(b"late")
    assert (await slow.answer()).json()["size"] == 4
    assert (await client.request("GET", "/props")).status == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([f"X-{number}: {'y' * 1000}" for number in range(100)], "longer than 64 KiB in all"),
        ([f"X-{number}: y" for number in range(1000)], "too many headers"),
        ([f"X-{number}: {'y' * 15_000}" for number in range(20)], "longer than 64 KiB in all"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [700, 1 << 20])
async def test_many_headers(
    another: Open, engine: FakeEngine, headers: list[str], message: str, piece_bytes: int
) -> None:
    client = await another()
    request = request_bytes("GET", "/", *headers)
    answering = asyncio.create_task(client.answer())
    try:
        for start in range(0, len(request), piece_bytes):
            await client.send(request[start : start + piece_bytes])
    except ConnectionError:
        pass
    answer = await answering
    assert (answer.status, answer.json()["error"]["code"]) == (431, "header_too_large")
    assert message in answer.json()["error"]["message"]
    await closed(client)
    assert engine.seen == []


async def test_headers_just_below_the_limit(another: Open, engine: FakeEngine) -> None:
    size = (GATEWAY_HEAD_LIMIT_BYTES - 2000) // 100
    client = await another()
    headers = [f"X-{number:02}: {'y' * (size - 8)}" for number in range(100)]
    assert (await client.request("GET", "/v1/models", *headers)).status == 200
    assert len(engine.seen) == 1


# -- bodies that do not come --------------------------------------------------------------------

LATE = Limits(connections=4, body_late_s=0.2)


async def soon(open_one: Open) -> Answer:
    """Of an honest client that comes again as it is told."""
    async with asyncio.timeout(WAIT_S):
        while (answer := await one_more(open_one)).status == 503:
            await asyncio.sleep(0.05)
        return answer


@pytest.mark.parametrize("limits", [LATE])
@pytest.mark.parametrize("begun", [b"", b"half"])
async def test_bodies_that_do_not_come_make_room(another: Open, engine: FakeEngine, begun: bytes) -> None:
    silent = [await another() for _ in range(4)]
    for client in silent:
        await client.send(request_bytes("POST", "/tokenize", "Content-Length: 999999") + begun)
    for gone in silent[:2]:
        assert (await soon(another)).status == 200
        busy_one = await another()
        await busy_one.send(request_bytes("POST", "/tokenize", "Content-Length: 9"))
        await closed(gone)
    # The longest without a byte has gone, and no more than had to.
    assert not any(client.reader.at_eof() for client in silent[2:])


@pytest.fixture
def descriptors() -> Iterator[None]:
    """For both ends of all connections that a gateway takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * GATEWAY_CONNECTIONS + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may have only {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("limits", [Limits()])
async def test_bodies_that_do_not_come_take_every_place(descriptors: None, another: Open) -> None:
    """With the limits of a real node; whoever is sent away comes back at once."""
    begun = request_bytes("POST", "/v1/completions", "Content-Length: 999999") + b"half"
    silent: list[RawClient] = []
    for _ in range(GATEWAY_CONNECTIONS):
        silent.append(await another())
        await silent[-1].send(begun)
    assert not any(client.reader.at_eof() for client in silent)
    for _ in range(3):
        assert (await soon(another)).status == 200
        client = await another()
        await client.send(begun)
    await closed(silent[0])


@pytest.mark.parametrize("limits", [LATE])
async def test_a_drop_now_and_then_is_no_body(another: Open) -> None:
    dripping = [await another() for _ in range(4)]
    for client in dripping:
        await client.send(request_bytes("POST", "/tokenize", "Content-Length: 999999"))
    tasks = [asyncio.create_task(_drip(client)) for client in dripping]
    assert (await soon(another)).status == 200
    for client in dripping:
        client.writer.transport.abort()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("limits", [LATE])
async def test_bodies_that_the_engine_does_not_take_are_not_late(
    another: Open, node: FakeNode, limits: Limits
) -> None:
    read = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read.wait()
        writer.transport.abort()

    server = await asyncio.start_server(stuck, "127.0.0.1", 0, limit=1)
    node.where = Upstream(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    clients = [await another() for _ in range(4)]
    sending = [
        asyncio.create_task(client.send(request_bytes("POST", "/tokenize", body=bytes(40 << 20))))
        for client in clients
    ]
    # For longer than a body may be late.
    await asyncio.sleep(5 * limits.body_late_s)
    assert (await one_more(another)).status == 503
    assert not any(client.reader.at_eof() for client in clients)
    read.set()
    for client in clients:
        client.writer.transport.abort()
    await asyncio.wait(sending)
    server.close()


async def test_refused_bodies_make_room_too(start_gateway: StartGateway, engine: FakeEngine) -> None:
    """After a refusal the rest of a request is read for a while: not while others find no room."""
    gateway = await start_gateway(GatewayConfig(port=0, api_key="sk-1", limits=LATE))
    async with AsyncExitStack() as stack:
        for _ in range(4):
            stranger = await stack.enter_async_context(connect(gateway.port))
            await stranger.send(request_bytes("POST", "/tokenize", "Content-Length: 999999"))
            assert (await stranger.answer()).status == 401

        async def open_one() -> RawClient:
            return await stack.enter_async_context(connect(gateway.port))

        async with asyncio.timeout(GATEWAY_LINGER_S - 1):
            assert (await soon(open_one)).status == 401
