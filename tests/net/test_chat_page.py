"""The page at the API's own address: from this node's files, with a policy of its own, key or no key."""

from __future__ import annotations

import gzip
import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest

from mesh_llm.gateway.chat_page import ChatPage
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health
from mesh_llm.types import State
from tests.support.raw_http import connect
from tests.support.upstream import FakeEngine, FakeNode

SCRIPT = "start();"
HEAD = '<!doctype html><head><link href="./theirs.css" rel="stylesheet">'
BODY = f"</head><title>chat</title><script>{SCRIPT}</script>"
INDEX = HEAD + BODY
SHOWN = f'{HEAD}<link rel="stylesheet" href="./mesh-llm.css">{BODY}'
BUNDLE = "_app/immutable/bundle.abc.js"
FILES = {
    "index.html": gzip.compress(INDEX.encode()),
    BUNDLE: gzip.compress(b"export const start = 1;"),
    "sw.js": gzip.compress(b"precache();"),
    "notes.exe": gzip.compress(b"no kind that a page has"),
}
KEY = "sk-mesh-1"


@pytest.fixture(params=[None, KEY])
async def shown(request: pytest.FixtureRequest, node: FakeNode) -> AsyncIterator[tuple[Gateway, ChatPage]]:
    page = ChatPage()
    gateway = Gateway(GatewayConfig(port=0, api_key=request.param), node, page)
    await gateway.start()
    yield gateway, page
    await gateway.stop()


async def test_it_is_shown_without_the_key(shown: tuple[Gateway, ChatPage], engine: FakeEngine) -> None:
    gateway, page = shown
    page.fill(FILES)
    async with connect(gateway.port) as client:
        plain = await client.request("GET", "/")
        packed = await client.request("GET", "/index.html", "Accept-Encoding: gzip, br")
        part = await client.request("GET", f"/{BUNDLE}", "Accept-Encoding: gzip")
        same = await client.request("GET", "/", f"If-None-Match: {plain.header('ETag')[0]}")
        worker = await client.request("GET", "/sw.js")
        style = await client.request("GET", "/mesh-llm.css")
        head = await client.request("HEAD", "/")
    assert plain.status == packed.status == part.status == head.status == 200
    assert plain.body.decode() == SHOWN
    assert gzip.decompress(packed.body).decode() == SHOWN
    assert packed.header("Content-Encoding") == ["gzip"]
    assert part.header("Content-Type") == ["text/javascript; charset=utf-8"]
    assert "immutable" in part.header("Cache-Control")[0]
    assert plain.header("Cache-Control") == ["no-cache"]
    assert (same.status, same.body) == (304, b"")
    assert b"precache" not in worker.body
    assert style.header("Content-Type") == ["text/css; charset=utf-8"]
    assert b"--muted-foreground" in style.body
    assert engine.seen == []


async def test_its_policy_allows_its_own_script_alone(shown: tuple[Gateway, ChatPage]) -> None:
    gateway, page = shown
    page.fill(FILES)
    async with connect(gateway.port) as client:
        answer = await client.request("GET", "/")
    (policy,) = answer.header("Content-Security-Policy")
    digest = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == f"'self' 'sha256-{digest}'"
    assert rules["connect-src"] == "'self'"
    assert answer.header("X-Content-Type-Options") == ["nosniff"]
    assert answer.header("Server") == ["mesh-llm"]


@pytest.mark.parametrize("path", ["/notes.exe", "/../index.html", "/_app", "/tools"])
async def test_nothing_else_is_public(shown: tuple[Gateway, ChatPage], node: FakeNode, path: str) -> None:
    gateway, page = shown
    page.fill(FILES)
    async with connect(gateway.port) as client:
        answer = await client.request("GET", path)
    assert answer.status in (400, 401, 404)


async def test_until_it_is_there_a_sentence_is(shown: tuple[Gateway, ChatPage]) -> None:
    gateway, page = shown
    async with connect(gateway.port) as client:
        before = await client.request("GET", "/")
        page.lack("the engine <none> is not installed")
        without = await client.request("GET", "/")
    assert before.status == without.status == 503
    assert b"The chat is being prepared." in before.body
    assert b'http-equiv="refresh"' in before.body
    assert b"There is no chat here: the engine &lt;none&gt; is not installed." in without.body
    assert b"refresh" not in without.body


async def test_while_nothing_is_served_it_says_so(shown: tuple[Gateway, ChatPage], node: FakeNode) -> None:
    gateway, page = shown
    page.fill(FILES)
    node.state = Health(state=State.LOADING, reason="the model is being loaded", model="tiny")
    async with connect(gateway.port) as client:
        answer = await client.request("GET", "/")
        knowing = await client.request("GET", "/", f"x-api-key: {KEY}")
        all_the_same = await client.request("GET", "/index.html")
    assert answer.status == 503
    assert answer.header("Content-Type") == ["text/html; charset=utf-8"]
    assert b"This node is loading" in answer.body
    assert b"This node is loading: the model is being loaded." in knowing.body
    assert b'http-equiv="refresh"' in answer.body
    assert (all_the_same.status, all_the_same.body.decode()) == (200, SHOWN)


async def test_other_names_are_refused_where_there_is_no_key(node: FakeNode) -> None:
    page = ChatPage()
    page.fill(FILES)
    gateway = Gateway(GatewayConfig(port=0), node, page)
    await gateway.start()
    async with connect(gateway.port) as client:
        answer = await client.request("GET", "/", "Host: elsewhere.example")
    await gateway.stop()
    assert answer.status == 403
