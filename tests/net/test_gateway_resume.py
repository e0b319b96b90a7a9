"""An engine that dies in the middle of an answer, and the next one that goes on with it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.cli.chat import ChatApi, Conversation
from mesh_llm.gateway.engine_choice import GATEWAY_RESUME_TRIES
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health, SlotRequest
from mesh_llm.types import State
from tests.net.conftest import StartGateway
from tests.support.raw_http import Answer, RawClient, connect, request_bytes
from tests.support.series import Scrape
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
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
WORDS = ("The", " fox", " ran", " home", ".")
PROMPT_TOKENS = 10
PAUSE_S = 0.2


@pytest.fixture
async def second() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as engine:
        yield engine


# -- an engine that says WORDS, one token each -------------------------------------------------------


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def chunk(run: str, delta: dict[str, Any], **more: Any) -> bytes:
    choice = {"finish_reason": more.pop("finish_reason", None), "index": 0, "delta": delta}
    head = {"created": 1000 + len(run), "id": f"chatcmpl-{run}", "model": "tiny"}
    return event({"choices": [choice], **head, "object": "chat.completion.chunk", **more})


def progress(run: str, total: int) -> bytes:
    return chunk(
        run, {"role": "assistant", "content": None}, prompt_progress={"total": total, "processed": 0}
    )


def chat_events(run: str, body: dict[str, Any]) -> list[bytes]:
    """What an engine says to `body`, as the events of one stream."""
    last = body["messages"][-1]
    prefix = last["content"] if last["role"] == "assistant" else ""
    said = WORDS[: next(n for n in range(len(WORDS) + 1) if "".join(WORDS[:n]) == prefix)]
    limit = body.get("n_predict", body.get("max_tokens", 99))
    rest = WORDS[len(said) :]
    words, ends = rest[:limit], limit < len(rest)
    usage = {
        "completion_tokens": len(words),
        "prompt_tokens": PROMPT_TOKENS + len(said),
        "total_tokens": PROMPT_TOKENS + len(said) + len(words),
    }
    events = [progress(run, PROMPT_TOKENS + len(said))] if body.get("return_progress") else []
    events += [chunk(run, {"role": "assistant", "content": None})]
    events += [chunk(run, {"content": word}) for word in words]
    events += [chunk(run, {}, finish_reason="length" if ends else "stop")]
    if (body.get("stream_options") or {}).get("include_usage"):
        head = {"created": 1000 + len(run), "id": f"chatcmpl-{run}", "model": "tiny"}
        events += [event({"choices": [], **head, "object": "chat.completion.chunk", "usage": usage})]
    return [*events, b"data: [DONE]\n\n"]


def says(run: str, *, until: int | None = None, then: Callable[[Wire], Awaitable[None]] | None = None) -> Any:
    """A script that tells the first `until` events, and `then` does something else."""

    async def script(seen: Seen, wire: Wire) -> None:
        events = chat_events(run, json.loads(seen.body))
        await wire.send(SSE_HEAD)
        for one in events[:until]:
            await wire.send_chunk(one)
        if then is not None:
            await then(wire)
        else:
            await wire.send(LAST_CHUNK)

    return script


async def dies(wire: Wire) -> None:
    wire.abort()


async def counts(seen: Seen, wire: Wire) -> None:
    body = json.loads(seen.body)
    last = body["messages"][-1]
    said = last["content"] if last["role"] == "assistant" else ""
    tokens = PROMPT_TOKENS + sum(word in said for word in WORDS)
    await wire.send(plain(json.dumps({"input_tokens": tokens}).encode()))


async def renders(seen: Seen, wire: Wire) -> None:
    """As the engine's template would: what was said follows the prompt."""
    messages = json.loads(seen.body)["messages"]
    said = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    await wire.send(plain(json.dumps({"prompt": f"[{messages[0]['content']}]{said}"}).encode()))


def helps(engine: FakeEngine) -> None:
    """Let it answer what a gateway has to know before it continues."""
    engine.on(f"{CHAT}/input_tokens", counts)
    engine.on("/apply-template", renders)


def hand_over(node: FakeNode, other: FakeEngine) -> Callable[[Wire], Awaitable[None]]:
    async def then(wire: Wire) -> None:
        node.where = other.upstream
        wire.abort()

    return then


def overtaken(
    node: FakeNode, other: FakeEngine, turns: SlotQueue, until_closed: AsyncExitStack
) -> Callable[[Wire], Awaitable[None]]:
    """The same, while somebody else waits for the only turn, and keeps it until the stack is closed."""

    async def then(wire: Wire) -> None:
        ahead = asyncio.create_task(until_closed.enter_async_context(turns.take("somebody else")))
        async with asyncio.timeout(WAIT_S):
            while not turns.waiting:
                await asyncio.sleep(0.01)
        await hand_over(node, other)(wire)
        await ahead

    return then


