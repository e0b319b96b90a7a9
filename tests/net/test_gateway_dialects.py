"""What clients of each API see where the engine's own words are not what that API promises."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import GatewayConfig
from mesh_llm.gateway.upstream import Health
from mesh_llm.types import State
from tests.net.conftest import StartGateway
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
    plain,
)

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
USER = [{"role": "user", "content": "Where did it run?"}]


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def streams(*events: bytes) -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for one in events:
            await wire.send_chunk(one)
        await wire.send(LAST_CHUNK)

    return script


async def ask(client: RawClient, path: str, body: dict[str, Any]) -> Answer:
    return await client.request("POST", path, body=json.dumps(body).encode())


def told(answer: Answer) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


LISTED = [
    {"id": "tiny", "object": "model", "created": 5, "owned_by": "llamacpp", "aliases": ["tiny", "small"]},
    {"id": "org/Large é", "object": "model", "created": 5, "owned_by": "llamacpp"},
]


def lists(document: Any) -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(
            plain(json.dumps(document).encode(), b"Content-Type: application/json; charset=utf-8")
        )

    return script


# -- OpenAI's responses ----------------------------------------------------------------------------


def response_events(*, progress: bool) -> list[bytes]:
    """Of an answer whose first letter takes three tokens, or with reports on its prompt."""
    begun = {"id": "resp_a", "object": "response", "status": "in_progress"}
    report = {"prompt_progress": {"total": 9, "processed": 4}} if progress else {}
    created = named({"type": "response.created", "response": begun})
    going = named({"type": "response.in_progress", "response": begun, **report})
    item = {"content": [], "id": "msg_a", "role": "assistant", "type": "message"}
    return [
        *([created, going, going, going] if progress else [created, going] * 3),
        named({"type": "response.output_item.added", "item": item}),
        named({"type": "response.output_text.delta", "item_id": "msg_a", "delta": "狐"}),
        named({"type": "response.completed", "response": {**begun, "status": "completed"}}),
    ]


@pytest.mark.parametrize("progress", [False, True])
async def test_a_response_is_told_to_its_end(client: RawClient, engine: FakeEngine, progress: bool) -> None:
    engine.on(RESPONSES, streams(*response_events(progress=progress)))
    answer = await ask(client, RESPONSES, {"input": "x", "stream": True, "return_progress": progress})
    assert answer.whole
    kinds = [data["type"].removeprefix("response.") for data in told(answer)]
    reports = ["in_progress"] * (3 if progress else 1)
    assert kinds == ["created", *reports, "output_item.added", "output_text.delta", "completed"]
    assert [data["sequence_number"] for data in told(answer)] == list(range(len(kinds)))
    # Nothing of it is left over for the next request on the same connection.
    assert (await client.request("GET", "/props")).status == 200


# -- several choices -------------------------------------------------------------------------------


HEAD = {"created": 5, "id": "chatcmpl-a", "model": "tiny"}
REPORT: dict[str, Any] = {"prompt_progress": {"total": 9, "cache": 2, "processed": 9}}


def usage(tokens: int, *, prompt: int = 9) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    whole = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, **details}
    return {"usage": {"completion_tokens": tokens, **whole}}


def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    choice = {"finish_reason": reason, "index": index, "delta": delta}
    return event({"choices": [choice], **HEAD, "object": "chat.completion.chunk", **more})


def chat_events(*indices: int) -> list[bytes]:
    """The engine reports on each choice's prompt, and counts each for itself."""
    role = {"role": "assistant", "content": None}
    events = []
    for index in indices:
        events += [chunk(index, role, **REPORT), chunk(index, role), chunk(index, {"content": f"{index}"})]
    for index in indices:
        events += [chunk(index, {"content": "!"}), chunk(index, {}, "stop")]
        events += [event({"choices": [], **HEAD, "object": "chat.completion.chunk", **usage(2 + index)})]
    return [*events, b"data: [DONE]\n\n"]


TOTAL = usage(2 + 3)["usage"]


def choices(answer: Answer) -> list[dict[str, Any]]:
    return [choice for data in told(answer) for choice in data["choices"]]


