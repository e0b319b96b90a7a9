"""An answer that broke off where its text would be cut into other tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.raw_http import Answer, RawClient, request_bytes
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, FakeEngine, FakeNode, Seen, Wire, fake_engine, plain

CHAT = "/v1/chat/completions"
PROMPT_TOKENS = 10
WORDS = ("White", "\n", "\n", "These", ".")
LIMIT = len(WORDS)


@pytest.fixture
async def second() -> AsyncIterator[FakeEngine]:
    """Counts as an engine does that makes one token of two line ends at the end of a text."""
    async with fake_engine() as engine:

        async def counts(seen: Seen, wire: Wire) -> None:
            said = said_in(seen)
            merged = said.endswith("\n\n")
            tokens = sum(said.startswith("".join(WORDS[: n + 1])) for n in range(len(WORDS))) - merged
            await wire.send(plain(json.dumps({"input_tokens": PROMPT_TOKENS + tokens}).encode()))

        async def renders(seen: Seen, wire: Wire) -> None:
            await wire.send(plain(json.dumps({"prompt": f"[?]{said_in(seen)}"}).encode()))

        engine.on(f"{CHAT}/input_tokens", counts)
        engine.on("/apply-template", renders)
        yield engine


def said_in(seen: Seen) -> str:
    last = json.loads(seen.body)["messages"][-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def events(run: str, words: tuple[str, ...], *, prompt_tokens: int, reason: str = "length") -> list[bytes]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}, *({"content": w} for w in words)]
    choices: list[dict[str, Any]] = [{"finish_reason": None, "index": 0, "delta": delta} for delta in deltas]
    choices.append({"finish_reason": reason, "index": 0, "delta": {}})
    head = {"created": 1, "id": f"chatcmpl-{run}", "model": "tiny"}
    usage = {
        "completion_tokens": len(words),
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + len(words),
    }
    chunks: list[dict[str, Any]] = [{"choices": [choice], **head} for choice in choices]
    chunks.append({"choices": [], **head, "usage": usage})
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n"]


def breaks_off(engine: FakeEngine, second: FakeEngine, node: FakeNode, *, after: int) -> None:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for one in events("a", WORDS, prompt_tokens=PROMPT_TOKENS)[: after + 1]:
            await wire.send_chunk(one)
        node.where = second.upstream
        wire.abort()

    engine.on(CHAT, script)


def goes_on(second: FakeEngine, rest: dict[str, tuple[str, ...]]) -> None:
    """With what is given for each beginning, as far as it is asked for."""

    async def script(seen: Seen, wire: Wire) -> None:
        words = rest[said_in(seen)][: json.loads(seen.body)["max_tokens"]]
        await wire.send(SSE_HEAD)
        for one in events("b", words, prompt_tokens=99):
            await wire.send_chunk(one)
        await wire.send(LAST_CHUNK)

    second.on(CHAT, script)


async def answer_to(client: RawClient, *, stream: bool) -> Answer:
    messages = [{"role": "user", "content": "List five colours."}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": LIMIT, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    await client.send(request_bytes("POST", CHAT, body=json.dumps(body).encode()))
    return await client.rest(await client.head())


def told(answer: Answer) -> tuple[list[str], list[str], dict[str, int]]:
    """Pieces, reasons and counts."""
    data = [json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for one in data for choice in one["choices"]]
    pieces = [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
    [usage] = [one["usage"] for one in data if "usage" in one]
    assert {one["id"] for one in data} == {"chatcmpl-a"}
    return pieces, [c["finish_reason"] for c in choices if c["finish_reason"]], usage


USAGE = {
    "completion_tokens": LIMIT,
    "prompt_tokens": PROMPT_TOKENS,
    "total_tokens": PROMPT_TOKENS + LIMIT,
}


async def test_what_comes_again_is_left_out(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    breaks_off(engine, second, node, after=3)
    goes_on(second, {"White\n": ("\n", "These", ".")})
    answer = await answer_to(client, stream=True)
    assert answer.whole
    assert told(answer) == (list(WORDS), ["length"], USAGE)


async def test_an_answer_that_is_not_streamed(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    breaks_off(engine, second, node, after=3)
    goes_on(second, {"White\n": ("\n", "These", ".")})
    document = (await answer_to(client, stream=False)).json()
    assert document["choices"][0]["message"]["content"] == "".join(WORDS)
    assert document["usage"] == USAGE


async def test_one_that_begins_otherwise_goes_on_from_all_that_was_told(
    client: RawClient, engine: FakeEngine, second: FakeEngine, node: FakeNode
) -> None:
    """As happens where dice are thrown."""
    breaks_off(engine, second, node, after=3)
    goes_on(second, {"White\n": ("6", "."), "White\n\n": ("These", " are", " five")})
    answer = await answer_to(client, stream=True)
    assert answer.whole
    pieces, reasons, usage = told(answer)
    assert pieces[:3] == list(WORDS[:3])
    assert pieces[3:] == ["These", " are"]
    assert reasons == ["length"]
    assert usage == USAGE
