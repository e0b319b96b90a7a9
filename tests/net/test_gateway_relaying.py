"""The way of an answer's bytes: framing, flow control, connections kept, and what ends them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mesh_llm.gateway import connection_pool, routes
from mesh_llm.gateway.engine_choice import GATEWAY_RESUME_TRIES
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Upstream
from tests.support.raw_http import RawClient, connect, request_bytes
from tests.support.upstream import (
    KEY,
    LAST_CHUNK,
    SSE_HEAD,
    WAIT_S,
    FakeEngine,
    FakeNode,
    Seen,
    Wire,
    plain,
    sends,
)

StartGateway = Callable[[GatewayConfig], Awaitable[Gateway]]

LOST = {
    "error": {"message": "the engine was killed by signal 9", "type": "server_error", "code": "engine_lost"}
}
LOST_EVENT = b"data: " + json.dumps(LOST).encode() + b"\n\n"
FLOOD_BYTES = 64 << 20
"""More than all socket buffers on the way can hold."""
FLOOD_PART = bytes(1 << 20)


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of these tests: how bytes are relayed has nothing to do with what is asked for."""
    for path in ("/stream", "/torn", "/pieces", "/early", "/x", "/flood", "/slow", "/echo"):
        for table in (routes._GET, routes._POST):
            monkeypatch.setitem(table, path, routes.PLAIN)


# -- framing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torn",
    [
        b"c\r\ndata: 2",
        b"9\r\ndata: 2\n\n",
        b"9\r\ndata: 2\n\n\r",
        b"9",
        b"",
        b"0\r\n",
        b"0\r\nX-Trailer: 1\r\n",
    ],
)
async def test_stream_that_is_cut_off_never_looks_whole(
    client: RawClient, engine: FakeEngine, torn: bytes
) -> None:
    engine.on("/stream", sends(SSE_HEAD + b"9\r\ndata: 1\n\n\r\n", torn, close=True))
    answer = await client.request("GET", "/stream")
    assert not answer.whole
    assert answer.body.startswith(b"data: 1\n\n")
    assert answer.body.endswith(b"\n\n" + LOST_EVENT)


@pytest.mark.parametrize("garbage", [b"zz\r\ndata: 2\n\n\r\n", b"data: 2\n\n", b"-1\r\n\r\n", b"\r\n"])
async def test_garbage_between_chunks(client: RawClient, engine: FakeEngine, garbage: bytes) -> None:
    left = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD + b"9\r\ndata: 1\n\n\r\n")
        await asyncio.sleep(0.005)
        await wire.send(garbage)
        await wire.gone()
        left.set()

    engine.on("/stream", script)
    answer = await client.request("GET", "/stream")
    assert answer.body == b"data: 1\n\n" + LOST_EVENT
    assert not answer.whole
    await asyncio.wait_for(left.wait(), WAIT_S)


async def test_extensions_and_trailers_stay_behind(client: RawClient, engine: FakeEngine) -> None:
    raw = b'9;id=1;q="a"\r\ndata: 1\n\n\r\n0;end\r\nX-Checksum: 7\r\n\r\n'
    engine.on("/stream", sends(SSE_HEAD, raw))
    engine.on("/torn", sends(SSE_HEAD, *(raw[at : at + 1] for at in range(len(raw)))))
    for path in ("/stream", "/torn"):
        answer = await client.request("GET", path)
        assert (answer.body, answer.whole) == (b"data: 1\n\n", True)
        assert answer.header("X-Checksum") == []
    assert [seen.connection for seen in engine.seen] == [1, 1]


