"""Guests on the local network: what they reach with a key, and that nobody else reaches anything."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.gateway.certificate import certificate, fingerprint
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.home import Home
from mesh_llm.node.sharing import Sharing, local_address
from tests.net.conftest import StartGateway
from tests.net.test_gateway_keys import CHAT, EVENTS, streams
from tests.support.upstream import FakeEngine

OWN = "the-key-of-the-node"
HERE: dict[str, Any] = {"listen": "127.0.0.1", "port": 0}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
async def gateway(start_gateway: StartGateway, home: Home) -> Gateway:
    home.create()
    return await start_gateway(
        GatewayConfig(port=0, api_key=OWN, keys_file=home.keys_file, key_usage_file=home.key_usage_file)
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def sharing(gateway: Gateway, home: Home, said: list[str]) -> Sharing:
    return Sharing(gateway, home, NodeConfig(home=home.path), lambda _, text: said.append(text))


def trusting(home: Home) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(home.certificate_file))


@asynccontextmanager
async def browser(sharing: Sharing, home: Home, key: str = "") -> AsyncIterator[aiohttp.ClientSession]:
    """One that trusts the certificate, and checks that it is for this address."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(ssl=trusting(home))
    async with aiohttp.ClientSession(sharing.url, connector=connector, headers=headers) as session:
        yield session


async def test_nothing_is_shared_by_itself(sharing: Sharing, home: Home) -> None:
    assert sharing.url is None
    assert not home.certificate_file.exists()
    assert await sharing.stop({}) == {"stopped": None, "revoked": []}


async def test_a_guest_asks_with_a_key_of_its_own(
    sharing: Sharing, gateway: Gateway, home: Home, engine: FakeEngine, said: list[str]
) -> None:
    engine.on(CHAT, streams(*EVENTS))
    made = await sharing.share({**HERE, "name": "anna", "requests_per_day": 1, "manage": True})
    assert made["url"] == f"{sharing.url}/share#key={made['key']}"
    async with browser(sharing, home, made["key"]) as session:
        async with session.post(CHAT, json={"messages": []}) as answer:
            assert (answer.status, (await answer.json())["usage"]["prompt_tokens"]) == (200, 9)
        async with session.post(CHAT, json={"messages": []}) as answer:
            assert answer.status == 429
        # It may ask, and nothing else.
        async with session.get("/metrics") as answer:
            assert answer.status == 403
    [report] = gateway.key_usage.reports()
    assert (report.key.name, report.key.guest, report.key.manage) == ("anna", True, False)
    assert report.key.expires is not None
    assert made["key"] not in str(said)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/api/status", "/api/share", "/props", "/console"]
)
@pytest.mark.parametrize("key", ["", OWN, "mk-00000000-" + "A" * 43])
async def test_without_a_guests_key_nothing_opens(
    sharing: Sharing, home: Home, engine: FakeEngine, path: str, key: str
) -> None:
    """Not even with the node's own: it was not made for the network."""
    await sharing.share(HERE)
    async with browser(sharing, home, key) as session, session.get(path) as answer:
        assert answer.status == 401
    assert engine.seen == []


@pytest.mark.parametrize("path", ["/api/status", "/api/keys", "/api/share", "/api/stop", "/console"])
async def test_controls_are_not_there(sharing: Sharing, home: Home, path: str) -> None:
    made = await sharing.share(HERE)
    async with browser(sharing, home, made["key"]) as session:
        for method in ("GET", "POST"):
            async with session.request(method, path) as answer:
                assert answer.status == 404


async def test_the_page_needs_no_key_and_runs_nothing_but_its_own_script(
    sharing: Sharing, home: Home
) -> None:
    await sharing.share(HERE)
    async with browser(sharing, home) as session:
        async with session.get("/share") as answer:
            page = await answer.text()
            assert answer.status == 200
            assert answer.headers["Content-Security-Policy"].startswith(
                "default-src 'none'; script-src 'self';"
            )
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert '<script src="/share.js" defer></script>' in page
        async with session.get("/share.js") as answer:
            assert (answer.status, answer.content_type) == (200, "text/javascript")
        async with session.post("/share") as answer:
            assert answer.status == 401


async def test_a_revoked_guest_is_out_at_once_and_others_stay(
    sharing: Sharing, gateway: Gateway, home: Home
) -> None:
    one, two = [await sharing.share(HERE if not name else {"name": name}) for name in ("", "bert")]
    assert (one["name"], one["url"].partition("/share")[0]) == ("guest", sharing.url)
    async with browser(sharing, home, one["key"]) as first, browser(sharing, home, two["key"]) as second:
        gateway.keys.revoke("guest")
        async with first.get("/v1/models") as answer:
            assert answer.status == 401
        async with second.get("/v1/models") as answer:
            assert answer.status == 200


