"""The gateway over real sockets: what reaches the engine, what comes back, and every way to break off."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from mesh_llm.errors import MeshError, PortInUse, UsageError
from mesh_llm.gateway import server
from mesh_llm.gateway.engine_choice import GATEWAY_RESUME_TRIES
from mesh_llm.gateway.headers import SAFE
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health, Upstream
from mesh_llm.types import State
from tests.support.raw_http import RawClient, connect, request_bytes
from tests.support.upstream import KEY, LAST_CHUNK, SSE_HEAD, WAIT_S, FakeEngine, FakeNode, Seen, Wire, plain

StartGateway = Callable[[GatewayConfig], Awaitable[Gateway]]


def error(message: str, kind: str, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "code": code}}


LOST = error("the engine was killed by signal 9", "server_error", "engine_lost")


# -- what reaches the engine --------------------------------------------------------------------


async def test_request_arrives_as_it_was_sent(client: RawClient, engine: FakeEngine) -> None:
    answer = await client.request(
        "POST",
        "/v1/embeddings?a=1&b=%20x",
        "X-Twice: one",
        "X-Twice: two",
        "Accept-Encoding: br",
        "X-Conversation-Id: mine",
        "Cookie: a=1",
        "Accept: text/plain",
        "Content-Type: application/json",
        body=b'{"stream": false}',
    )
    assert (answer.status, answer.reason, answer.whole) == (200, "OK", True)
    [seen] = engine.seen
    assert (seen.method, seen.target, seen.body) == (
        "POST",
        "/v1/embeddings?a=1&b=%20x",
        b'{"stream": false}',
    )
    assert sorted(seen.headers) == sorted(
        [
            ("Host", f"127.0.0.1:{engine.port}"),
            ("Accept", "text/plain"),
            ("Content-Type", "application/json"),
            ("Content-Length", "17"),
            ("Authorization", f"Bearer {KEY}"),
        ]
    )


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models?q=%2B+%26",
        "/v1/models?next=http://elsewhere.example/",
        "/v1/models?a[]=1&b={}",
        "/v1/models?a=?&a",
    ],
)
async def test_query_is_left_alone(client: RawClient, engine: FakeEngine, target: str) -> None:
    assert (await client.request("GET", target)).status == 200
    assert engine.seen[0].target == target


async def test_path_is_sent_as_it_was_looked_up(client: RawClient, engine: FakeEngine) -> None:
    assert (await client.request("GET", "/v1%2Fm%6Fdels?a=%6F")).status == 200
    assert engine.seen[0].target == "/v1/models?a=%6F"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/"),
        ("GET", "/a/../b/./c"),
        ("GET", "//elsewhere.example/x"),
        ("GET", "/@elsewhere.example/"),
        ("GET", "/v1%252Fmodels"),
        ("GET", "/v1/models/../../slots/0"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/nothing"),
    ],
)
async def test_unknown_routes(client: RawClient, engine: FakeEngine, method: str, target: str) -> None:
    answer = await client.request(method, target, body=b"{}" if method == "POST" else b"")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")
    assert answer.json()["error"]["message"].endswith(" is not a route of this API")
    assert answer.json()["error"]["type"] == "not_found_error"
    # The connection can be used again.
    assert (await client.request("GET", "/v1/models")).status == 200
    assert [seen.target for seen in engine.seen] == ["/v1/models"]


@pytest.mark.parametrize(
    ("method", "target", "word"),
    [
        ("POST", "/props", "everybody"),
        ("POST", "/lora-adapters", "everybody"),
        ("POST", "/slots/0?action=erase", "everybody"),
        ("GET", "/tools", "tools"),
        ("POST", "/tools", "tools"),
        ("GET", "/cors-proxy?url=http://127.0.0.1/", "proxy"),
        ("GET", "/v1/stream?conv_id=x", "second connection"),
        ("DELETE", "/v1/stream/x", "second connection"),
        ("POST", "/v1/streams/lookup", "second connection"),
    ],
)
async def test_routes_that_are_not_offered(
    client: RawClient, engine: FakeEngine, method: str, target: str, word: str
) -> None:
    answer = await client.request(method, target, body=b"{}" if method == "POST" else b"")
    assert (answer.status, answer.json()["error"]["code"]) == (400, "not_offered")
    assert word in answer.json()["error"]["message"]
    assert engine.seen == []


async def test_absolute_target_becomes_a_path(client: RawClient, engine: FakeEngine) -> None:
    assert (await client.request("GET", "http://localhost:9337/props?x=1")).status == 200
    assert engine.seen[0].target == "/props?x=1"
    assert engine.seen[0].header("Host") == [f"127.0.0.1:{engine.port}"]


@pytest.mark.parametrize("request_line", ["OPTIONS * HTTP/1.1", "CONNECT elsewhere.example:80 HTTP/1.1"])
async def test_target_that_is_no_path_is_refused(
    client: RawClient, engine: FakeEngine, request_line: str
) -> None:
    await client.send(f"{request_line}\r\nHost: localhost\r\n\r\n".encode())
    answer = await client.answer()
    assert answer.status == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert engine.seen == []


async def test_headers_of_the_connection_stay_behind(client: RawClient, engine: FakeEngine) -> None:
    await client.request(
        "GET",
        "/props",
        "Connection: keep-alive, X-Mine",
        "X-Mine: 1",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Trailer: X-End",
        "Upgrade: h2c",
        "Proxy-Authorization: Basic eA==",
        "Proxy-Connection: keep-alive",
        "Authorization: Bearer sk-client",
        "X-Api-Key: sk-client",
        "Accept: application/json",
    )
    names = sorted(name for name, _ in engine.seen[0].headers)
    assert names == ["Accept", "Authorization", "Host"]
    assert engine.seen[0].header("Authorization") == [f"Bearer {KEY}"]


async def test_large_upload_streams_through(client: RawClient, engine: FakeEngine) -> None:
    body = os.urandom(5 << 20)
    answer = await client.request("POST", "/tokenize", body=body)
    assert answer.json()["size"] == len(body)
    assert engine.seen[0].body == body
    assert engine.seen[0].header("Content-Length") == [str(len(body))]
    assert engine.seen[0].header("Expect") == []


async def test_chunked_upload_of_unknown_length(client: RawClient, engine: FakeEngine) -> None:
    small, large = b"x" * 1000, os.urandom(17 << 20)
    for body in (small, large):
        head = request_bytes("POST", "/tokenize", "Transfer-Encoding: chunked")
        await client.send(head + b"%x\r\n%s\r\n" % (len(body), body) + LAST_CHUNK)
        assert (await client.answer()).status == 200
    assert [seen.body for seen in engine.seen] == [small, large]
    # A small body is whole before it goes on, so its length is known; a large one goes on in chunks.
    assert engine.seen[0].header("Content-Length") == ["1000"]
    assert engine.seen[1].header("Transfer-Encoding") == ["chunked"]


async def test_compressed_upload_is_left_alone(client: RawClient, engine: FakeEngine) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    await client.request("POST", "/completion", "Content-Encoding: gzip", body=body)
    assert engine.seen[0].body == body
    assert engine.seen[0].header("Content-Encoding") == ["gzip"]


async def test_client_is_told_to_go_on_with_its_body(client: RawClient, engine: FakeEngine) -> None:
    await client.send(request_bytes("POST", "/tokenize", "Expect: 100-continue", "Content-Length: 3"))
    assert (await client.head()).status == 100
    await client.send(b"abc")
    assert (await client.answer()).status == 200
    assert engine.seen[0].body == b"abc"
    assert engine.seen[0].header("Expect") == []


async def test_upload_over_the_limit(start_gateway: StartGateway, engine: FakeEngine) -> None:
    limits = Limits(body_bytes=3 << 20)
    gateway = await start_gateway(GatewayConfig(port=0, limits=limits))
    expected = error("the request body is larger than 3 MiB", "invalid_request_error", "body_too_large")
    async with connect(gateway.port) as client:
        # Refused before the client has sent a byte of it, and without an invitation to do so.
        await client.send(
            request_bytes("POST", "/tokenize", "Expect: 100-continue", "Content-Length: 3145729")
        )
        answer = await client.answer()
        assert (answer.status, answer.json()) == (413, expected)
        assert answer.header("Connection") == ["close"]
    async with connect(gateway.port) as client:
        await client.send(request_bytes("POST", "/tokenize", "Transfer-Encoding: chunked"))
        for _ in range(4):
            await client.send(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        answer = await client.answer()
        assert (answer.status, answer.json()) == (413, expected)
    assert engine.seen == []


async def test_malformed_chunks_are_refused(client: RawClient, engine: FakeEngine) -> None:
    await client.send(request_bytes("POST", "/tokenize", "Transfer-Encoding: chunked") + b"zz\r\nabc\r\n")
    answer = await client.answer()
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "bad_request"
    assert engine.seen == []


# -- what comes back ----------------------------------------------------------------------------


async def test_answer_comes_back_as_it_was_sent(client: RawClient, engine: FakeEngine) -> None:
    packed = gzip.compress(b"hello")

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 418 Short and Stout\r\nContent-Length: %d\r\nContent-Encoding: gzip\r\n"
            b"Content-Type: text/html\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: llama.cpp\r\n"
            b"Location: http://elsewhere.example/\r\nRefresh: 0; url=http://elsewhere.example/\r\n"
            b'Content-Security-Policy: default-src *\r\nClear-Site-Data: "*"\r\nLink: </x>; rel=preload\r\n'
            b"Service-Worker-Allowed: /\r\nAccess-Control-Allow-Origin: *\r\nX-Content-Type-Options: x\r\n"
            b"Connection: keep-alive, X-Own\r\nX-Own: 1\r\nKeep-Alive: timeout=5, max=100\r\n\r\n%s"
            % (len(packed), packed)
        )

    engine.on("/models", script)
    answer = await client.request("GET", "/models", "Accept-Encoding: gzip")
    assert (answer.version, answer.status, answer.reason) == ("HTTP/1.1", 418, "Short and Stout")
    assert (answer.body, answer.whole) == (packed, True)
    headers = [(name, value) for name, value in answer.headers if name != "Date"]
    assert headers == [
        ("Content-Length", str(len(packed))),
        ("Content-Encoding", "gzip"),
        ("Content-Type", "text/html"),
        ("Server", "llama.cpp"),
        *SAFE.items(),
    ]
    # One client's cookies do not come along with the next request.
    await client.request("GET", "/props")
    assert engine.seen[1].header("Cookie") == []


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/health", "/metrics", "/no/such"])
async def test_no_answer_is_a_page(client: RawClient, engine: FakeEngine, path: str) -> None:
    """Whoever computes it may be hostile, and its origin is this machine's."""

    async def page(_: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 8\r\n\r\n<script>")

    async def stream(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b"data: [DONE]\n\n")
        await wire.send_chunk(b"")

    engine.on("/v1/models", page)
    engine.on("/v1/chat/completions", stream)
    method, body = ("POST", b'{"messages": [], "stream": true}') if "chat" in path else ("GET", b"")
    answer = await client.request(method, path, body=body)
    assert answer.header("X-Content-Type-Options") == ["nosniff"]
    [policy] = answer.header("Content-Security-Policy")
    assert policy.startswith("sandbox; default-src 'none';")


async def test_head_is_the_engines_to_answer(client: RawClient, engine: FakeEngine) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 123\r\nAccess-Control-Allow-Origin: x\r\n\r\n")

    engine.on("/v1/models", script)
    answer = await client.request("HEAD", "/v1/models", "Origin: http://localhost:5173")
    assert (answer.status, answer.header("Content-Length")) == (200, ["123"])
    # Ours to say: the engine may be a stranger's.
    assert answer.header("Access-Control-Allow-Origin") == ["http://localhost:5173"]
    assert [seen.method for seen in engine.seen] == ["HEAD"]
    assert engine.seen[0].header("Origin") == []


async def test_each_event_comes_at_once(client: RawClient, engine: FakeEngine) -> None:
    sent, read = asyncio.Queue[bytes](), asyncio.Queue[None]()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for number in range(5):
            event = b'data: {"n": %d}\n\n' % number
            await wire.send_chunk(event)
            sent.put_nowait(event)
            # The next one is not sent until the client has this one: nothing may be held back.
            await read.get()
        await wire.send(LAST_CHUNK)

    engine.on("/v1/models", script)
    await client.send(request_bytes("GET", "/v1/models"))
    answer = await client.head()
    assert answer.header("Transfer-Encoding") == ["chunked"]
    for _ in range(5):
        assert await client.chunk() == await sent.get()
        read.put_nowait(None)
    assert await client.chunk() == b""


async def test_twenty_streams_side_by_side(gateway: Gateway, engine: FakeEngine) -> None:
    count = 20
    everyone = asyncio.Barrier(count)

    async def script(seen: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for number in range(5):
            # Nobody's next event before everybody's last one: one after the other would never end.
            await everyone.wait()
            await wire.send_chunk(b"data: %s %d\n\n" % (seen.target.encode(), number))
        await wire.send(LAST_CHUNK)

    async def ask(number: int) -> None:
        async with connect(gateway.port) as client:
            answer = await client.request("GET", f"/v1/models?{number}")
            assert answer.whole
            assert answer.body == b"".join(b"data: /v1/models?%d %d\n\n" % (number, n) for n in range(5))

    engine.on("/v1/models", script)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(ask, range(count)))


async def test_old_client_gets_a_body_that_ends_with_the_connection(
    client: RawClient, engine: FakeEngine
) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b"data: 1\n\n")
        await wire.send(LAST_CHUNK)

    engine.on("/v1/models", script)
    await client.send(b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
    answer = await client.answer()
    assert answer.header("Transfer-Encoding") == []
    assert answer.body == b"data: 1\n\n"


async def test_connections_are_kept_on_both_sides(client: RawClient, engine: FakeEngine) -> None:
    connections = []
    for _ in range(3):
        connections.append((await client.request("POST", "/tokenize", body=b"{}")).json()["connection"])
    assert connections == [1, 1, 1]


async def test_pipelined_requests_are_answered_in_order(client: RawClient, engine: FakeEngine) -> None:
    await client.send(request_bytes("GET", "/models") + request_bytes("GET", "/v1/models"))
    assert [(await client.answer()).json()["target"] for _ in range(2)] == ["/models", "/v1/models"]


# -- the engine leaves --------------------------------------------------------------------------


async def test_idle_connection_that_the_engine_closes_costs_nothing(
    client: RawClient, engine: FakeEngine, node: FakeNode
) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        if seen.connection == 1:
            # What a request meets that was sent just when the engine gave the idle connection up.
            wire.writer.close()
        else:
            await wire.send(plain(seen.body))

    engine.on("/v1/completions", script)
    assert (await client.request("GET", "/props")).json()["connection"] == 1
    answer = await client.request("POST", "/v1/completions", body=b"prompt")
    assert (answer.status, answer.body) == (200, b"prompt")
    assert [seen.connection for seen in engine.seen] == [1, 1, 2]
    assert node.asked == []


async def test_engine_that_closes_after_every_answer(client: RawClient, engine: FakeEngine) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.send(plain(seen.body))
        wire.writer.close()

    engine.on("/tokenize", script)
    for number in range(50):
        answer = await client.request("POST", "/tokenize", body=b"%d" % number)
        assert (answer.status, answer.body) == (200, b"%d" % number)


async def test_large_body_goes_on_a_new_connection(client: RawClient, engine: FakeEngine) -> None:
    await client.request("GET", "/props")
    await client.request("POST", "/tokenize", body=bytes(17 << 20))
    assert [seen.connection for seen in engine.seen] == [1, 2]


async def test_engine_dies_before_it_answers(client: RawClient, engine: FakeEngine, node: FakeNode) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        wire.abort()

    engine.on("/v1/completions", script)
    answer = await client.request("POST", "/v1/completions", body=b"{}")
    assert (answer.status, answer.json()) == (502, LOST)
    assert answer.header("Content-Type") == ["application/json"]
    # The request may be what kills the engine: it is not asked again without an end.
    assert len(engine.seen) == GATEWAY_RESUME_TRIES
    assert node.asked[-1] == engine.upstream
    # The client's connection is fine, and goes on.
    assert (await client.request("GET", "/props")).status == 200


async def test_engine_is_not_there(client: RawClient, node: FakeNode) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        node.where = Upstream(url=f"http://127.0.0.1:{taken.getsockname()[1]}", key=KEY)
        answer = await client.request("GET", "/props")
    assert (answer.status, answer.json()) == (502, LOST)


async def test_engine_dies_in_the_middle_of_a_stream(client: RawClient, engine: FakeEngine) -> None:
    read = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b"data: 1\n\n")
        await read.wait()
        wire.abort()

    engine.on("/v1/models", script)
    await client.send(request_bytes("GET", "/v1/models"))
    answer = await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    read.set()
    await client.rest(answer)
    assert answer.chunks == [b"data: " + json.dumps(LOST).encode() + b"\n\n"]
    assert b"[DONE]" not in answer.body
    assert not answer.whole
    assert await client.end() == b""


