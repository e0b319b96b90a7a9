"""Requests for a model that is loaded on demand: they load it, wait for it, and hear how far it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh_llm.gateway import engine_choice
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health, Upstream
from mesh_llm.types import State
from tests.net.conftest import StartGateway
from tests.support.raw_http import RawClient, request_bytes
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, FakeEngine, FakeNode, fake_engine, sends

AT_HAND = Health(state=State.WAITING, reason="it is at hand", model="coder", loads=True)
LOADING = Health(state=State.LOADING, reason="layers are loaded: 40 %", model="coder", loads=True)
TOO_BIG = Health(state=State.WAITING, reason="need 55.0 GB, have 31.5 GB", model="coder")
CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def coder() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as engine:
        yield engine


@pytest.fixture
def model() -> FakeNode:
    return FakeNode(names=("coder",), state=AT_HAND)


@pytest.fixture
def node(engine: FakeEngine, model: FakeNode) -> FakeNode:
    return FakeNode(where=engine.upstream, others=[model])


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Gateway:
    return await start_gateway(GatewayConfig(port=0, limits=Limits(beat_s=0.1)))


def question(path: str = "/v1/embeddings", *headers: str, **body: Any) -> bytes:
    text = json.dumps({"model": "coder", "input": "x", **body}).encode()
    return request_bytes("POST", path, "Content-Type: application/json", *headers, body=text)


async def loaded(model: FakeNode, where: Upstream) -> None:
    """As soon as somebody waits for it."""
    async with asyncio.timeout(30):
        while not model.wanted:
            await asyncio.sleep(0.01)
    model.state = LOADING
    await asyncio.sleep(0.3)
    model.where, model.state = where, Health(state=State.SERVING, reason="", model="coder")


async def test_a_request_loads_it_and_is_answered(
    client: RawClient, model: FakeNode, coder: FakeEngine
) -> None:
    await client.send(question())
    await loaded(model, coder.upstream)
    assert (await client.answer()).status == 200
    assert len(coder.seen) == 1


async def test_a_stream_is_told_how_far_it_is(client: RawClient, model: FakeNode, coder: FakeEngine) -> None:
    coder.on(CHAT, sends(SSE_HEAD, b"%x\r\n%b\r\n" % (len(EVENT + DONE), EVENT + DONE), LAST_CHUNK))
    await client.send(question(CHAT, stream=True, messages=[]))
    await loaded(model, coder.upstream)
    answer = await client.answer()
    assert (answer.status, answer.header("Content-Type")) == (200, ["text/event-stream"])
    assert b": mesh-llm layers are loaded: 40 %\n" in answer.body
    assert answer.body.endswith(EVENT + DONE)


async def test_an_engines_refusal_reaches_a_stream_that_has_waited(
    client: RawClient, model: FakeNode, coder: FakeEngine
) -> None:
    refusal = json.dumps({"error": {"code": 400, "message": "no such role", "type": "invalid"}}).encode()
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    coder.on(CHAT, sends(head % len(refusal) + refusal))
    await client.send(question(CHAT, stream=True, messages=[]))
    await loaded(model, coder.upstream)
    assert b"no such role" in (await client.answer()).body


async def test_what_does_not_fit_is_refused_with_the_figures(client: RawClient, model: FakeNode) -> None:
    model.state = TOO_BIG
    await client.send(question())
    answer = await client.answer()
    assert answer.status == 503
    assert json.loads(answer.body)["error"]["message"] == "need 55.0 GB, have 31.5 GB"
    assert model.wanted


async def test_no_request_waits_without_a_bound(
    client: RawClient, model: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "GATEWAY_LOAD_S", 0.3)
    model.state = LOADING
    await client.send(question())
    assert (await client.answer()).status == 503
    # A client that says how long it waits is believed.
    monkeypatch.setattr(engine_choice, "GATEWAY_LOAD_S", 300.0)
    await client.send(question("/v1/embeddings", "Prefer: wait=0"))
    assert (await client.answer()).status == 503


async def test_whoever_only_looks_has_nothing_loaded(client: RawClient, model: FakeNode) -> None:
    await client.send(request_bytes("GET", "/props?model=coder"))
    assert (await client.answer()).status == 503
    await client.send(request_bytes("GET", "/v1/models"))
    listed = json.loads((await client.answer()).body)["data"]
    assert [each["status"]["value"] for each in listed] == ["loaded", "unloaded"]
    assert not model.wanted
