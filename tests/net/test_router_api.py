"""llama-server's router API: models loaded and unloaded by clients that may, and watched."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.errors import MeshError, NotOwner, UsageError
from mesh_llm.gateway import access, router_api
from mesh_llm.gateway.keys import Keys, NewKey
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health
from mesh_llm.types import State
from tests.net.conftest import StartGateway
from tests.support.raw_http import RawClient, connect, request_bytes
from tests.support.upstream import FakeEngine, FakeNode

AT_HAND = Health(state=State.WAITING, reason="it is at hand", model="coder", loads=True)


@pytest.fixture
def coder() -> FakeNode:
    return FakeNode(names=("coder", "qwen-coder"), state=AT_HAND)


@pytest.fixture
def node(engine: FakeEngine, coder: FakeNode) -> FakeNode:
    return FakeNode(where=engine.upstream, others=[coder])


async def post(client: RawClient, path: str, body: object, *headers: str) -> tuple[int, dict[str, object]]:
    answer = await client.request("POST", path, *headers, body=json.dumps(body).encode())
    document = answer.json()
    assert isinstance(document, dict)
    return answer.status, document


async def test_models_are_loaded_and_unloaded(client: RawClient, node: FakeNode, coder: FakeNode) -> None:
    assert await post(client, "/models/load", {"model": "Qwen-Coder"}) == (200, {"success": True})
    coder.state = Health(state=State.SERVING, reason="", model="coder")
    assert await post(client, "/models/unload", {"model": "coder"}) == (200, {"success": True})
    assert await post(client, "/models/load", {"model": "another"}) == (200, {"success": True})
    assert node.managed == [("load", "coder"), ("unload", "coder"), ("load", "another")]


async def test_what_is_so_already_is_refused_as_llama_server_does(client: RawClient, node: FakeNode) -> None:
    for path, name, word in (
        ("/models/load", "tiny", "is already running"),
        ("/models/unload", "coder", "is not running"),
        ("/models/unload", "nosuch", "is not running"),
    ):
        status, answer = await post(client, path, {"model": name})
        assert status == 400
        assert word in str(answer)
    assert node.managed == []


@pytest.mark.parametrize("body", [{}, {"model": 7}, {"model": ""}, [], "x"])
async def test_a_body_without_a_name(client: RawClient, node: FakeNode, body: object) -> None:
    status, answer = await post(client, "/models/load", body)
    assert (status, node.managed) == (400, [])
    assert "name the model" in str(answer)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotOwner("only owners of the mesh choose its models"), 403),
        (UsageError("name a model by its name"), 400),
        (MeshError("this node has no model yet"), 409),
    ],
)
async def test_the_nodes_refusal_is_a_sentence(
    client: RawClient, node: FakeNode, error: MeshError, expected: int
) -> None:
    node.refusal = error
    status, answer = await post(client, "/models/load", {"model": "coder"})
    assert status == expected
    assert error.message in str(answer)


async def test_a_key_is_needed_where_there_is_one(node: FakeNode, start_gateway: StartGateway) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, api_key="secret"))
    async with connect(gateway.port) as client:
        assert (await post(client, "/models/load", {"model": "coder"}))[0] == 401
    async with connect(gateway.port) as client:
        key = "Authorization: Bearer secret"
        assert (await post(client, "/models/load", {"model": "coder"}, key))[0] == 200


async def test_another_user_of_the_machine_may_ask_and_not_manage(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "is_of_another_user", lambda _: True)
    gateway = Gateway(GatewayConfig(port=0), node)
    await gateway.start()
    try:
        async with connect(gateway.port) as client:
            await refused(client, "/models/unload", "coder")
            assert node.managed == []
            assert (await client.request("GET", "/models")).status == 200
    finally:
        await gateway.stop()


async def refused(client: RawClient, path: str, model: str, *headers: str) -> None:
    status, answer = await post(client, path, {"model": model}, *headers)
    assert status == 403
    assert "may not load or unload models" in str(answer)


async def test_who_may_ask_may_load_what_a_question_would_load(
    node: FakeNode, coder: FakeNode, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """At the price of a question. It changes nothing else, not even for the worse."""
    _, key = Keys(tmp_path / "keys.json").add(NewKey(name="anna", requests_per_day=1), time.time())
    asks = f"Authorization: Bearer {key}"
    gateway = await start_gateway(GatewayConfig(port=0, api_key="secret", keys_file=tmp_path / "keys.json"))
    async with connect(gateway.port) as client:
        for path, model in (
            ("/models/load", "another"),
            ("/models/unload", "coder"),
            ("/models/unload", "tiny"),
        ):
            await refused(client, path, model, asks)
        coder.state = replace(AT_HAND, loads=False)
        await refused(client, "/models/load", "coder", asks)
        coder.state = AT_HAND
        assert await post(client, "/models/load", {"model": "coder"}, asks) == (200, {"success": True})
        status, answer = await post(client, "/models/load", {"model": "coder"}, asks)
        assert (status, answer["error"]["type"]) == (429, "requests")  # type: ignore[index]
    assert node.managed == [("load", "coder")]


async def test_changes_are_told_as_events(
    client: RawClient, gateway: Gateway, coder: FakeNode, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_api, "ROUTER_LOOK_S", 0.01)
    await client.send(request_bytes("GET", "/models/sse"))
    head = await client.head()
    assert head.header("Content-Type") == ["text/event-stream"]
    assert (await client.chunk()).startswith(b":")
    await asyncio.sleep(0.05)
    coder.state = Health(state=State.LOADING, reason="40 %", model="coder", loads=True)
    assert await told(client) == {
        "model": "coder",
        "event": "model_status",
        "data": {"status": "loading", "reason": "40 %"},
    }
    node.others = []
    assert await told(client) == {"model": "coder", "event": "model_remove"}
    node.others = [coder]
    assert await told(client) == {"model": "*", "event": "models_reload"}
    assert (await told(client))["data"] == {"status": "loading", "reason": "40 %"}
    # Whoever watches does not hold up the end of a node.
    async with asyncio.timeout(5):
        await gateway.drain(30)


async def told(client: RawClient) -> dict[str, object]:
    while (chunk := await client.chunk()).startswith(b":"):
        pass
    document = json.loads(chunk.removeprefix(b"data: "))
    assert isinstance(document, dict)
    return document


async def test_several_models_are_a_router(client: RawClient, engine: FakeEngine) -> None:
    async def props(_: object, wire: object) -> None:
        body = b'{"model_path":"/home/ann/x.gguf","model_alias":"tiny"}'
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))  # type: ignore[attr-defined]

    engine.on("/props", props)
    answer = (await client.request("GET", "/props")).json()
    assert (answer["role"], answer["model_path"]) == ("router", "tiny")
    assert "role" not in (await client.request("GET", "/props?model=tiny")).json()


async def test_one_model_is_told_with_its_state_and_abilities(client: RawClient) -> None:
    answer = (await client.request("GET", "/v1/models/coder")).json()
    assert answer["id"] == "coder"
    assert answer["status"] == {"value": "unloaded", "args": [], "reason": "it is at hand"}
    assert answer["context_length"] == 512
    assert answer["on_demand"] is True
    assert answer["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert (await client.request("GET", "/v1/models/nosuch")).status == 404