async def test_two_choices_of_a_chat(client: RawClient, engine: FakeEngine) -> None:
    engine.on(CHAT, streams(*chat_events(1, 0)))
    body = {"messages": USER, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(client, CHAT, body)
    assert answer.whole
    assert b"prompt_progress" not in answer.body
    assert [choice["index"] for choice in choices(answer) if "role" in choice["delta"]] == [1, 0]
    assert [data["usage"] for data in told(answer) if "usage" in data] == [TOTAL]
    assert told(answer)[-1]["choices"] == []
    assert answer.body.endswith(b"data: [DONE]\n\n")
    answer = await ask(client, CHAT, {**body, "stream_options": None})
    assert [data for data in told(answer) if "usage" in data] == []
    answer = await ask(client, CHAT, {**body, "return_progress": True})
    assert answer.body.count(b"prompt_progress") == 2


async def test_two_choices_of_a_chat_in_one_document(client: RawClient, engine: FakeEngine) -> None:
    engine.on(CHAT, streams(*chat_events(1, 0)))
    whole = (await ask(client, CHAT, {"messages": USER, "n": 2})).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["0!", "1!"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"] == TOTAL


async def test_two_choices_are_made_again_where_nobody_has_seen_them(
    client: RawClient, engine: FakeEngine
) -> None:
    """In whichever order the second run tells them."""
    runs = 0

    async def dies_once(seen: Seen, wire: Wire) -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            await streams(*chat_events(0, 1))(seen, wire)
            return
        await wire.send(SSE_HEAD)
        for one in chat_events(1, 0)[:6]:
            await wire.send_chunk(one)
        wire.abort()

    engine.on(CHAT, dies_once)
    whole = (await ask(client, CHAT, {"messages": USER, "n": 2})).json()
    assert runs == 2
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["0!", "1!"]


async def test_two_choices_for_each_of_two_prompts(client: RawClient, engine: FakeEngine) -> None:
    def text(index: int, reason: str | None = None, **more: Any) -> bytes:
        choice = {"text": "" if reason else f"{index}", "index": index, "finish_reason": reason}
        return event({"choices": [choice], **HEAD, "object": "text_completion", **more})

    ends = [text(index, "stop", **usage(4, prompt=10 + index // 2)) for index in range(4)]
    events = [text(0, **REPORT), text(0), text(2, **REPORT), text(2), text(3), text(1)]
    engine.on("/v1/completions", streams(*events, *ends, b"data: [DONE]\n\n"))
    body = {"prompt": ["a", "b"], "n": 2}
    total: dict[str, Any] = {"completion_tokens": 16, "prompt_tokens": 21, "total_tokens": 37}
    total["prompt_tokens_details"] = {"cached_tokens": 4}
    whole = (await ask(client, "/v1/completions", body)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["0", "1", "2", "3"]
    assert whole["usage"] == total
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(client, "/v1/completions", {**body, **options})
    assert [data["usage"] for data in told(answer) if "usage" in data] == [total]
    assert b"prompt_progress" not in answer.body


async def test_a_chat_begins_with_its_role(client: RawClient, engine: FakeEngine) -> None:
    """Which the engine leaves out where the first letter takes several tokens."""
    events = [chunk(0, {"content": "狐"}), chunk(0, {"content": "!"}), chunk(0, {}, "stop")]
    engine.on(CHAT, streams(*events, b"data: [DONE]\n\n"))
    answer = await ask(client, CHAT, {"messages": USER, "stream": True})
    first, *rest = told(answer)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert {name: first[name] for name in HEAD} == HEAD
    assert rest == [json.loads(one.removeprefix(b"data: ")) for one in events]


# -- Anthropic's messages --------------------------------------------------------------------------


TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "狐"}}
STARTLESS = [
    named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    named(TEXT),
    named({"type": "content_block_stop", "index": 0}),
    named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
    named({"type": "message_stop"}),
]
"""Of an engine whose first token is no whole letter."""


@pytest.fixture
def startless(engine: FakeEngine) -> FakeEngine:
    engine.on(MESSAGES, streams(*STARTLESS))
    engine.on("/v1/models", lists({"object": "list", "data": LISTED}))
    engine.on(f"{MESSAGES}/count_tokens", lists({"input_tokens": 17}))
    return engine


async def test_a_message_whose_start_the_engine_leaves_out(client: RawClient, startless: FakeEngine) -> None:
    answer = await ask(client, MESSAGES, {"model": "any", "messages": USER, "stream": True})
    assert answer.whole
    start, *rest = told(answer)
    assert start["type"] == "message_start"
    assert start["message"]["model"] == "tiny"
    assert start["message"]["usage"]["input_tokens"] == 17
    assert b"".join(STARTLESS) == answer.body[answer.body.index(b"event: content_block_start") :]
    assert len(rest) == len(STARTLESS)
    whole = (await ask(client, MESSAGES, {"model": "any", "messages": USER})).json()
    assert (whole["model"], whole["content"]) == ("tiny", [{"type": "text", "text": "狐"}])
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (17, 3)


async def test_a_message_whose_start_nobody_can_tell(client: RawClient, startless: FakeEngine) -> None:
    startless.on(f"{MESSAGES}/count_tokens", refuses(500, b"{}"))
    answer = await ask(client, MESSAGES, {"messages": USER, "stream": True})
    assert answer.whole
    assert told(answer)[0]["message"]["model"] == "tiny"
    assert [data["type"] for data in told(answer)][-1] == "message_stop"


async def test_a_message_that_breaks_off_before_its_start_is_made(
    client: RawClient, startless: FakeEngine
) -> None:
    asked = asyncio.Event()

    async def never(_: Seen, wire: Wire) -> None:
        asked.set()
        await wire.gone()

    async def gives_up(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for one in STARTLESS[:2]:
            await wire.send_chunk(one)
        async with asyncio.timeout(WAIT_S):
            await asked.wait()
        await wire.send_chunk(event({"code": 500, "message": "Compute error."}, "error"))
        await wire.send(LAST_CHUNK)

    startless.on(f"{MESSAGES}/count_tokens", never)
    startless.on(MESSAGES, gives_up)
    answer = await ask(client, MESSAGES, {"messages": USER, "stream": True})
    assert not answer.whole
    kinds = [data["type"] for data in told(answer)]
    assert kinds == ["message_start", "content_block_start", "content_block_delta", "error"]


# -- what is said against a request ----------------------------------------------------------------


def refuses(status: int, body: bytes, kind: bytes = b"application/json; charset=utf-8") -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 %d No\r\nContent-Type: %b\r\nServer: llama.cpp\r\nContent-Length: %d\r\n\r\n%b"
            % (status, kind, len(body), body)
        )

    return script


def complaint(status: int, message: str, kind: str) -> bytes:
    return json.dumps({"error": {"code": status, "message": message, "type": kind}}).encode()


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
async def test_anthropics_clients_get_anthropics_errors(
    client: RawClient, engine: FakeEngine, status: int, kind: str
) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        engine.on(path, refuses(status, complaint(status, "no", "some_error")))
        answer = await ask(client, path, {"messages": USER, "stream": path == MESSAGES})
        assert (answer.status, answer.json()) == (status, anthropic_error(kind, "no"))
        assert answer.header("Content-Type") == ["application/json; charset=utf-8"]


@pytest.mark.parametrize(
    ("body", "message"), [(b"", "Bad Request"), (b"no\n", "no"), (b'{"error":"no"}', '{"error":"no"}')]
)
async def test_whatever_the_engine_says(
    client: RawClient, engine: FakeEngine, body: bytes, message: str
) -> None:
    engine.on(MESSAGES, refuses(400, body, b"text/plain"))
    answer = await ask(client, MESSAGES, {"messages": USER})
    assert answer.json() == anthropic_error("invalid_request_error", message)


async def test_our_own_errors_to_anthropics_clients(
    start_gateway: StartGateway, client: RawClient, node: FakeNode
) -> None:
    keyed = await start_gateway(GatewayConfig(port=0, api_key="sesame", limits=Limits(body_bytes=10)))
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        async with connect(keyed.port) as stranger:
            answer = await stranger.request("POST", path, body=b"{}")
            assert answer.status == 401
            assert answer.json()["error"]["type"] == "authentication_error"
            answer = await stranger.request("POST", path, "x-api-key: sesame", body=b"{" + b" " * 20)
            assert (answer.status, answer.json()["error"]["type"]) == (413, "request_too_large")
        answer = await client.request("POST", path, "Origin: https://elsewhere.example", body=b"{}")
        assert (answer.status, answer.json()["error"]["type"]) == (403, "permission_error")
    node.where, node.state = None, Health(state=State.LOADING, reason="it loads", model="tiny")
    answer = await client.request("POST", MESSAGES, body=b"{}")
    assert (answer.status, answer.json()) == (503, anthropic_error("overloaded_error", "it loads"))
    assert answer.header("Retry-After")
    # Everybody else's clients know OpenAI's.
    answer = await client.request("POST", CHAT, body=b"{}")
    assert answer.json()["error"]["code"] == "not_serving"


@pytest.mark.parametrize(("status", "kind"), [(500, "api_error"), (400, "invalid_request_error")])
async def test_an_error_in_a_message(client: RawClient, engine: FakeEngine, status: int, kind: str) -> None:
    start = named({"type": "message_start", "message": {"usage": {"output_tokens": 0}}})
    error = event({"code": status, "message": "too much", "type": "exceed_context_size_error"}, "error")
    engine.on(MESSAGES, streams(start, error))
    answer = await ask(client, MESSAGES, {"messages": USER})
    assert (answer.status, answer.json()) == (status, anthropic_error(kind, "too much"))
    answer = await ask(client, MESSAGES, {"messages": USER, "stream": True})
    assert not answer.whole
    assert told(answer)[-1] == anthropic_error(kind, "too much")
    assert b"event: error\n" in answer.body


@pytest.mark.parametrize("medium", ["image", "audio", "video"])
async def test_what_the_model_cannot_see_is_the_clients_mistake(
    client: RawClient, engine: FakeEngine, medium: str
) -> None:
    message = f"{medium} input is not supported - hint: if this is unexpected, provide the mmproj"
    for path in (CHAT, RESPONSES, MESSAGES, "/apply-template", f"{MESSAGES}/count_tokens"):
        engine.on(path, refuses(500, complaint(500, message, "server_error")))
        for streamed in (True, False):
            answer = await ask(client, path, {"messages": USER, "input": "x", "stream": streamed})
            assert (answer.status, answer.reason) == (400, "Bad Request")
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.json()["error"]["message"] == message
            assert answer.json()["error"].get("code") == (None if path.startswith(MESSAGES) else 400)


async def test_an_engines_own_mistake_stays_one(client: RawClient, engine: FakeEngine) -> None:
    said = complaint(500, "Compute error.", "server_error")
    engine.on(CHAT, refuses(500, said, b"application/json"))
    answer = await ask(client, CHAT, {"messages": USER})
    assert (answer.status, answer.reason, answer.body) == (500, "No", said)
    assert answer.header("Content-Type") == ["application/json"]


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["/v1/models", "/models"])
async def test_one_model(client: RawClient, engine: FakeEngine, folder: str) -> None:
    engine.on("/v1/models", lists({"object": "list", "data": LISTED}))
    for name, model in (("tiny", 0), ("small", 0), ("org/Large%20%C3%A9", 1), ("org%2FLarge%20%C3%A9", 1)):
        answer = await client.request("GET", f"{folder}/{name}")
        assert (answer.status, answer.json()) == (200, LISTED[model])
        assert answer.header("Content-Type") == ["application/json; charset=utf-8"]
    head = await client.request("HEAD", f"{folder}/tiny")
    assert (head.status, head.body) == (200, b"")
    for name in ("tin", "tiny/x", "x" * 1000):
        answer = await client.request("GET", f"{folder}/{name}")
        assert answer.status == 404
        assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == (
            "model_not_found",
            "invalid_request_error",
        )
    # The list itself is the engine's to answer.
    assert (await client.request("GET", "/v1/models")).json()["data"] == LISTED
    assert (await client.request("POST", f"{folder}/tiny", body=b"{}")).status == 404


@pytest.mark.parametrize("document", [[], {}, {"data": None}, {"data": [None, {"id": 5}]}])
async def test_a_list_that_is_none_names_no_model(
    client: RawClient, engine: FakeEngine, document: Any
) -> None:
    engine.on("/v1/models", lists(document))
    assert (await client.request("GET", "/v1/models/tiny")).status == 404


async def test_a_model_is_asked_for_at_the_next_engine(client: RawClient, engine: FakeEngine) -> None:
    async def dies_once(_: Seen, wire: Wire) -> None:
        engine.on("/v1/models", lists({"data": LISTED}))
        wire.abort()

    engine.on("/v1/models", dies_once)
    answer = await client.request("GET", "/v1/models/tiny")
    assert (answer.status, answer.json()["id"]) == (200, "tiny")
    engine.on("/v1/models", refuses(503, complaint(503, "Loading model", "unavailable_error")))
    assert (await client.request("GET", "/v1/models/tiny")).json()["error"]["code"] == "engine_lost"
