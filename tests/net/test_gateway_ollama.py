"""Ollama's API in front of an engine that speaks OpenAI's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.errors import NotOwner
from mesh_llm.gateway.keys import Keys, NewKey
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.routes import route_of
from mesh_llm.gateway.server import GatewayConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health
from mesh_llm.types import State
from tests.net.conftest import StartGateway
from tests.net.test_gateway_resume import CHAT, WORDS, chunk, event, hand_over, helps, says
from tests.support.raw_http import Answer, RawClient, connect
from tests.support.upstream import (
    LAST_CHUNK,
    SSE_HEAD,
    WAIT_S,
    FakeEngine,
    FakeNode,
    Script,
    Seen,
    Wire,
    fake_engine,
    plain,
)

USER = [{"role": "user", "content": "Where did it run?"}]
TEXT = "".join(WORDS)
HEAD = {"created": 1, "id": "a", "model": "tiny"}
USAGE = {"completion_tokens": 5, "prompt_tokens": 10, "total_tokens": 15}
TIMINGS = {"prompt_n": 10, "prompt_ms": 3.0, "predicted_n": 5, "predicted_ms": 2.0}
WEATHER = {"name": "weather", "arguments": {"city": "Rome"}}


@pytest.fixture
async def second() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as engine:
        yield engine


async def ask(client: RawClient, path: str, *headers: str, **body: Any) -> Answer:
    return await client.request("POST", path, *headers, body=json.dumps({"model": "tiny", **body}).encode())


def lines(answer: Answer) -> list[dict[str, Any]]:
    """Each is a document, as clients read them."""
    return [json.loads(line) for line in answer.body.decode().removesuffix("\n").split("\n")]


def tells(*events: bytes) -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for one in events:
            await wire.send_chunk(one)
        await wire.send(LAST_CHUNK)

    return script


def tells_document(document: Any, status: bytes = b"200 OK") -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        body = json.dumps(document).encode()
        await wire.send(plain(body, b"Content-Type: application/json").replace(b"200 OK", status, 1))

    return script


def ends(finish: str = "stop") -> list[bytes]:
    total = event({"choices": [], **HEAD, "usage": USAGE, "timings": TIMINGS})
    return [chunk("a", {}, finish_reason=finish), total, b"data: [DONE]\n\n"]


def body_of(engine: FakeEngine, path: str = CHAT) -> dict[str, Any]:
    (seen,) = [seen for seen in engine.seen if seen.target == path]
    document: dict[str, Any] = json.loads(seen.body)
    return document


# -- text ------------------------------------------------------------------------------------------


async def test_a_chat_is_streamed_in_lines(client: RawClient, engine: FakeEngine) -> None:
    engine.on(CHAT, says("a"))
    answer = await ask(client, "/api/chat", messages=USER, options={"temperature": 0, "num_ctx": 9})
    assert (answer.status, answer.whole) == (200, True)
    assert answer.header("Content-Type") == ["application/x-ndjson"]
    assert answer.header("x-mesh-llm-ignored") == ["num_ctx"]
    *parts, last = lines(answer)
    assert [part["message"] for part in parts] == [{"role": "assistant", "content": word} for word in WORDS]
    assert all(part["done"] is False and part["model"] == "tiny" for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (10, 5)
    asked = body_of(engine)
    assert (asked["stream"], asked["temperature"], asked["messages"]) == (True, 0, USER)
    # Nothing of it is left over for the next request on the same connection.
    assert (await client.request("GET", "/props")).status == 200


async def test_a_chat_in_one_document(client: RawClient, engine: FakeEngine) -> None:
    thinking = chunk("a", {"reasoning_content": "Hm."})
    engine.on(CHAT, tells(thinking, chunk("a", {"content": "Home."}), *ends("length")))
    answer = await ask(client, "/api/chat", messages=USER, stream=False)
    told = answer.json()
    assert told["message"] == {"role": "assistant", "content": "Home.", "thinking": "Hm."}
    assert (told["done"], told["done_reason"]) == (True, "length")
    assert (told["prompt_eval_duration"], told["eval_duration"]) == (3_000_000, 2_000_000)
    assert told["total_duration"] > 0
    assert told["created_at"].endswith("Z")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt(client: RawClient, engine: FakeEngine, stream: bool) -> None:
    engine.on(CHAT, says("a"))
    answer = await ask(client, "/api/generate", prompt="Where did it run?", stream=stream)
    told = lines(answer) if stream else [answer.json()]
    assert "".join(part["response"] for part in told) == TEXT
    assert told[-1]["done_reason"] == "stop"
    assert body_of(engine)["messages"] == USER


@pytest.mark.parametrize("stream", [True, False])
async def test_a_raw_prompt(client: RawClient, engine: FakeEngine, stream: bool) -> None:
    last = {"content": "", "stop": True, "stop_type": "eos", "tokens_predicted": 1, "tokens_evaluated": 2}
    engine.on("/completion", tells(event({"content": "Home.", "stop": False}), event(last)))
    answer = await ask(client, "/api/generate", prompt="It ran", raw=True, stream=stream)
    told = lines(answer) if stream else [answer.json()]
    assert "".join(part["response"] for part in told) == "Home."
    assert (told[-1]["done_reason"], told[-1]["eval_count"]) == ("stop", 1)
    assert body_of(engine, "/completion")["prompt"] == "It ran"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tool_call_is_told_as_a_whole(client: RawClient, engine: FakeEngine, stream: bool) -> None:
    pieces = [{"name": "weather", "arguments": ""}, {"arguments": '{"city"'}, {"arguments": ': "Rome"}'}]
    calls = [{"tool_calls": [{"index": 0, "id": "c1", "function": piece}]} for piece in pieces]
    engine.on(CHAT, tells(*(chunk("a", call) for call in calls), *ends("tool_calls")))
    answer = await ask(client, "/api/chat", messages=USER, tools=[{"type": "function"}], stream=stream)
    told = lines(answer) if stream else [answer.json()]
    (message,) = [part["message"] for part in told if "tool_calls" in part["message"]]
    assert message["tool_calls"] == [{"id": "c1", "function": {"index": 0, **WEATHER}}]
    assert told[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
async def test_probabilities(client: RawClient, engine: FakeEngine, stream: bool) -> None:
    other = {"id": 9, "token": "x", "logprob": -2.0, "bytes": [120]}
    scores = {
        "content": [{"id": 7, "token": "Home.", "logprob": -0.5, "bytes": [72], "top_logprobs": [other]}]
    }
    choice = {"index": 0, "delta": {"content": "Home."}, "logprobs": scores, "finish_reason": None}
    engine.on(CHAT, tells(event({"choices": [choice], **HEAD}), *ends()))
    answer = await ask(client, "/api/chat", messages=USER, logprobs=True, top_logprobs=1, stream=stream)
    told = lines(answer)[0] if stream else answer.json()
    assert [score["token"] for score in told["logprobs"]] == ["Home."]
    assert told["logprobs"][0]["top_logprobs"] == [{"token": "x", "logprob": -2.0, "bytes": [120]}]
    assert body_of(engine)["top_logprobs"] == 1


async def test_without_a_question_the_model_is_there(client: RawClient, engine: FakeEngine) -> None:
    told = (await ask(client, "/api/chat", messages=[], keep_alive="5m")).json()
    assert (told["message"]["content"], told["done"], told["done_reason"]) == ("", True, "load")
    assert not engine.seen


class TestStop:
    """`ollama stop NAME`."""

    @pytest.fixture
    def coder(self) -> FakeNode:
        return FakeNode(
            names=("coder",), state=Health(state=State.SERVING, reason="", model="coder", loads=True)
        )

    @pytest.fixture
    def node(self, engine: FakeEngine, coder: FakeNode) -> FakeNode:
        return FakeNode(where=engine.upstream, others=[coder])

    async def stop(self, client: RawClient, name: str, *headers: str, path: str = "/api/generate") -> Any:
        body = json.dumps({"model": name, "keep_alive": 0, "stream": False}).encode()
        return await client.request("POST", path, *headers, body=body)

    @pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
    async def test_a_model_on_demand_goes(self, client: RawClient, node: FakeNode, path: str) -> None:
        told = (await self.stop(client, "coder:latest", path=path)).json()
        assert (told["done"], told["done_reason"]) == (True, "unload")
        assert node.managed == [("unload", "coder")]

    async def test_one_that_is_not_loaded_is_not_loaded_for_it(
        self, client: RawClient, node: FakeNode, coder: FakeNode
    ) -> None:
        coder.state = replace(coder.state, state=State.WAITING)
        assert (await self.stop(client, "coder")).json()["done_reason"] == "unload"
        assert (node.managed, coder.wanted) == ([], 0)

    async def test_one_that_is_always_loaded_stays(self, client: RawClient, node: FakeNode) -> None:
        answer = await self.stop(client, "tiny")
        assert (answer.status, answer.json()["done_reason"], node.managed) == (200, "load", [])
        assert answer.header("x-mesh-llm-ignored") == ["keep_alive"]

    async def test_who_may_not_manage_is_refused(
        self, node: FakeNode, start_gateway: StartGateway, tmp_path: Path
    ) -> None:
        keys = Keys(tmp_path / "keys.json")
        _, asks = keys.add(NewKey(name="anna"), time.time())
        _, manages = keys.add(NewKey(name="ops", manage=True), time.time())
        gateway = await start_gateway(
            GatewayConfig(port=0, api_key="secret", keys_file=tmp_path / "keys.json")
        )
        async with connect(gateway.port) as client:
            refused = await self.stop(client, "coder", f"Authorization: Bearer {asks}")
            assert (refused.status, node.managed) == (403, [])
            assert "needs a key that may manage" in refused.json()["error"]
            assert (await self.stop(client, "coder", f"Authorization: Bearer {manages}")).status == 200
            node.refusal = NotOwner("only owners of the mesh choose its models")
            refused = await self.stop(client, "coder", f"Authorization: Bearer {manages}")
            assert (refused.status, refused.json()["error"]) == (403, node.refusal.message)


# -- what the other dialects promise, too ----------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("until", [1, 3, 6, 7, 8])
async def test_another_engine_goes_on(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, until: int, stream: bool
) -> None:
    engine.on(CHAT, says("a", until=until, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await ask(client, "/api/chat", messages=USER, options={"temperature": 0}, stream=stream)
    told = lines(answer) if stream else [answer.json()]
    assert answer.whole
    assert "".join(part["message"]["content"] for part in told) == TEXT
    assert (told[-1]["eval_count"], told[-1]["prompt_eval_count"]) == (5, 10)
    assert [part["done"] for part in told] == [False] * (len(told) - 1) + [True]


async def test_an_answer_that_breaks_off_ends_with_the_reason(client: RawClient, engine: FakeEngine) -> None:
    refusal = b'data: {"error":{"code":500,"message":"Too much.","type":"server_error"}}\n\n'
    engine.on(CHAT, tells(chunk("a", {"content": "The"}), refusal))
    answer = await ask(client, "/api/chat", messages=USER)
    assert not answer.whole
    assert lines(answer)[0]["message"]["content"] == "The"
    assert lines(answer)[-1] == {"error": "Too much."}


async def test_a_client_that_waits_gets_signs_of_life(
    start_gateway: StartGateway, engine: FakeEngine
) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(beat_s=0.05)))
    go_on = asyncio.Event()

    async def thinks(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await go_on.wait()
        for one in [chunk("a", {"content": "Home."}), *ends()]:
            await wire.send_chunk(one)
        await wire.send(LAST_CHUNK)

    engine.on(CHAT, thinks)
    async with connect(gateway.port) as client:
        body = json.dumps({"messages": USER}).encode()
        await client.send(
            b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await client.head()
        assert [await client.chunk() for _ in range(3)] == [b" "] * 3
        go_on.set()
        assert [part["done"] for part in lines(await client.rest(answer))] == [False, True]


async def test_it_waits_for_a_slot(start_gateway: StartGateway, engine: FakeEngine, node: FakeNode) -> None:
    node.turns = SlotQueue(1)
    engine.on(CHAT, says("a"))
    gateway = await start_gateway(GatewayConfig(port=0))
    async with connect(gateway.port) as client:
        async with node.turns.take("somebody else"):
            asked = asyncio.create_task(ask(client, "/api/chat", messages=USER))
            async with asyncio.timeout(WAIT_S):
                while not node.turns.waiting:
                    await asyncio.sleep(0.01)
            assert not engine.seen
        assert lines(await asked)[-1]["done"]


async def test_the_key_is_wanted_as_anywhere(start_gateway: StartGateway, engine: FakeEngine) -> None:
    engine.on(CHAT, says("a"))
    gateway = await start_gateway(GatewayConfig(port=0, api_key="secret"))
    async with connect(gateway.port) as client:
        for path in ("/api/version", "/api/tags"):
            refused = await client.request("GET", path)
            assert (refused.status, list(refused.json())) == (401, ["error"])
            assert isinstance(refused.json()["error"], str)
            assert (await client.request("GET", path, "Authorization: Bearer secret")).status == 200
        answer = await ask(client, "/api/chat", "Authorization: Bearer secret", messages=USER)
        assert lines(answer)[-1]["done"]


async def test_a_node_that_loads_says_so(client: RawClient, node: FakeNode) -> None:
    node.where = None
    node.state = Health(state=State.LOADING, reason="tiny is loading", model="tiny")
    answer = await ask(client, "/api/chat", messages=USER)
    assert (answer.status, answer.json()) == (503, {"error": "tiny is loading"})
    assert [model["name"] for model in (await client.request("GET", "/api/tags")).json()["models"]] == [
        "tiny"
    ]
    assert (await client.request("GET", "/api/ps")).json() == {"models": []}


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
@pytest.mark.parametrize("body", [b"{", b"[]"])
async def test_what_nobody_can_read_is_refused(
    client: RawClient, engine: FakeEngine, path: str, body: bytes
) -> None:
    answer = await client.request("POST", path, body=body)
    assert (answer.status, list(answer.json())) == (400, ["error"])
    assert "JSON" in answer.json()["error"]
    assert not engine.seen


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
async def test_what_makes_no_sense_is_refused(client: RawClient, engine: FakeEngine, path: str) -> None:
    answer = await ask(client, path, messages=7, prompt=7, input=7)
    assert answer.status == 400
    assert "must be" in answer.json()["error"]
    assert not engine.seen


async def test_what_is_too_large_to_be_translated_is_refused(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(replay_bytes=1000)))
    async with connect(gateway.port) as client:
        answer = await ask(client, "/api/generate", prompt="x" * 2000)
        assert answer.status == 413
        assert "larger than" in answer.json()["error"]


async def test_the_engines_refusal_is_told_in_a_sentence(client: RawClient, engine: FakeEngine) -> None:
    error = {"error": {"code": 400, "message": "the request exceeds the context", "type": "x"}}
    engine.on(CHAT, tells_document(error, b"400 Bad Request"))
    for stream in (True, False):
        answer = await ask(client, "/api/chat", messages=USER, stream=stream)
        assert (answer.status, answer.json()) == (400, {"error": "the request exceeds the context"})


async def test_an_image_that_the_model_does_not_see(client: RawClient, engine: FakeEngine) -> None:
    error = {"error": {"code": 500, "message": "image input is not supported - hint: x", "type": "y"}}
    engine.on(CHAT, tells_document(error, b"500 Internal Server Error"))
    answer = await ask(client, "/api/generate", prompt="What is it?", images=["aGk="])
    assert answer.status == 400
    assert answer.json()["error"].startswith("image input is not supported")


@pytest.mark.parametrize(
    ("method", "path", "command"),
    [
        ("POST", "/api/pull", "mesh-llm load MODEL"),
        ("POST", "/api/push", "mesh-llm models"),
        ("POST", "/api/create", "mesh-llm load FILE.gguf"),
        ("POST", "/api/copy", "--alias NAME"),
        ("DELETE", "/api/delete", "mesh-llm unload MODEL"),
        ("POST", "/api/blobs/sha256:00", "mesh-llm load"),
    ],
)
async def test_models_are_changed_with_a_command(
    client: RawClient, engine: FakeEngine, method: str, path: str, command: str
) -> None:
    answer = await client.request(method, path, body=b'{"model": "x"}')
    assert answer.status == 400
    assert command in answer.json()["error"]
    assert not engine.seen


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/api/chat"), ("POST", "/api/tags"), ("GET", "/api/status")]
)
async def test_other_routes_do_not_exist(client: RawClient, method: str, path: str) -> None:
    answer = await client.request(method, path)
    assert (answer.status, list(answer.json())) == (404, ["error"])


def test_other_nodes_gateways_translate_for_themselves() -> None:
    assert route_of("POST", "/api/chat").computes
    with pytest.raises(Exception, match="not a route"):
        route_of("POST", "/api/chat", translated=False)


# -- models and embeddings -------------------------------------------------------------------------

LISTED = {
    "object": "list",
    "data": [{"id": "tiny", "meta": {"n_ctx": 512, "size": 99, "n_params": 135_000_000}}],
}


async def test_version(client: RawClient, engine: FakeEngine) -> None:
    answer = await client.request("GET", "/api/version")
    assert [part.isdecimal() for part in answer.json()["version"].split(".")] == [True] * 3
    assert (await client.request("HEAD", "/api/version")).status == 200
    assert not engine.seen


async def test_lists(client: RawClient, engine: FakeEngine) -> None:
    engine.on("/v1/models", tells_document(LISTED))
    (tag,) = (await client.request("GET", "/api/tags")).json()["models"]
    assert (tag["name"], tag["model"], tag["size"]) == ("tiny", "tiny", 99)
    assert tag["details"]["parameter_size"] == "135.0M"
    (loaded,) = (await client.request("GET", "/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"], loaded["digest"]) == ("tiny", 512, tag["digest"])


@pytest.mark.parametrize(("status", "embeds"), [(b"400 Bad Request", True), (b"501 Not Implemented", False)])
async def test_show(client: RawClient, engine: FakeEngine, status: bytes, embeds: bool) -> None:
    engine.on("/v1/models", tells_document(LISTED))
    engine.on("/props", tells_document({"chat_template": "{{ x }}", "model_path": "/home/someone/x.gguf"}))
    engine.on("/v1/embeddings", tells_document({"error": {}}, status))
    answer = await ask(client, "/api/show")
    assert answer.json()["template"] == "{{ x }}"
    assert answer.json()["model_info"]["model.context_length"] == 512
    assert ("embedding" in answer.json()["capabilities"]) is embeds
    assert b"someone" not in answer.body


async def test_embeddings(client: RawClient, engine: FakeEngine) -> None:
    data = [{"embedding": [0.25, 1.5], "index": 0}]
    engine.on("/v1/embeddings", tells_document({"data": data, "usage": {"prompt_tokens": 3}}))
    told = (await ask(client, "/api/embed", input="x", truncate=True)).json()
    assert (told["embeddings"], told["prompt_eval_count"], told["model"]) == ([[0.25, 1.5]], 3, "tiny")
    assert (await ask(client, "/api/embeddings", prompt="x")).json() == {"embedding": [0.25, 1.5]}
    assert [json.loads(seen.body)["input"] for seen in engine.seen] == [["x"], "x"]


async def test_an_engine_without_embeddings_says_so(client: RawClient, engine: FakeEngine) -> None:
    error = {"error": {"code": 501, "message": "This server does not support embeddings.", "type": "x"}}
    engine.on("/v1/embeddings", tells_document(error, b"501 Not Implemented"))
    answer = await ask(client, "/api/embed", input="x")
    assert (answer.status, answer.json()) == (501, {"error": "This server does not support embeddings."})


@pytest.mark.parametrize("name", ["coder-7b", "coder-7b:latest", "coder:7b", "Coder:latest", "coder"])
async def test_names_with_a_tag(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, name: str
) -> None:
    node.others = [FakeNode(where=second.upstream, names=("coder-7b",))]
    second.on(CHAT, says("b"))
    answer = await ask(client, "/api/chat", model=name, messages=USER)
    assert lines(answer)[-1]["model"] == name
    assert not engine.seen
    assert (await client.request("POST", "/api/show", body=b'{"name": "coder"}')).status == 200
    assert [seen.target for seen in engine.seen] == []


async def test_a_name_that_none_has(client: RawClient, second: FakeEngine, node: FakeNode) -> None:
    node.others = [FakeNode(where=second.upstream, names=("coder-7b",))]
    answer = await ask(client, "/api/chat", model="llama3:70b", messages=USER)
    assert answer.status == 404
    assert "these do: tiny, coder-7b" in answer.json()["error"]