async def test_half_an_event_does_not_swallow_the_error(client: RawClient, engine: FakeEngine) -> None:
    read = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b'data: {"cho')
        await read.wait()
        wire.abort()

    engine.on("/v1/models", script)
    await client.send(request_bytes("GET", "/v1/models"))
    answer = await client.head()
    assert await client.chunk() == b'data: {"cho'
    read.set()
    assert (await client.rest(answer)).body == b"\n\ndata: " + json.dumps(LOST).encode() + b"\n\n"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n",
    ],
)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_other_answers_end_with_a_broken_connection(
    client: RawClient, engine: FakeEngine, head: bytes, version: str
) -> None:
    read = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(head + b'{"a": 1' + (b"\r\n" if b"chunked" in head else b""))
        await read.wait()
        wire.abort()

    engine.on("/models", script)
    await client.send(f"GET /models HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
    answer = await client.head()
    async with asyncio.timeout(WAIT_S):
        assert b'{"a": 1' in await client.reader.read(100)
    read.set()
    if version == "1.0" and b"chunked" in head:
        # No framing: only a reset says that this is not all.
        with pytest.raises(ConnectionResetError):
            await client.end()
    else:
        assert await client.end() == b""
    assert answer.status == 200


async def test_silent_engine(start_gateway: StartGateway, engine: FakeEngine) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(silence_s=0.5)))
    expected = error("the engine has sent nothing for 0.5 s", "server_error", "engine_silent")
    left = asyncio.Event()

    async def silent(_: Seen, wire: Wire) -> None:
        await wire.gone()
        left.set()

    async def stalled(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.gone()

    engine.on("/detokenize", silent)
    engine.on("/apply-template", stalled)
    async with connect(gateway.port) as client:
        answer = await client.request("POST", "/detokenize", body=b"{}")
        assert (answer.status, answer.json()) == (504, expected)
        await asyncio.wait_for(left.wait(), WAIT_S)
        answer = await client.request("POST", "/apply-template", body=b"{}")
        assert answer.body == b"data: " + json.dumps(expected).encode() + b"\n\n"
        assert not answer.whole


async def test_client_that_stops_sending_its_body(start_gateway: StartGateway, engine: FakeEngine) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(silence_s=0.2)))
    for length in (100, 2 << 20):
        async with connect(gateway.port) as client:
            await client.send(request_bytes("POST", "/tokenize", f"Content-Length: {length}") + b"abc")
            answer = await client.answer()
            assert (answer.status, answer.json()["error"]["code"]) == (408, "body_late")
    assert engine.seen == []