# -- what a client sees ------------------------------------------------------------------------------


def ask(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Where did it run?"}], "temperature": 0, **more}


async def answer_to(client: RawClient, body: dict[str, Any], path: str = CHAT) -> Answer:
    await client.send(request_bytes("POST", path, body=json.dumps(body).encode()))
    answer = await client.head()
    return await client.rest(answer)


def told(answer: Answer) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def comments(answer: Answer) -> list[str]:
    return [line for line in answer.body.decode().split("\n") if line.startswith(":")]


def text(answer: Answer) -> str:
    return "".join(
        choice["delta"].get("content") or "" for data in told(answer) for choice in data["choices"]
    )


async def test_an_undisturbed_stream_is_the_engines_own(client: RawClient, engine: FakeEngine) -> None:
    engine.on(CHAT, says("a"))
    answer = await answer_to(client, ask(stream=True))
    expected = chat_events("a", ask(stream=True))
    # All of it, byte by byte, but for the reports that the client did not ask for.
    assert answer.body == b"".join(expected)
    assert json.loads(engine.seen[0].body)["return_progress"] is True
    answer = await answer_to(client, ask(stream=True, return_progress=True))
    assert answer.body == b"".join(chat_events("a", ask(stream=True, return_progress=True)))


@pytest.mark.parametrize("until", range(1, 10))
async def test_the_stream_goes_on_wherever_it_was_cut(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, until: int
) -> None:
    body = ask(stream=True, stream_options={"include_usage": True})
    engine.on(CHAT, says("a", until=until, then=hand_over(node, second)))
    second.on(CHAT, says("bb"))
    helps(second)
    answer = await answer_to(client, body)
    assert answer.whole
    assert text(answer) == "".join(WORDS)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.body.count(b"[DONE]") == 1
    # One answer: one name, one beginning, one end, counted once.
    assert {data["id"] for data in told(answer)} == {"chatcmpl-a" if until > 1 else "chatcmpl-bb"}
    roles = [c for data in told(answer) for c in data["choices"] if "role" in c["delta"]]
    assert len(roles) == 1
    reasons = [c["finish_reason"] for data in told(answer) for c in data["choices"] if c["finish_reason"]]
    assert reasons == ["stop"]
    [usage] = [data["usage"] for data in told(answer) if "usage" in data]
    assert usage == {
        "completion_tokens": 5,
        "prompt_tokens": PROMPT_TOKENS,
        "total_tokens": PROMPT_TOKENS + 5,
    }
    if until < 9:
        assert any("resumed 1" in comment for comment in comments(answer))
    assert len({data["created"] for data in told(answer)}) == 1


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_the_next_engine_reads_prompt_and_answer_apart(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, temperature: float
) -> None:
    """As the first one computed them: by prompts in large batches, and the answer token by token."""
    engine.on(CHAT, says("a", until=4, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, ask(stream=True, temperature=temperature, cache_prompt=False))
    assert text(answer) == "".join(WORDS)
    *read, rest = [json.loads(seen.body) for seen in second.seen if seen.target == CHAT]
    assert [message["role"] for message in rest["messages"]] == ["user", "assistant"]
    if temperature:
        # The dice decide, and would not fall the same way again.
        assert (read, rest["cache_prompt"]) == ([], False)
    else:
        assert [(body["messages"], body["n_predict"]) for body in read] == [(ask()["messages"], 1)]
        assert rest["cache_prompt"] is True


async def test_a_resumed_answer_is_counted_and_logged(
    client: RawClient,
    engine: FakeEngine,
    second: FakeEngine,
    node: FakeNode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="mesh_llm.access")

    async def elsewhere(_: SlotRequest | None = None) -> socket.socket:
        link = socket.socket()
        link.setblocking(False)
        await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", second.port))
        return link

    async def nothing(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b""))

    async def leaves(wire: Wire) -> None:
        node.where = None
        wire.abort()
        while not node.asked:  # why it broke off: the loss has been noticed
            await asyncio.sleep(0.01)
        await asyncio.sleep(PAUSE_S)
        node.where = replace(second.upstream, served_by="attic é", connect=elsewhere)

    engine.on(CHAT, says("a", until=4, then=leaves))
    second.on(CHAT, says("b"))
    second.on("/metrics", nothing)
    helps(second)
    answer = await answer_to(client, ask(stream=True))
    assert text(answer) == "".join(WORDS)
    line = caplog.records[-1]
    assert line.getMessage().endswith(" resumed=1 served_by=attic??")
    assert line.__dict__["fields"]["resumed"] == 1
    seen = Scrape((await client.request("GET", "/metrics")).body)
    assert seen.value("mesh_llm_gateway_resumed_total") == 1
    assert seen.value("mesh_llm_gateway_resume_pause_seconds_count") == 1
    # As the client felt it: the mean between two events would hide it in a long answer.
    assert seen.value("mesh_llm_gateway_resume_pause_seconds_sum") >= PAUSE_S
    # Who speaks, five words, why it ends, and [DONE]; the second beginning is left out.
    assert seen.value("mesh_llm_gateway_token_events_total") == len(WORDS) + 3
    for name in ("first_token_seconds", "token_seconds"):
        assert seen.value(f"mesh_llm_gateway_{name}_count", route=CHAT) == 1
        assert seen.value(f"mesh_llm_gateway_{name}_sum", route=CHAT) > 0
    assert seen.value("mesh_llm_gateway_token_seconds_sum", route=CHAT) >= PAUSE_S / (len(WORDS) + 2)


async def test_the_chat_in_the_terminal_hears_of_it(
    gateway: Gateway, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    async def then(wire: Wire) -> None:
        node.where = replace(second.upstream, served_by="attic")
        wire.abort()

    engine.on(CHAT, says("a", until=4, then=then))
    second.on(CHAT, says("b"))
    helps(second)
    told: list[str] = []
    conversation = Conversation(ChatApi(f"http://127.0.0.1:{gateway.port}", None), tell=told.append)
    pieces = await asyncio.to_thread(lambda: list(conversation.answer("Where did it run?")))
    assert "".join(piece for piece, _ in pieces) == "".join(WORDS)
    assert told == [f"{node.sentence}; attic goes on with the answer"]


async def test_every_engine_dies_after_a_word(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    engines = [engine, second]
    runs = 0

    async def script(seen: Seen, wire: Wire) -> None:
        nonlocal runs
        if json.loads(seen.body).get("n_predict") == 1:
            # It only reads what was said.
            await says("reads")(seen, wire)
            return
        runs += 1
        node.where = engines[runs % 2].upstream
        # The report, who speaks, and one word; whoever continues says one word as well.
        words_left = runs <= len(WORDS)
        await says("x" * runs, until=3 if words_left else None, then=dies if words_left else None)(seen, wire)

    for one in engines:
        one.on(CHAT, script)
        helps(one)
    answer = await answer_to(client, ask(stream=True))
    assert answer.whole
    assert text(answer) == "".join(WORDS)
    # The last one had nothing to add but the end.
    assert runs == len(WORDS) + 1
    resumed = [comment for comment in comments(answer) if "resumed" in comment]
    assert len(resumed) == len(WORDS)


async def test_the_limit_goes_for_both_halves(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    engine.on(CHAT, says("a", until=4, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, ask(stream=True, max_tokens=4))
    assert text(answer) == "".join(WORDS[:4])
    asked = json.loads(second.seen[-1].body)
    assert asked["max_tokens"] == 2
    assert asked["continue_final_message"] == "content"
    assert asked["messages"][-1] == {"role": "assistant", "content": "The fox"}
    assert asked["seed"] == json.loads(engine.seen[0].body)["seed"]


async def test_no_more_tokens_are_told_than_were_allowed(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """Of a text that was written in other tokens than the usual ones, the next engine may count more."""

    async def counts_twice(seen: Seen, wire: Wire) -> None:
        last = json.loads(seen.body)["messages"][-1]
        said = last["content"] if last["role"] == "assistant" else ""
        tokens = PROMPT_TOKENS + 5 * sum(word in said for word in WORDS)
        await wire.send(plain(json.dumps({"input_tokens": tokens}).encode()))

    engine.on(CHAT, says("a", until=4, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    second.on(f"{CHAT}/input_tokens", counts_twice)
    body = ask(stream=True, max_tokens=4, stream_options={"include_usage": True})
    answer = await answer_to(client, body)
    assert b'"completion_tokens":4' in answer.body


@pytest.mark.parametrize("limit", [{}, {"max_tokens": -1}])
async def test_the_meshs_limit_goes_for_both_halves(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, limit: dict[str, int]
) -> None:
    """--predict: the engine's own limit, where the request has none, would be counted anew."""
    heir = replace(second.upstream, predict=4)

    async def then(wire: Wire) -> None:
        node.where = heir
        wire.abort()

    engine.on(CHAT, says("a", until=4, then=then))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, ask(stream=True, **limit))
    assert json.loads(second.seen[-1].body)["n_predict"] == 2
    assert text(answer) == "".join(WORDS[:4])


async def test_nothing_but_the_end_was_missing(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """All tokens that were allowed had come: one more is asked for, and left out."""
    body = ask(stream=True, max_tokens=3, stream_options={"include_usage": True})
    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, body)
    assert text(answer) == "".join(WORDS[:3])
    assert json.loads(second.seen[-1].body)["max_tokens"] == 1
    [usage] = [data["usage"] for data in told(answer) if "usage" in data]
    assert usage["completion_tokens"] == 3
    reasons = [c["finish_reason"] for data in told(answer) for c in data["choices"] if c["finish_reason"]]
    assert reasons == ["length"]


@pytest.mark.parametrize("until", [0, 1, 2, 4, 7, 8])
async def test_an_answer_that_is_not_streamed(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, until: int
) -> None:
    engine.on(CHAT, says("a", until=until, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, ask())
    assert answer.status == 200
    document = answer.json()
    assert document["choices"][0]["message"] == {"role": "assistant", "content": "".join(WORDS)}
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["object"] == "chat.completion"
    assert document["usage"]["completion_tokens"] == 5
    assert document["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert answer.header("x-mesh-llm-resumed") == ["1"]


SHAPED = ask(stream=True, response_format={"type": "json_object"})


async def test_what_has_a_form_is_made_again_and_matched(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, says("bb"))
    answer = await answer_to(client, SHAPED)
    assert answer.whole
    assert text(answer) == "".join(WORDS)
    assert {data["id"] for data in told(answer)} == {"chatcmpl-a"}
    # The very same request.
    assert [json.loads(seen.body) for seen in second.seen] == [json.loads(engine.seen[0].body)]


async def test_what_comes_out_different_is_never_taken_for_an_answer(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    async def other(seen: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for one in chat_events("b", json.loads(seen.body)):
            await wire.send_chunk(one.replace(b"fox", b"dog"))

    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, other)
    answer = await answer_to(client, SHAPED)
    assert not answer.whole
    assert text(answer) == "".join(WORDS[:3])
    last = told(answer)[-1]
    assert last["error"]["code"] == "not_resumed"
    assert last["choices"][0]["finish_reason"] == "error"
    assert b"[DONE]" not in answer.body


async def test_engine_that_gives_up_because_its_plan_broke(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """A lost worker fails the request, not the engine: it says so in an event, and ends properly."""
    compute_error = b'data: {"error":{"code":500,"message":"Compute error.","type":"server_error"}}\n\n'

    async def gives_up(wire: Wire) -> None:
        await wire.send_chunk(compute_error)
        await wire.send(LAST_CHUNK)
        node.where = None
        await asyncio.sleep(0.1)
        node.where = second.upstream

    engine.on(CHAT, says("a", until=4, then=gives_up))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, ask(stream=True))
    assert text(answer) == "".join(WORDS)
    assert b"Compute error" not in answer.body


async def test_engine_that_refuses_the_request_is_believed(client: RawClient, engine: FakeEngine) -> None:
    """The node has nothing against its engine: it is the request that is too much."""
    error = {"code": 500, "message": "Context size has been exceeded.", "type": "exceed_context_size_error"}

    async def gives_up(wire: Wire) -> None:
        await wire.send_chunk(event({"error": error}))
        await wire.send(LAST_CHUNK)

    engine.on(CHAT, says("a", until=4, then=gives_up))
    answer = await answer_to(client, ask())
    assert (answer.status, answer.json()["error"]) == (500, error)
    answer = await answer_to(client, ask(stream=True))
    assert len(engine.seen) == 2
    # The engine's end was a proper one, which would make this a short answer.
    assert not answer.whole
    last = told(answer)[-1]
    assert last["error"] == error
    assert last["choices"][0]["finish_reason"] == "error"
    assert text(answer) == "".join(WORDS[:2])


async def test_engine_that_gives_up_in_any_dialect(gateway: Gateway, engine: FakeEngine) -> None:
    complaint = b'data: {"error":{"code":500,"message":"Compute error.","type":"server_error"}}\n\n'
    beginnings = {
        CHAT: progress("a", PROMPT_TOKENS),
        "/v1/completions": event({"choices": [{"text": "The", "index": 0, "finish_reason": None}]}),
        "/completion": event({"content": "The", "stop": False}),
        "/v1/messages": event({"type": "message_start"}, "message_start"),
        "/v1/responses": event({"type": "response.created"}, "response.created"),
    }

    async def script(seen: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(beginnings[seen.target])
        await wire.send_chunk(complaint)
        await wire.send(LAST_CHUNK)

    async def one(path: str) -> Answer:
        engine.on(path, script)
        async with connect(gateway.port) as client:
            return await answer_to(client, {**ask(stream=True), "input": "x", "prompt": "x"}, path)

    # At the same time: each of them waits whether the node gives its engine up.
    for answer in await asyncio.gather(*map(one, beginnings)):
        assert not answer.whole
        assert told(answer)[-1]["error"]["message"] == "Compute error."


async def test_a_refusal_is_the_engines_own(client: RawClient, engine: FakeEngine) -> None:
    refusal = b'{"error":{"code":400,"message":"no messages","type":"invalid_request_error"}}'

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(refusal), refusal)
        )

    engine.on(CHAT, script)
    for body in (ask(), ask(stream=True)):
        answer = await answer_to(client, body)
        assert (answer.status, answer.body) == (400, refusal)


async def test_nobody_takes_over(start_gateway: StartGateway, engine: FakeEngine, node: FakeNode) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(resume_s=0.5)))

    async def dies_for_good(wire: Wire) -> None:
        node.where = None
        node.state = Health(state=State.WAITING, reason="need more", model=None)
        wire.abort()

    engine.on(CHAT, says("a", until=4, then=dies_for_good))
    async with connect(gateway.port) as client:
        answer = await answer_to(client, ask(stream=True))
    assert not answer.whole
    last = told(answer)[-1]
    why = f"{node.sentence}; no other engine served within 0 s"
    assert last["error"]["message"] == why
    assert node.remarks[-1] == ("broken", f"An answer broke off: {why}")
    assert last["choices"][0]["finish_reason"] == "error"


async def test_the_wait_for_a_turn_counts_too(node: FakeNode, engine: FakeEngine, second: FakeEngine) -> None:
    """The next engine is there, and busy: its queue alone would let the stream wait for five minutes."""
    turns = SlotQueue(1)
    node.turns = turns
    gateway = Gateway(GatewayConfig(port=0, limits=Limits(resume_s=1.0)), node)
    await gateway.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.stop)
        engine.on(CHAT, says("a", until=4, then=overtaken(node, second, turns, stack)))
        helps(second)
        async with connect(gateway.port) as client:
            answer = await answer_to(client, ask(stream=True))
        assert CHAT not in [seen.target for seen in second.seen]
    assert not answer.whole
    last = told(answer)[-1]
    assert last["error"]["message"] == f"{node.sentence}; no other engine served within 1 s"
    assert last["choices"][0]["finish_reason"] == "error"


# -- what a client hears that has to wait ------------------------------------------------------------


@asynccontextmanager
async def beating_gateway(node: FakeNode, turns: SlotQueue | None = None) -> AsyncIterator[Gateway]:
    node.turns = turns
    gateway = Gateway(GatewayConfig(port=0, limits=Limits(beat_s=0.05)), node)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def hears(client: RawClient, body: dict[str, Any], path: str, words: str) -> None:
    """Read its answer until a comment has the `words`: what the client waits for goes on only then."""
    await client.send(request_bytes("POST", path, body=json.dumps(body).encode()))
    await client.head()
    while f": mesh-llm {words}\n\n".encode() not in await client.chunk():
        pass


async def ends_well(client: RawClient) -> bool:
    seen = b""
    while chunk := await client.chunk():
        seen += chunk
    return seen.endswith(b"data: [DONE]\n\n")


async def test_signs_of_life_while_there_is_no_engine(
    node: FakeNode, engine: FakeEngine, second: FakeEngine
) -> None:
    async def dies_for_now(wire: Wire) -> None:
        node.where = None
        wire.abort()

    engine.on(CHAT, says("a", until=4, then=dies_for_now))
    second.on(CHAT, says("b"))
    helps(second)
    async with beating_gateway(node) as gateway, connect(gateway.port) as client:
        await hears(client, ask(stream=True), CHAT, "waiting for the next engine")
        node.where = second.upstream
        assert await ends_well(client)


async def test_signs_of_life_while_it_waits_for_its_turn(
    node: FakeNode, engine: FakeEngine, second: FakeEngine
) -> None:
    turns = SlotQueue(1)
    async with beating_gateway(node, turns) as gateway, AsyncExitStack() as others:
        engine.on(CHAT, says("a", until=4, then=overtaken(node, second, turns, others)))
        second.on(CHAT, says("b"))
        helps(second)
        async with connect(gateway.port) as client:
            await hears(client, ask(stream=True), CHAT, "waiting for a slot")
            await others.aclose()
            assert await ends_well(client)


async def test_signs_of_life_while_the_next_engine_thinks_about_our_questions(
    node: FakeNode, engine: FakeEngine, second: FakeEngine
) -> None:
    heard = asyncio.Event()

    async def thinks(seen: Seen, wire: Wire) -> None:
        await heard.wait()
        await renders(seen, wire)

    engine.on(CHAT, says("a", until=4, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    second.on("/apply-template", thinks)
    async with beating_gateway(node) as gateway, connect(gateway.port) as client:
        await hears(client, ask(stream=True), CHAT, "waiting for a slot")
        heard.set()
        assert await ends_well(client)


@pytest.mark.parametrize("resumed", [False, True])
async def test_signs_of_life_during_a_prompt_without_reports(
    node: FakeNode, engine: FakeEngine, second: FakeEngine, resumed: bool
) -> None:
    """The engine says nothing of prompts in this dialect, neither the first one nor the next."""
    path = "/v1/responses"
    begins = event({"type": "response.created", "response": {"id": "resp_a"}}, "response.created")
    heard = asyncio.Event()

    async def dies_early(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(begins)
        await hand_over(node, second)(wire)

    async def takes_its_time(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        await wire.send_chunk(begins)
        await heard.wait()
        await wire.send_chunk(event({"type": "response.completed"}, "response.completed"))
        await wire.send(LAST_CHUNK)

    engine.on(path, dies_early if resumed else takes_its_time)
    second.on(path, takes_its_time)
    async with beating_gateway(node) as gateway, connect(gateway.port) as client:
        await hears(client, {"input": "x", "stream": True}, path, "is computing")
        heard.set()
        while b"response.completed" not in await client.chunk():
            pass


async def test_a_request_that_kills_every_engine(client: RawClient, engine: FakeEngine) -> None:
    engine.on(CHAT, says("a", until=0, then=dies))
    answer = await answer_to(client, ask())
    assert answer.status == 502
    assert len(engine.seen) == GATEWAY_RESUME_TRIES


async def test_other_requests_go_to_the_next_engine(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await hand_over(node, second)(wire)

    engine.on("/tokenize", script)
    answer = await client.request("POST", "/tokenize", body=b'{"content": "x"}')
    assert answer.status == 200
    assert second.seen[0].body == b'{"content": "x"}'


async def test_a_client_may_wait_for_the_model(client: RawClient, engine: FakeEngine, node: FakeNode) -> None:
    node.where = None
    node.state = Health(state=State.LOADING, reason="the model is loading", model="tiny")
    assert (await client.request("GET", "/props", "Prefer: wait=0")).status == 503
    waiting = asyncio.create_task(client.request("GET", "/props", "Prefer: respond-async, wait=60"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    node.where = engine.upstream
    answer = await asyncio.wait_for(waiting, WAIT_S)
    assert answer.status == 200
    assert engine.seen[0].header("Prefer") == []


async def test_a_client_that_leaves_while_its_answer_is_put_together(
    gateway: Gateway, engine: FakeEngine
) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def waits(wire: Wire) -> None:
        arrived.set()
        await wire.gone()
        left.set()

    engine.on(CHAT, says("a", until=4, then=waits))
    async with connect(gateway.port) as client:
        await client.send(request_bytes("POST", CHAT, body=json.dumps(ask()).encode()))
        await asyncio.wait_for(arrived.wait(), WAIT_S)
    await asyncio.wait_for(left.wait(), WAIT_S)


async def test_what_is_kept_of_all_requests_is_bounded(
    start_gateway: StartGateway, engine: FakeEngine
) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(kept_bytes=1000)))
    held, release = asyncio.Event(), asyncio.Event()

    async def script(_: Seen, wire: Wire) -> None:
        held.set()
        await release.wait()
        await wire.send(plain(b"{}"))

    engine.on("/detokenize", script)
    async with connect(gateway.port) as first, connect(gateway.port) as second:
        waiting = asyncio.create_task(first.request("POST", "/detokenize", body=bytes(900)))
        await asyncio.wait_for(held.wait(), WAIT_S)
        # There is no room for it beside the other one: it goes through, on a connection of its own.
        assert (await second.request("POST", "/tokenize", body=bytes(500_000))).json()["size"] == 500_000
        release.set()
        assert (await asyncio.wait_for(waiting, WAIT_S)).status == 200
        await second.request("POST", "/tokenize", body=bytes(500))
    assert [seen.target for seen in engine.seen] == ["/detokenize", "/tokenize", "/tokenize"]
    # What is not kept cannot be sent again, and needs a connection that nobody has used.
    assert engine.seen[1].connection == 2


async def test_bodies_that_are_still_coming_are_bounded_together(
    start_gateway: StartGateway, engine: FakeEngine
) -> None:
    """Each of them would have room alone."""
    gateway = await start_gateway(GatewayConfig(port=0, limits=Limits(kept_bytes=500_000)))
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(gateway.port)) for _ in range(4)]
        for client in clients:
            await client.send(request_bytes("POST", "/tokenize", "Content-Length: 400001") + bytes(400_000))
        # What there is no room for goes through: the engine is asked before the body has ended.
        await asyncio.to_thread(
            until, lambda: engine.connections >= 3, within_s=WAIT_S, what="three are asked"
        )
        for client in clients:
            await client.send(b"x")
            assert (await client.answer()).json()["size"] == 400_001


async def test_a_template_that_adds_to_what_was_said(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """The engine would not go on from the same prompt: the answer is made again instead."""

    async def adds(seen: Seen, wire: Wire) -> None:
        thinks = json.loads(seen.body)["messages"][-1]["role"] == "assistant"
        await wire.send(plain(json.dumps({"prompt": "[x]<think></think>" if thinks else "[x]"}).encode()))

    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    helps(second)
    second.on("/apply-template", adds)
    answer = await answer_to(client, ask(stream=True))
    assert text(answer) == "".join(WORDS)
    assert json.loads(second.seen[-1].body) == json.loads(engine.seen[0].body)


async def test_an_engine_that_refuses_to_continue(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    async def refuses(seen: Seen, wire: Wire) -> None:
        if json.loads(seen.body)["messages"][-1]["role"] == "assistant":
            await wire.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
            return
        await says("b")(seen, wire)

    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, refuses)
    helps(second)
    answer = await answer_to(client, ask(stream=True))
    assert text(answer) == "".join(WORDS)


async def test_an_engine_that_lacks_what_the_first_one_had(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """A projector: it would refuse the picture each time, and says why once."""
    body = b'{"error":{"message":"image input is not supported","code":500}}'

    async def refuses(seen: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 500 Error\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, refuses)
    helps(second)
    answer = await answer_to(client, ask(stream=True))
    assert b"the next engine cannot go on: image input is not supported" in answer.body
    assert b'"finish_reason":"error"' in answer.body.replace(b" ", b"")


async def test_reports_that_were_asked_for_are_no_part_of_the_answer(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    engine.on(CHAT, says("a", until=1, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    answer = await answer_to(client, ask(stream=True, return_progress=True))
    assert answer.whole
    assert text(answer) == "".join(WORDS)
    assert answer.body.count(b"prompt_progress") == 2


async def test_a_first_token_is_kept_with_what_it_took_to_compute(
    client: RawClient, engine: FakeEngine, gateway: Gateway
) -> None:
    async def remembers(seen: Seen, wire: Wire) -> None:
        """Four of the prompt's tokens from the question before."""
        first, *rest = chat_events("a", json.loads(seen.body))
        await wire.send(SSE_HEAD)
        for one in (first.replace(b'"processed":0', b'"cache":4,"processed":4'), *rest):
            await wire.send_chunk(one)
        await wire.send(LAST_CHUNK)

    assert gateway.last_first_token() is None
    engine.on(CHAT, remembers)
    assert (await answer_to(client, ask(stream=True))).whole

    found = gateway.last_first_token()
    assert found is not None
    assert (found.engine, found.prompt_tokens) == (engine.upstream.url, PROMPT_TOKENS - 4)
    assert 0 < found.seconds < WAIT_S


async def test_the_end_of_one_choice_is_not_that_of_all(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    body = ask(stream=True, n=2)

    def choice(index: int, reason: str | None) -> bytes:
        one = {"finish_reason": reason, "index": index, "delta": {} if reason else {"content": "x"}}
        return event({"choices": [one], "created": 1, "id": "chatcmpl-a"})

    events = [choice(0, None), choice(1, None), choice(0, "stop"), choice(1, "stop"), b"data: [DONE]\n\n"]

    def script(until: int, then: Any) -> Any:
        async def run(_: Seen, wire: Wire) -> None:
            await wire.send(SSE_HEAD)
            for one in events[:until]:
                await wire.send_chunk(one)
            await then(wire)

        return run

    async def ends(wire: Wire) -> None:
        await wire.send(LAST_CHUNK)

    engine.on(CHAT, script(3, hand_over(node, second)))
    second.on(CHAT, script(5, ends))
    answer = await answer_to(client, body)
    reasons = [c["index"] for data in told(answer) for c in data["choices"] if c["finish_reason"]]
    assert reasons == [0, 1]
    assert answer.whole


JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EMPTY = {
    "sized": JSON_HEAD + b"Content-Length: 0\r\n\r\n",
    "chunked": JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + LAST_CHUNK,
    "until it closes": JSON_HEAD + b"\r\n",
    "stream": SSE_HEAD + LAST_CHUNK,
    "nothing but [DONE]": SSE_HEAD + b"e\r\ndata: [DONE]\n\n\r\n" + LAST_CHUNK,
    "failure": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    "status": b"HTTP/1.1 200 OK\r\n",
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
async def test_an_answer_without_a_body_is_a_lost_engines(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, empty: bytes, streamed: bool
) -> None:
    engine.on(CHAT, leaves_behind(empty, node, second))
    second.on(CHAT, says("b"))
    answer = await answer_to(client, ask(stream=streamed))
    assert answer.whole
    words = text(answer) if streamed else answer.json()["choices"][0]["message"]["content"]
    assert words == "".join(WORDS)
    assert answer.body.count(b"[DONE]") == int(streamed)
    assert node.remarks[0][0] == "resumed"


@pytest.mark.parametrize("kind", ["sized", "chunked", "until it closes", "failure"])
async def test_other_answers_without_a_body(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, kind: str
) -> None:
    engine.on("/v1/embeddings", leaves_behind(EMPTY[kind], node, second))
    answer = await client.request("POST", "/v1/embeddings", body=b'{"input": "x"}')
    assert (answer.status, len(second.seen)) == (200, 1)
    assert answer.header("x-mesh-llm-resumed") == ["1"]


def leaves_behind(sent: bytes, node: FakeNode, other: FakeEngine) -> Script:
    """The script of an engine that ends as it should, after too little."""

    async def script(_: Seen, wire: Wire) -> None:
        node.where = other.upstream
        await wire.send(sent)
        wire.writer.close()

    return script


@pytest.mark.parametrize("until", [3, 4, 7])
async def test_a_stream_that_ends_without_a_reason_goes_on(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode, until: int
) -> None:
    async def ends(wire: Wire) -> None:
        node.where = second.upstream
        await wire.send_chunk(b"data: [DONE]\n\n")
        await wire.send(LAST_CHUNK)

    engine.on(CHAT, says("a", until=until, then=ends))
    second.on(CHAT, says("b"))
    helps(second)
    answer = await answer_to(client, ask(stream=True))
    assert answer.whole
    assert text(answer) == "".join(WORDS)
    assert answer.body.count(b"[DONE]") == answer.body.count(b'"finish_reason":"stop"') == 1


async def test_half_a_refusal_is_not_followed_by_another_answer(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100\r\n\r\n{")
        await hand_over(node, second)(wire)

    engine.on(CHAT, script)
    second.on(CHAT, says("b"))
    await client.send(request_bytes("POST", CHAT, body=json.dumps(ask()).encode()))
    answer = await client.head()
    assert answer.status == 400
    assert b"HTTP/1.1" not in await client.end()
    assert second.seen == []


async def test_an_engine_that_is_replaced_while_a_request_waits_for_its_turn(
    node: FakeNode, engine: FakeEngine, second: FakeEngine
) -> None:
    turns = SlotQueue(1)
    node.turns = turns
    gateway = Gateway(GatewayConfig(port=0), node)
    await gateway.start()
    try:
        second.on(CHAT, says("b"))
        async with connect(gateway.port) as client:
            async with turns.take("somebody else"):
                waiting = asyncio.create_task(answer_to(client, ask()))
                while not turns.waiting:
                    await asyncio.sleep(0.01)
                node.where = second.upstream
            answer = await asyncio.wait_for(waiting, WAIT_S)
    finally:
        await gateway.stop()
    assert answer.json()["choices"][0]["message"]["content"] == "".join(WORDS)
    assert engine.seen == []


async def test_an_engine_that_cannot_count_is_no_engine_to_continue_with(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """It answers the small questions with nonsense: the text is made again, and comes out the same."""

    async def nonsense(_: Seen, wire: Wire) -> None:
        await wire.send(plain(b"{"))

    engine.on(CHAT, says("a", until=5, then=hand_over(node, second)))
    second.on(CHAT, says("b"))
    second.on("/apply-template", nonsense)
    answer = await answer_to(client, ask(stream=True))
    assert text(answer) == "".join(WORDS)
    assert json.loads(second.seen[-1].body) == json.loads(engine.seen[0].body)