async def test_head_in_pieces_and_after_a_preliminary_one(client: RawClient, engine: FakeEngine) -> None:
    answer = plain(b"hello", b"Retry-After: 1")
    engine.on("/pieces", sends(*(answer[at : at + 7] for at in range(0, len(answer), 7))))
    engine.on(
        "/early", sends(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: 1\r\n\r\n", answer)
    )
    for path in ("/pieces", "/early"):
        got = await client.request("GET", path)
        assert (got.status, got.body, got.header("Retry-After")) == (200, b"hello", ["1"])
    assert [seen.connection for seen in engine.seen] == [1, 1]


async def test_all_in_one_segment(client: RawClient, engine: FakeEngine) -> None:
    engine.on("/stream", sends(SSE_HEAD + b"1\r\na\r\n2\r\nbc\r\n" + LAST_CHUNK))
    answer = await client.request("GET", "/stream")
    assert (answer.body, answer.whole) == (b"abc", True)


async def test_answer_that_ends_with_the_connection(client: RawClient, engine: FakeEngine) -> None:
    engine.on("/x", sends(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", close=True))
    answer = await client.request("GET", "/x")
    assert (answer.body, answer.whole) == (b"hello", True)
    assert answer.header("Transfer-Encoding") == ["chunked"]


async def test_more_than_the_body_ends_the_connection(client: RawClient, engine: FakeEngine) -> None:
    engine.on("/x", sends(plain(b"hello") + b"HTTP/1.1 200 OK\r\n"))
    assert (await client.request("GET", "/x")).body == b"hello"
    assert (await client.request("GET", "/props")).json()["connection"] == 2


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (70 << 10) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbroken header\r\n\r\n",
    ],
)
async def test_head_that_cannot_be_relied_on(client: RawClient, engine: FakeEngine, head: bytes) -> None:
    engine.on("/x", sends(head))
    answer = await client.request("GET", "/x")
    assert (answer.status, answer.json()) == (502, LOST)


@pytest.mark.parametrize("size", [1, 5, 5 << 20])
async def test_answer_of_known_length(client: RawClient, engine: FakeEngine, size: int) -> None:
    body = os.urandom(size)
    engine.on("/x", sends(plain(body)))
    for _ in range(2):
        answer = await client.request("GET", "/x")
        assert (answer.body, answer.whole) == (body, True)
        assert answer.header("Content-Length") == [str(size)]
    assert [seen.connection for seen in engine.seen] == [1, 1]


@pytest.mark.parametrize("option", ["keep-alive", "close"])
async def test_old_client_that_would_keep_the_connection(
    client: RawClient, engine: FakeEngine, option: str
) -> None:
    engine.on("/stream", sends(SSE_HEAD, b"9\r\ndata: 1\n\n\r\n", LAST_CHUNK))
    await client.send(f"GET /stream HTTP/1.0\r\nHost: localhost\r\nConnection: {option}\r\n\r\n".encode())
    answer = await client.answer()
    assert answer.header("Transfer-Encoding") == []
    assert (answer.body, answer.whole) == (b"data: 1\n\n", True)


async def test_old_client_keeps_its_connection_when_the_length_is_known(
    client: RawClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        await client.send(b"GET /props HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.header("Connection")) == (200, ["keep-alive"])


# -- flow control -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
async def test_client_that_reads_slowly_holds_the_engine_back(
    client: RawClient, engine: FakeEngine, chunked: bool
) -> None:
    sent_bytes = 0

    async def script(_: Seen, wire: Wire) -> None:
        nonlocal sent_bytes
        await wire.send(
            SSE_HEAD if chunked else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % FLOOD_BYTES
        )
        while sent_bytes < FLOOD_BYTES:
            await (wire.send_chunk if chunked else wire.send)(FLOOD_PART)
            sent_bytes += len(FLOOD_PART)
        if chunked:
            await wire.send(LAST_CHUNK)

    engine.on("/flood", script)
    await client.send(request_bytes("GET", "/flood"))
    answer = await client.head()
    held_bytes = await _settled(lambda: sent_bytes)
    assert held_bytes < FLOOD_BYTES // 2
    if chunked:
        size = sum([len(chunk) async for chunk in _chunks(client)])
    else:
        size = len((await client.rest(answer)).body)
    assert size == FLOOD_BYTES
    assert (await client.request("GET", "/props")).json()["connection"] == 1


async def _chunks(client: RawClient) -> AsyncIterator[bytes]:
    while chunk := await client.chunk():
        yield chunk


async def _settled(value: Callable[[], int]) -> int:
    """`value` once it has stopped to grow."""
    async with asyncio.timeout(WAIT_S):
        while True:
            before = value()
            await asyncio.sleep(0.3)
            if before and value() == before:
                return before


@pytest.mark.parametrize("how", ["leaves", "stops reading"])
async def test_engine_is_rid_of_a_client_that_is_full(
    start_gateway: StartGateway, engine: FakeEngine, how: str
) -> None:
    silence_s = 0.5 if how == "stops reading" else 600.0
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(silence_s=silence_s)))
    sent_bytes, left = 0, asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        nonlocal sent_bytes
        await wire.send(SSE_HEAD)
        try:
            while True:
                await wire.send_chunk(FLOOD_PART)
                sent_bytes += len(FLOOD_PART)
        finally:
            left.set()

    engine.on("/flood", script)
    async with connect(gateway.port) as client:
        await client.send(request_bytes("GET", "/flood"))
        await client.head()
        if how == "leaves":
            await _settled(lambda: sent_bytes)
            client.writer.transport.abort()
        await asyncio.wait_for(left.wait(), WAIT_S)


async def test_silence_is_counted_anew_with_every_byte(
    start_gateway: StartGateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "GATEWAY_ENGINE_IDLE_S", WAIT_S)
    # A pause of the machine is silence, too: where it is too long for one limit, the next is larger.
    for silence_s in (0.4, 2.0, 8.0):
        gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(silence_s=silence_s)))
        engine.on("/slow", _six_events(pause_s=0.4 * silence_s))
        async with connect(gateway.port) as client:
            answer = await client.request("GET", "/slow")
            if not answer.whole:
                continue
            used = engine.connections
            # Nor does a connection that waits for its next request count as silent.
            await asyncio.sleep(1.5 * silence_s)
            assert (await client.request("GET", "/props")).json()["connection"] == used
            break
    assert (answer.body, answer.whole) == (6 * b"data: 1\n\n", True)