async def test_answer_that_is_not_http(client: RawClient, engine: FakeEngine) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(b"\x00\x01 not HTTP\r\n\r\n")

    engine.on("/tokenize", script)
    answer = await client.request("POST", "/tokenize", body=b"{}")
    assert (answer.status, answer.json()) == (502, LOST)


# -- the client leaves --------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
async def test_engine_notices_at_once_that_the_client_left(
    gateway: Gateway, engine: FakeEngine, node: FakeNode, started: bool
) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        if started:
            await wire.send(SSE_HEAD)
            await wire.send_chunk(b'data: {"choices":[]}\n\n')
        arrived.set()
        await wire.gone()
        left.set()

    engine.on("/v1/chat/completions", script)
    async with connect(gateway.port) as client:
        body = b'{"stream": true}' if started else b"{}"
        await client.send(request_bytes("POST", "/v1/chat/completions", body=body))
        await asyncio.wait_for(arrived.wait(), WAIT_S)
        if started:
            await client.head()
            await client.chunk()
    # At once, and not after the ten minutes that an engine may be silent for.
    await asyncio.wait_for(left.wait(), WAIT_S)
    # Nobody asks what ailed the engine: nothing did.
    assert node.asked == []


async def test_client_that_leaves_in_the_middle_of_its_upload(gateway: Gateway, engine: FakeEngine) -> None:
    async with connect(gateway.port) as client:
        await client.send(request_bytes("POST", "/tokenize", "Content-Length: 5000000") + bytes(2_000_000))
    async with connect(gateway.port) as client:
        assert (await client.request("GET", "/props")).status == 200
    assert [seen.target for seen in engine.seen] == ["/props"]


