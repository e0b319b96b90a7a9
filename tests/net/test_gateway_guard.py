"""Who may use the API, and what is refused before it gets anywhere."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from mesh_llm.errors import MeshError, UsageError
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health
from mesh_llm.types import State
from tests.support.raw_http import RawClient, connect, request_bytes
from tests.support.upstream import KEY, FakeEngine, FakeNode

StartGateway = Callable[[GatewayConfig], Awaitable[Gateway]]
SECRET = "sk-mesh-1"


# -- with a key ---------------------------------------------------------------------------------


@pytest.fixture
async def keyed(start_gateway: StartGateway) -> Gateway:
    return await start_gateway(GatewayConfig(port=0, api_key=SECRET))


@pytest.mark.parametrize(
    "header",
    [f"Authorization: Bearer {SECRET}", f"authorization: bearer {SECRET}", f"x-api-key: {SECRET}"],
)
async def test_key_opens(keyed: Gateway, engine: FakeEngine, header: str) -> None:
    async with connect(keyed.port) as client:
        answer = await client.request(
            "GET", "/v1/models", "Host: api.example", "Origin: http://a.example", header
        )
    assert answer.status == 200
    # The client's key stops here.
    assert engine.seen[0].header("Authorization") == [f"Bearer {KEY}"]
    assert engine.seen[0].header("x-api-key") == []


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Authorization: Bearer wrong"],
        ["Authorization: Bearer "],
        [f"Authorization: Basic {SECRET}"],
        [f"Authorization: {SECRET}"],
        [f"Authorization: Bearer {SECRET}x"],
        [f"Authorization: Bearer {SECRET[:-1]}"],
        ["x-api-key: wrong"],
        ["x-api-key: é"],
        [f"Authorization: Bearer {KEY}"],
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/healthy", "/health/../v1/models", "/%68ealth/x"]
)
async def test_without_the_key_nothing_opens(
    keyed: Gateway, engine: FakeEngine, headers: list[str], path: str
) -> None:
    async with connect(keyed.port) as client:
        answer = await client.request("GET", path, *headers)
    assert answer.status == 401
    assert answer.header("WWW-Authenticate") == ["Bearer"]
    assert answer.json() == {
        "error": {
            "message": "this API needs a key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            "type": "authentication_error",
            "code": "invalid_api_key",
        }
    }
    assert engine.seen == []


async def test_health_and_preflights_need_no_key(keyed: Gateway, engine: FakeEngine) -> None:
    async with connect(keyed.port) as client:
        assert (await client.request("GET", "/health")).json() == {"status": "ok", "state": "serving"}
        assert (await client.request("GET", "/v1/health")).status == 200
        asks = ["Origin: http://a.example", "Access-Control-Request-Method: POST"]
        assert (await client.request("OPTIONS", "/v1/models", *asks)).status == 200
        assert (await client.request("OPTIONS", "/v1/models")).status == 401
    assert engine.seen == []


async def test_empty_key_is_refused(node: FakeNode) -> None:
    with pytest.raises(UsageError, match="the API key is empty"):
        await Gateway(GatewayConfig(port=0, api_key=" "), node).start()


def test_keys_are_not_shown() -> None:
    assert SECRET not in repr(GatewayConfig(api_key=SECRET))
    assert KEY not in repr(FakeEngine().upstream)


async def test_health_tells_names_to_holders_of_the_key(keyed: Gateway, node: FakeNode) -> None:
    with_key = f"x-api-key: {SECRET}"
    async with connect(keyed.port) as client:
        assert (await client.request("GET", "/health", with_key)).json()["model"] == "tiny"
        node.state = Health(state=State.LOADING, reason="attic loads tiny", model="tiny")
        assert (await client.request("GET", "/health", with_key)).json()["reason"] == "attic loads tiny"
        for header in ("x-api-key: wrong", "X: 1"):
            answer = await client.request("GET", "/health", header)
            assert (answer.status, answer.json()["state"]) == (503, "loading")
            assert b"tiny" not in answer.body
            assert b"attic" not in answer.body


# -- without one --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:9337", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:9337"]
)
async def test_names_of_this_machine(client: RawClient, host: str) -> None:
    assert (await client.request("GET", "/props", f"Host: {host}")).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "localhost.",
        "127.0.0.1.evil.example",
        "localhost:80:80",
        "localhost@evil.example",
        "evil.example#localhost",
        "127.0.0.2",
        "0.0.0.0",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/props", "/health", "/metrics"])
async def test_other_names_are_refused(client: RawClient, engine: FakeEngine, host: str, path: str) -> None:
    answer = await client.request("GET", path, f"Host: {host}")
    assert answer.status == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert answer.json()["error"]["code"] == "foreign_host"
    assert engine.seen == []


@pytest.mark.parametrize("lines", ["", "Host: localhost\r\nHost: evil.example\r\n"])
async def test_no_name_and_two_names_are_refused(client: RawClient, engine: FakeEngine, lines: str) -> None:
    await client.send(f"GET /props HTTP/1.1\r\n{lines}\r\n".encode())
    assert (await client.answer()).status in (400, 403)
    assert engine.seen == []


@pytest.mark.parametrize(
    "origin", ["http://localhost", "https://localhost:5173", "http://127.0.0.1:9337", "http://[::1]:80"]
)
async def test_pages_of_this_machine(client: RawClient, origin: str) -> None:
    assert (await client.request("POST", "/tokenize", f"Origin: {origin}", body=b"{}")).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "http://localhost.evil.example",
        "http://localhost:80@evil.example",
        "http://localhost/evil",
        "file://localhost",
        "chrome-extension://abc",
        "http://192.168.1.5",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_other_pages_are_refused(
    client: RawClient, engine: FakeEngine, origin: str, method: str
) -> None:
    answer = await client.request(method, "/v1/chat/completions", f"Origin: {origin}")
    assert answer.status == 403
    assert answer.json()["error"]["code"] == "foreign_origin"
    assert [name for name in answer.headers if name[0].lower().startswith("access-control")] == []
    assert engine.seen == []


# -- what pages may read ------------------------------------------------------------------------

PAGE = "http://localhost:5173"
ALLOWED = "Access-Control-Allow-Origin"


async def test_pages_may_read_our_own_answers(client: RawClient, node: FakeNode) -> None:
    for path in ("/health", "/metrics"):
        assert (await client.request("GET", path, f"Origin: {PAGE}")).header(ALLOWED) == [PAGE]
        assert (await client.request("HEAD", path, f"Origin: {PAGE}")).header(ALLOWED) == [PAGE]
        assert (await client.request("GET", path)).header(ALLOWED) == []
    node.where, node.state = None, Health(state=State.LOADING, reason="the model is loading", model="tiny")
    for path in ("/health", "/v1/models"):
        answer = await client.request("GET", path, f"Origin: {PAGE}")
        assert (answer.status, answer.header(ALLOWED)) == (503, [PAGE])


async def test_a_preflight_is_answered_while_the_model_loads(client: RawClient, node: FakeNode) -> None:
    node.where, node.state = None, Health(state=State.LOADING, reason="the model is loading", model="tiny")
    for path in ("/v1/chat/completions", "/health", "/no/such/path"):
        answer = await client.request(
            "OPTIONS", path, f"Origin: {PAGE}", "Access-Control-Request-Method: POST"
        )
        assert (answer.status, answer.body) == (200, b"")
        told = {name.lower(): value for name, value in answer.headers}
        assert {name: value for name, value in told.items() if name.startswith("access-control-")} == {
            "access-control-allow-origin": PAGE,
            "access-control-allow-credentials": "true",
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": "*",
        }
        assert told["content-type"] == "text/html"


async def test_pages_may_read_that_they_need_the_key(keyed: Gateway, engine: FakeEngine) -> None:
    origin = "https://a.example"
    async with connect(keyed.port) as client:
        answer = await client.request("GET", "/v1/models", f"Origin: {origin}")
        assert (answer.status, answer.header(ALLOWED)) == (401, [origin])
        # It is copied into an answer: nothing that is not plain text is.
        answer = await client.request("GET", "/v1/models", "Origin: https://\u00e9.example")
        assert (answer.status, answer.header(ALLOWED)) == (401, [])
        answer = await client.request("GET", "/v1/models", f"Origin: {origin}", "Origin: https://b.example")
        assert (answer.status, answer.header(ALLOWED)) == (401, [])
    assert engine.seen == []


async def test_a_local_page_that_calls_us_by_another_name_reads_nothing(client: RawClient) -> None:
    answer = await client.request("GET", "/health", "Host: evil.example", f"Origin: {PAGE}")
    assert (answer.status, answer.header(ALLOWED)) == (403, [])


# -- what is not even a request -----------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET /props HTTP/1.1\r\nHost: localhost\r\nX-A: 1\rX-B: 2\r\n\r\n",
        b"GET /props HTTP/1.1\r\nHost: localhost\r\nX-A: a\x00b\r\n\r\n",
        b"GET /props HTTP/1.1\r\nHost: localhost\r\nX A: 1\r\n\r\n",
        b"GET /props HTTP/1.1\r\nHost: localhost\r\n folded: 1\r\n\r\n",
        b"GET /pro\x01ps HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /props HTTP/1.1\r\nHost: localhost\r\nAccept: \xff\xfe\r\n\r\n",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: -3\r\n\r\nabc",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\nabc",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    ],
)
async def test_unreadable_requests(client: RawClient, engine: FakeEngine, raw: bytes) -> None:
    await client.send(raw)
    answer = await client.answer()
    assert answer.status == 400
    assert answer.header("Content-Type") == ["application/json"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.header("Connection") == ["close"]
    assert await client.end() == b""
    assert engine.seen == []


async def test_percent_encoded_line_breaks_stay_encoded(client: RawClient, engine: FakeEngine) -> None:
    assert (await client.request("GET", "/props%0d%0aX-Injected:%201?a=%0d%0ab")).status == 404
    target = "/v1/models?x%0D%0AX-Injected%3A%201&a=%0d%0ab"
    assert (await client.request("GET", target)).status == 200
    assert engine.seen[0].target == target
    assert engine.seen[0].header("X-Injected") == []


@pytest.mark.parametrize(
    "raw",
    [
        request_bytes("GET", "/props", "X-Long: " + "x" * (17 << 10)),
        request_bytes("GET", "/props?" + "x" * (17 << 10)),
    ],
)
async def test_overlong_headers(client: RawClient, engine: FakeEngine, raw: bytes) -> None:
    await client.send(raw)
    answer = await client.answer()
    assert answer.status == 431
    assert answer.json()["error"]["code"] == "header_too_large"
    assert engine.seen == []


async def test_unknown_expectation(client: RawClient, engine: FakeEngine) -> None:
    answer = await client.request("POST", "/tokenize", "Expect: the-unexpected", body=b"{}")
    assert answer.status == 417
    assert engine.seen == []


# -- TLS ----------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


async def test_tls(start_gateway: StartGateway, certificate: tuple[Path, Path], engine: FakeEngine) -> None:
    cert, key = certificate
    gateway = await start_gateway(GatewayConfig(port=0, api_key=SECRET, tls_cert=cert, tls_key=key))
    assert gateway.url == f"https://127.0.0.1:{gateway.port}"
    context = ssl.create_default_context(cafile=str(cert))
    headers = {"Authorization": f"Bearer {SECRET}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.url}/props", ssl=context, headers=headers) as answer,
    ):
        assert answer.status == 200
    assert engine.seen[0].target == "/props"


async def test_unusable_certificate(node: FakeNode, tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    with pytest.raises(MeshError, match=r"cannot read the certificate .*: No such file or directory"):
        await Gateway(GatewayConfig(port=0, tls_cert=cert), node).start()
    cert.write_text("not a certificate")
    with pytest.raises(MeshError, match="and its key cannot be used"):
        await Gateway(GatewayConfig(port=0, tls_cert=cert), node).start()
