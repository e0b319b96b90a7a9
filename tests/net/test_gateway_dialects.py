"""What clients of each API see where the engine's own words are not what that API promises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.raw_http import Answer, RawClient
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, FakeEngine, Script, Seen, Wire

RESPONSES = "/v1/responses"


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