# -- our own answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health(client: RawClient, node: FakeNode, engine: FakeEngine, path: str) -> None:
    answer = await client.request("GET", path)
    assert (answer.status, answer.json()) == (200, {"status": "ok", "state": "serving", "model": "tiny"})
    node.state = Health(state=State.LOADING, reason="the model is being loaded", model="tiny")
    answer = await client.request("GET", path)
    assert answer.status == 503
    assert answer.header("Retry-After") == ["1"]
    assert answer.json() == {
        **error("the model is being loaded", "unavailable_error", "not_serving"),
        "state": "loading",
        "reason": "the model is being loaded",
        "model": "tiny",
    }
    answer = await client.request("HEAD", path)
    assert (answer.status, answer.body) == (503, b"")
    assert engine.seen == []


async def test_nothing_to_serve_with(client: RawClient, node: FakeNode) -> None:
    node.where = None
    node.state = Health(state=State.WAITING, reason="need 55.0 GB for the model, have 51.5 GB", model=None)
    answer = await client.request("POST", "/v1/chat/completions", body=b"{}")
    assert answer.status == 503
    reason = "need 55.0 GB for the model, have 51.5 GB"
    state = {"state": "waiting", "reason": reason, "model": None}
    assert answer.json() == {**error(reason, "unavailable_error", "not_serving"), **state}
    assert answer.header("Retry-After") == ["1"]