def _six_events(*, pause_s: float) -> Callable[[Seen, Wire], Awaitable[None]]:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for _number in range(6):
            await asyncio.sleep(pause_s)
            await wire.send_chunk(b"data: 1\n\n")
        await wire.send(LAST_CHUNK)

    return script


async def test_endless_answer_that_falls_silent_never_looks_whole(
    start_gateway: StartGateway, engine: FakeEngine
) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(silence_s=0.5)))

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await wire.gone()

    engine.on("/x", script)
    async with connect(gateway.port) as client:
        answer = await client.request("GET", "/x")
        assert (answer.body, answer.whole) == (b"hel", False)


# -- connections --------------------------------------------------------------------------------


async def test_connection_is_kept_after_a_stream(client: RawClient, engine: FakeEngine) -> None:
    engine.on("/stream", sends(SSE_HEAD, b"9\r\ndata: 1\n\n\r\n", LAST_CHUNK))
    for _ in range(3):
        assert (await client.request("GET", "/stream")).whole
    assert [seen.connection for seen in engine.seen] == [1, 1, 1]


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n"]
)
async def test_connection_that_is_not_kept(client: RawClient, engine: FakeEngine, head: bytes) -> None:
    engine.on("/x", sends(head + b"Content-Length: 2\r\n\r\nhi"))
    assert (await client.request("GET", "/x")).body == b"hi"
    assert (await client.request("GET", "/props")).json()["connection"] == 2


async def test_connection_that_the_engine_closed_is_forgotten(
    client: RawClient, engine: FakeEngine, node: FakeNode
) -> None:
    closed = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b"hi"))
        await asyncio.sleep(0.02)
        wire.writer.close()
        closed.set()

    engine.on("/x", script)
    assert (await client.request("GET", "/x")).body == b"hi"
    await asyncio.wait_for(closed.wait(), WAIT_S)
    await asyncio.sleep(0.02)
    assert (await client.request("POST", "/echo", body=b"{}")).json()["connection"] == 2
    assert len(engine.seen) == 2


async def test_half_an_answer_that_the_client_has_not_seen_is_asked_for_again(
    client: RawClient, engine: FakeEngine
) -> None:
    assert (await client.request("GET", "/props")).status == 200
    engine.on("/x", sends(b"HTTP/1.1 20", close=True))
    answer = await client.request("POST", "/x", body=b"{}")
    assert (answer.status, answer.json()) == (502, LOST)
    assert [seen.target for seen in engine.seen] == ["/props", *["/x"] * GATEWAY_RESUME_TRIES]


async def test_bytes_that_nobody_asked_for_end_the_connection(client: RawClient, engine: FakeEngine) -> None:
    sent = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b"hi"))
        await asyncio.sleep(0.02)
        await wire.send(plain(b"not yours"))
        sent.set()

    engine.on("/x", script)
    assert (await client.request("GET", "/x")).body == b"hi"
    await asyncio.wait_for(sent.wait(), WAIT_S)
    await asyncio.sleep(0.05)
    answer = await client.request("GET", "/props")
    assert answer.json()["connection"] == 2


async def test_answer_before_the_end_of_an_upload(client: RawClient, node: FakeNode) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain(b"no").replace(b"200 OK", b"413 Payload Too Large"))
        # Not closed with bytes unread: the reset would overtake the answer.
        while await reader.read(1 << 16):
            pass
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        node.where = Upstream(url=f"http://127.0.0.1:{port}", key=KEY)
        await client.send(request_bytes("POST", "/x", f"Content-Length: {40 << 20}") + bytes(1 << 20))
        answer = await client.answer()
    assert (answer.status, answer.body) == (413, b"no")
    assert node.asked == []