async def test_the_end_closes_the_port_and_takes_guests_keys_back_on_request(
    sharing: Sharing, gateway: Gateway, home: Home
) -> None:
    made = await sharing.share(HERE)
    await sharing.share({})
    url, at = sharing.url, gateway.shared_at
    assert at is not None
    async with browser(sharing, home, made["key"]) as session, session.get("/v1/models") as answer:
        assert answer.status == 200
    assert await sharing.stop({}) == {"stopped": url, "revoked": []}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*at)
    assert len(gateway.keys.all()) == 2
    assert await sharing.stop({"revoke": True}) == {"stopped": None, "revoked": ["guest", "guest-2"]}
    # And it opens again.
    await sharing.share(HERE)
    assert sharing.url is not None


async def test_keys_of_guests_are_in_no_log(
    sharing: Sharing, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = await sharing.share(HERE)
    async with browser(sharing, home, made["key"]) as session:
        for path in ("/share", "/v1/models", "/nothing"):
            async with session.get(path):
                pass
    assert "GET /share 200" in caplog.text
    assert made["key"].rpartition("-")[2] not in caplog.text


async def test_plain_http_gets_nothing(sharing: Sharing, gateway: Gateway) -> None:
    await sharing.share(HERE)
    assert gateway.shared_at is not None
    reader, writer = await asyncio.open_connection(*gateway.shared_at)
    writer.write(b"GET /share HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(20):
        assert b"HTTP" not in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"listen": "0.0.0.0"},
        {"listen": "desk.local"},
        {"port": 70000},
        {"port": "1"},
        {"name": "a b"},
        {"lifetime_s": "1d"},
    ],
)
async def test_what_cannot_be_is_refused_and_leaves_nothing(
    sharing: Sharing, gateway: Gateway, asked: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        await sharing.share({**HERE, **asked})
    assert (sharing.url, len(gateway.keys.all())) == (None, 0)


async def test_another_address_while_it_is_shared_is_refused(sharing: Sharing, gateway: Gateway) -> None:
    await sharing.share(HERE)
    with pytest.raises(MeshError, match="shared at"):
        await sharing.share({"listen": "127.0.0.2"})
    assert len(gateway.keys.all()) == 1


@pytest.mark.parametrize(
    ("address", "problem"),
    [("", "no local network"), ("127.0.0.1", "no local network"), ("9.9.9.9", "internet")],
)
def test_addresses_that_are_no_local_network(
    monkeypatch: pytest.MonkeyPatch, address: str, problem: str
) -> None:
    class Asking(socket.socket):
        def connect(self, at: Any) -> None:
            if not address:
                raise OSError("no route")

        def getsockname(self) -> Any:
            return (address, 1)

    monkeypatch.setattr(socket, "socket", Asking)
    with pytest.raises(MeshError, match=problem):
        local_address()


# -- the certificate ----------------------------------------------------------------------------


def test_a_certificate_is_kept_while_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "certificate.pem"
    first = fingerprint(certificate(file, ["192.168.1.7", "desk"]))
    assert file.stat().st_mode & 0o077 == 0
    assert fingerprint(certificate(file, ["192.168.1.7", "desk"])) == first
    other = fingerprint(certificate(file, ["192.168.1.8", "desk"]))
    assert other != first
    later = time.time() + 380 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert fingerprint(certificate(file, ["192.168.1.8", "desk"])) != other
    file.write_text("nonsense")
    assert fingerprint(certificate(file, ["192.168.1.8", "desk"]))


def test_openssl_takes_it(tmp_path: Path) -> None:
    file = certificate(tmp_path / "certificate.pem", ["10.0.0.1", "fd00::1", "desk.local"])

    def openssl(*arguments: str | Path) -> str:
        try:
            return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            pytest.skip("openssl is not installed")

    assert "OK" in openssl("verify", "-x509_strict", "-CAfile", file, file)
    told = openssl("x509", "-in", file, "-noout", "-text")
    assert "IP Address:10.0.0.1, IP Address:FD00:0:0:0:0:0:0:1, DNS:desk.local" in told
    assert "CA:FALSE" in told
    der = ssl.PEM_cert_to_DER_cert(openssl("x509", "-in", file))
    assert fingerprint(file).replace(":", "").lower() == hashlib.sha256(der).hexdigest()