async def test_between_two_plans_a_request_is_held(client: RawClient, node: FakeNode) -> None:
    successor, node.where = node.where, None
    asyncio.get_running_loop().call_later(0.2, setattr, node, "where", successor)
    answer = await client.request("POST", "/v1/chat/completions", body=b"{}")
    assert answer.status == 200


async def test_a_gap_between_plans_has_an_end(
    client: RawClient, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_llm.gateway.engine_choice.GATEWAY_GAP_S", 0.2)
    node.where = None
    answer = await client.request("POST", "/v1/chat/completions", body=b"{}")
    assert (answer.status, answer.json()["reason"]) == (503, "no model is being served right now")


async def test_metrics(client: RawClient, engine: FakeEngine, node: FakeNode) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b"llamacpp:tokens_predicted_total 7\n", b"Content-Type: text/plain"))

    engine.on("/metrics", script)
    await client.request("POST", "/v1/completions", body=b"12345")
    for number in range(3):
        await client.request("GET", f"/made/up/{number}")
    answer = await client.request("GET", "/metrics")
    assert answer.header("Content-Type") == ["text/plain; version=0.0.4; charset=utf-8"]
    lines = answer.body.decode().splitlines()
    for line in (
        'mesh_llm_gateway_requests_total{route="/v1/completions",status="200"} 1.0',
        'mesh_llm_gateway_requests_total{route="other",status="404"} 3.0',
        "mesh_llm_gateway_in_flight 1.0",
        'mesh_llm_gateway_bytes_total{direction="in"} 5.0',
        'mesh_llm_gateway_first_byte_seconds_count{route="/v1/completions"} 1.0',
        "mesh_llm_fake 1.0",
        "llamacpp:tokens_predicted_total 7",
    ):
        assert line in lines
    assert node.engine_series == b"llamacpp:tokens_predicted_total 7\n"
    assert engine.seen[-1].header("Authorization") == [f"Bearer {KEY}"]
    node.where = None
    answer = await client.request("GET", "/metrics")
    assert answer.status == 200
    assert b"llamacpp:" not in answer.body
    assert b"mesh_llm_fake 1.0" in answer.body
    assert node.engine_series == b""


