"""Several models behind one API: which one a request is for, and what the list tells."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health
from mesh_llm.types import State
from tests.net.conftest import StartGateway
from tests.support.raw_http import RawClient, connect, request_bytes
from tests.support.upstream import FakeEngine, FakeNode, fake_engine

EMBED = "/v1/embeddings"


@pytest.fixture
async def coder() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as engine:
        yield engine


@pytest.fixture
def node(engine: FakeEngine, coder: FakeEngine) -> FakeNode:
    second = FakeNode(where=coder.upstream, names=("coder-7b", "qwen-coder"))
    waiting = FakeNode(
        names=("big",), state=Health(state=State.LOADING, reason="big is loading", model="big")
    )
    return FakeNode(where=engine.upstream, names=("tiny",), others=[second, waiting])


async def asked(client: RawClient, model: object = None, **more: Any) -> tuple[int, Any]:
    body = json.dumps({"input": "x", **({} if model is None else {"model": model}), **more}).encode()
    await client.send(request_bytes("POST", EMBED, "Content-Type: application/json", body=body))
    answer = await client.answer()
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(
    "name", ["coder-7b", "qwen-coder", "Coder-7B", "coder", "QWEN", "coder:7b", "qwen:latest"]
)
async def test_a_request_goes_to_the_model_that_it_names(
    client: RawClient, engine: FakeEngine, coder: FakeEngine, name: str
) -> None:
    assert (await asked(client, name))[0] == 200
    assert (len(engine.seen), len(coder.seen)) == (0, 1)


@pytest.mark.parametrize("name", [None, "", "tiny", 7])
async def test_a_request_that_names_none_goes_to_the_default_one(
    client: RawClient, engine: FakeEngine, coder: FakeEngine, name: object
) -> None:
    assert (await asked(client, name))[0] == 200
    assert (len(engine.seen), len(coder.seen)) == (1, 0)


async def test_a_whole_name_goes_before_the_beginning_of_another(
    client: RawClient, node: FakeNode, engine: FakeEngine
) -> None:
    node.others = [FakeNode(names=("tiny-2",)), *node.others]
    assert (await asked(client, "tiny:latest"))[0] == 200
    assert len(engine.seen) == 1


async def test_a_name_as_it_is_written_goes_before_one_with_other_hyphens(
    client: RawClient, node: FakeNode, coder: FakeEngine
) -> None:
    node.others = [FakeNode(names=("coder7b",)), *node.others]
    assert (await asked(client, "Coder-7B"))[0] == 200
    assert len(coder.seen) == 1


async def test_an_unknown_name_is_refused_with_the_list(client: RawClient, engine: FakeEngine) -> None:
    status, answer = await asked(client, "gpt-4o")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "tiny, coder-7b, big" in answer["error"]["message"]
    assert not engine.seen


@pytest.mark.parametrize("name", ["coder", "cod", "Qwen"])
async def test_a_beginning_that_several_have_means_none(
    client: RawClient, node: FakeNode, engine: FakeEngine, coder: FakeEngine, name: str
) -> None:
    node.others = [*node.others, FakeNode(names=("coder-1b", "qwen-small"))]
    status, answer = await asked(client, name)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert not engine.seen + coder.seen
    assert (await asked(client, f"{name}-7b"))[0] == (200 if name == "coder" else 404)


async def test_where_one_model_is_served_every_name_means_it(
    node: FakeNode, client: RawClient, engine: FakeEngine
) -> None:
    node.others = []
    assert (await asked(client, "gpt-4o"))[0] == 200
    assert len(engine.seen) == 1


async def test_a_model_that_loads_says_so_and_others_answer(client: RawClient) -> None:
    status, answer = await asked(client, "big")
    assert status == 503
    assert "big is loading" in answer["error"]["message"]
    assert (await asked(client, "tiny"))[0] == 200


async def test_a_name_in_the_query(client: RawClient, coder: FakeEngine) -> None:
    await client.send(request_bytes("GET", "/props?model=coder-7b"))
    await client.answer()
    assert [seen.target for seen in coder.seen] == ["/props?model=coder-7b"]


async def test_a_name_in_a_form(client: RawClient, coder: FakeEngine) -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF\r\n"
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ncoder-7b\r\n--x--\r\n'
    )
    head = "Content-Type: multipart/form-data; boundary=x"
    await client.send(request_bytes("POST", "/v1/audio/transcriptions", head, body=form))
    assert (await client.answer()).status == 200
    assert len(coder.seen) == 1


async def test_the_name_of_a_model_behind_megabytes(
    start_gateway: StartGateway, engine: FakeEngine, coder: FakeEngine
) -> None:
    """Some clients write it last."""
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(replay_bytes=1000)))
    body = json.dumps({"input": "x" * 500_000, "model": "coder-7b"}).encode()
    async with connect(gateway.port) as client:
        answer = await client.request("POST", EMBED, body=body)
    assert answer.json()["size"] == len(body)
    assert (len(engine.seen), len(coder.seen)) == (0, 1)


async def test_a_name_that_there_is_no_room_to_look_for(
    start_gateway: StartGateway, engine: FakeEngine, coder: FakeEngine
) -> None:
    """Nobody is answered by a model that was not asked for."""
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(kept_bytes=1000)))
    long = json.dumps({"input": "x" * 500_000, "model": "coder-7b"}).encode()
    async with connect(gateway.port) as client:
        refused = await client.request("POST", EMBED, body=long)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "bodies_full")
    async with connect(gateway.port) as client:
        assert (await client.request("POST", f"{EMBED}?model=coder-7b", body=long)).status == 200
    async with connect(gateway.port) as client:
        assert (
            await client.request("POST", EMBED, body=b'{"input": "x", "model": "coder-7b"}')
        ).status == 200
    assert (len(engine.seen), len(coder.seen)) == (0, 2)


async def test_the_list_has_every_model_and_its_state(client: RawClient, engine: FakeEngine) -> None:
    listed = {"object": "list", "data": [{"id": "tiny", "meta": {"n_ctx": 512}}]}

    async def tell(_: object, wire: Any) -> None:
        body = json.dumps(listed).encode()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    engine.on("/v1/models", tell)
    await client.send(request_bytes("GET", "/v1/models"))
    data = json.loads((await client.answer()).body)["data"]
    assert [(each["id"], each["status"]["value"]) for each in data] == [
        ("tiny", "loaded"),
        ("coder-7b", "loaded"),
        ("big", "loading"),
    ]
    assert data[0]["meta"] == {"n_ctx": 512}
    assert data[1]["aliases"] == ["qwen-coder"]
    assert data[2]["status"]["reason"] == "big is loading"


async def test_a_model_that_makes_embeddings_is_told_whatever_its_engine_says(
    client: RawClient, node: FakeNode, coder: FakeEngine
) -> None:
    node.others[0].gives = ("embeddings",)
    says = {"input_modalities": ["text", "image"], "output_modalities": ["text"]}

    async def tell(_: object, wire: Any) -> None:
        body = json.dumps({"data": [{"id": "coder-7b", "architecture": says}]}).encode()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    coder.on("/v1/models", tell)
    await client.send(request_bytes("GET", "/v1/models"))
    data = json.loads((await client.answer()).body)["data"]
    assert data[1]["architecture"] == {**says, "output_modalities": ["embeddings"]}


async def test_health_is_that_of_the_default_model(gateway: Gateway, client: RawClient) -> None:
    await client.send(request_bytes("GET", "/health"))
    assert json.loads((await client.answer()).body)["model"] == "tiny"