async def test_access_log(client: RawClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mesh_llm.access")
    await client.request("POST", "/v1/completions?key=s3cret", "Authorization: Bearer s3cret", body=b"s3cret")
    await client.request("GET", "/health")
    first, second = [record.getMessage().split(" ") for record in caplog.records]
    assert first[:3] == ["POST", "/v1/completions", "200"]
    assert int(first[3]) > 100
    assert float(first[4]) < WAIT_S
    assert re.fullmatch(r"first_byte=\d+\.\d+", first[5])
    assert second[:4] == ["GET", "/health", "200", "53"]
    assert "s3cret" not in caplog.text


async def test_access_log_by_fields(client: RawClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mesh_llm.access")
    await client.request("GET", "/v1/models?key=s3cret", "X-Request-Id: a b\tc-7", "Cookie: s3cret")
    await client.request("HEAD", "/health", "X-Request-Id: " + "x" * 500)
    first, second = [dict(record.__dict__["fields"]) for record in caplog.records]
    assert first.pop("bytes") > 100
    assert 0 <= first.pop("first_byte_seconds") <= first.pop("seconds") < WAIT_S
    assert first == {
        "method": "GET",
        "path": "/v1/models",
        "status": "200",
        "request_id": "a?b?c-7",
        "resumed": 0,
        "served_by": None,
        "key": None,
    }
    assert (second["first_byte_seconds"], second["bytes"]) == (None, 0)
    assert second["request_id"] == "x" * 100
    assert caplog.records[0].getMessage().endswith(" id=a?b?c-7")
    assert "s3cret" not in caplog.text


async def test_mistake_of_our_own(
    client: RawClient, node: FakeNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: FakeNode) -> None:
        raise ZeroDivisionError("inner workings")

    monkeypatch.setattr(FakeNode, "upstreams", broken)
    answer = await client.request("GET", "/props")
    assert answer.status == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert b"inner workings" not in answer.body
    assert "inner workings" in caplog.text


# -- beginning and end --------------------------------------------------------------------------


async def test_address_and_port(gateway: Gateway) -> None:
    assert gateway.port > 0
    assert gateway.url == f"http://127.0.0.1:{gateway.port}"


async def test_port_in_use(gateway: Gateway, node: FakeNode) -> None:
    with pytest.raises(PortInUse) as refusal:
        await Gateway(GatewayConfig(port=gateway.port), node).start()
    assert refusal.value.message.startswith(f"port {gateway.port} is in use by ")
    assert refusal.value.message.endswith(f" (pid {os.getpid()})")
    assert refusal.value.hint == "--port 0 takes any free port"


async def test_addresses_that_cannot_be_had(node: FakeNode) -> None:
    for listen, sentence in (
        ("192.0.2.1", "cannot listen on 192.0.2.1: it is not an address of this machine"),
        ("no such name", "cannot listen on no such name:0: there is no such address"),
    ):
        with pytest.raises(MeshError) as refusal:
            await Gateway(GatewayConfig(listen=listen, port=0, api_key="k"), node).start()
        assert refusal.value.message == sentence


async def test_other_machines_need_a_key(node: FakeNode) -> None:
    with pytest.raises(UsageError) as refusal:
        await Gateway(GatewayConfig(listen="0.0.0.0", port=0), node).start()
    assert refusal.value.message == "listening on 0.0.0.0 needs --api-key"


async def test_drain_lets_a_stream_finish(gateway: Gateway, engine: FakeEngine) -> None:
    finish = asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(b"data: 1\n\n")
        await finish.wait()
        await wire.send_chunk(b"data: [DONE]\n\n")
        await wire.send(LAST_CHUNK)

    engine.on("/v1/models", script)
    async with connect(gateway.port) as client, connect(gateway.port) as idle:
        assert (await idle.request("GET", "/props")).status == 200
        await client.send(request_bytes("GET", "/v1/models"))
        answer = await client.head()
        await client.chunk()
        drain = asyncio.create_task(gateway.drain(WAIT_S))
        refused = await idle.request("GET", "/props")
        assert (refused.status, refused.header("Connection")) == (503, ["close"])
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", gateway.port)
        assert not drain.done()
        finish.set()
        assert (await client.rest(answer)).body == b"data: [DONE]\n\n"
        assert answer.whole
        await asyncio.wait_for(drain, WAIT_S)


async def test_drain_is_bounded_and_stop_tells_those_under_way(
    start_gateway: StartGateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than any pause of the machine: whoever waited for it in vain would be found out.
    monkeypatch.setattr(server, "GATEWAY_STOP_S", 2 * WAIT_S)
    gateway = await start_gateway(GatewayConfig(port=0))
    arrived = asyncio.Semaphore(0)

    async def stream(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        arrived.release()
        await wire.gone()

    async def silent(_: Seen, wire: Wire) -> None:
        arrived.release()
        await wire.gone()

    engine.on("/v1/models", stream)
    engine.on("/detokenize", silent)
    expected = error("this node is stopping", "unavailable_error", "not_serving")
    async with connect(gateway.port) as streaming, connect(gateway.port) as waiting:
        await streaming.send(request_bytes("GET", "/v1/models"))
        await waiting.send(request_bytes("POST", "/detokenize", body=b"{}"))
        answer = await streaming.head()
        for _ in range(2):
            await asyncio.wait_for(arrived.acquire(), WAIT_S)
        started_s = time.monotonic()
        await gateway.drain(0.1)
        await gateway.stop()
        assert time.monotonic() - started_s < WAIT_S
        assert (await streaming.rest(answer)).body == b"data: " + json.dumps(expected).encode() + b"\n\n"
        assert not answer.whole
        refused = await waiting.answer()
        assert (refused.status, refused.json()) == (503, expected)
    names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    assert not any(name.startswith(("RequestHandler", "Gateway")) for name in names)


async def test_ordinary_client_library(gateway: Gateway) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/embeddings", json={"prompt": "x"}) as answer,
    ):
        assert answer.status == 200
        assert (await answer.json())["body"] == '{"prompt": "x"}'
