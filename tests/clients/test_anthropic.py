"""Anthropic's client: the same model behind /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.lone_engine import LoneEngine
from tests.support.node import ENDLESS, NodeProcess
from tests.support.pairs import Pair
from tests.support.questions import (
    CHAT,
    MESSAGES,
    PIXEL,
    SCHEMA,
    WEATHER,
    check_weather,
)
from tests.support.waiting import until

SURE = {"temperature": 0}
"""This client has no word for it."""
TOOL: Any = {"name": "weather", "description": "Current weather of a city", "input_schema": SCHEMA}
TURNS: Any = [
    {"role": "user", "content": "What is the weather in Rome, in C?"},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome", "unit": "C"}}
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "18"}]},
    {"role": "user", "content": WEATHER},
]
SYSTEM = "You are a pirate."
FREE_S = 10.0
"""Left alone, an endless answer holds its slot for some twenty seconds."""


@pytest.fixture
def client(api: NodeProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.url, api_key="mesh", max_retries=0, timeout=60) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_message(client: anthropic.Anthropic, pair: Pair, chat_text: str) -> None:
    message = client.messages.create(model="any", max_tokens=12, messages=MESSAGES, extra_body=SURE)

    assert text_of(message) == chat_text
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert (message.model, message.usage.output_tokens) == (pair.model, 12)


def test_system_prompt(client: anthropic.Anthropic, engine: LoneEngine, chat_text: str) -> None:
    body = {**CHAT, "messages": [{"role": "system", "content": SYSTEM}, *MESSAGES]}
    expected = engine.ask("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    message = client.messages.create(
        model="any", max_tokens=12, system=SYSTEM, messages=MESSAGES, extra_body=SURE
    )

    assert text_of(message) == expected != chat_text


def test_message_stream(client: anthropic.Anthropic, chat_text: str) -> None:
    with client.messages.stream(model="any", max_tokens=12, messages=MESSAGES, extra_body=SURE) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()

    assert len(pieces) > 6
    assert "".join(pieces) == text_of(message) == chat_text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)


def test_events_of_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.create(model="any", max_tokens=2, messages=MESSAGES, stream=True) as stream:
        kinds = [event.type for event in stream]

    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_first_letter_of_several_tokens(client: anthropic.Anthropic, pair: Pair) -> None:
    """The engine tells the start of a message with its first token, and only if that is a letter."""
    turns: Any = [{"role": "user", "content": "Write foxes."}, {"role": "assistant", "content": "狐" * 16}]
    counted = client.messages.count_tokens(model="any", messages=turns).input_tokens

    with client.messages.stream(model="any", max_tokens=6, messages=turns, extra_body=SURE) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        streamed = stream.get_final_message()
    whole = client.messages.create(model="any", max_tokens=6, messages=turns, extra_body=SURE)

    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    for message in (streamed, whole):
        assert (text_of(message), message.model) == ("狐狐", pair.model)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (counted, 6)


def test_count_of_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="any", messages=MESSAGES).input_tokens
    longer = client.messages.count_tokens(model="any", messages=MESSAGES, system=SYSTEM).input_tokens
    asked = client.messages.create(model="any", max_tokens=1, messages=MESSAGES).usage

    assert counted == asked.input_tokens + (asked.cache_read_input_tokens or 0)
    assert longer > counted


def test_tool(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="any",
        max_tokens=96,
        messages=TURNS,
        tools=[TOOL],
        tool_choice={"type": "any"},
        extra_body=SURE,
    )

    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, call.name) == ("tool_use", "weather")
    assert isinstance(call.input, dict)
    check_weather(call.input)


def test_tool_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="any",
        max_tokens=96,
        messages=TURNS,
        tools=[TOOL],
        tool_choice={"type": "any"},
        extra_body=SURE,
    ) as stream:
        message = stream.get_final_message()

    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, call.name) == ("tool_use", "weather")
    assert isinstance(call.input, dict)
    check_weather(call.input)


def test_the_answer_of_a_tool_is_taken(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="any", max_tokens=4, messages=TURNS[:3], tools=[TOOL])

    assert message.content


def test_a_prompt_beyond_the_context_is_refused(client: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "one " * 4000}]

    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="any", max_tokens=1, messages=turns)

    assert "2048" in caught.value.message


def kind_of(error: anthropic.APIStatusError) -> str:
    """Of an error that has Anthropic's shape, and nothing else in it."""
    body: Any = error.body
    assert sorted(body) == ["error", "type"]
    assert sorted(body["error"]) == ["message", "type"]
    assert body["type"] == "error"
    return str(body["error"]["type"])


def test_errors_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    wrong: Any = [{"role": "user"}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="any", max_tokens=1, messages=wrong)
    assert kind_of(refused.value) == refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="any", max_tokens=1, messages=wrong, stream=True)
    assert kind_of(refused.value) == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.count_tokens(model="any", messages=wrong)
    assert kind_of(refused.value) == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.batches.retrieve("any")
    assert kind_of(missing.value) == "not_found_error"
    with pytest.raises(anthropic.PermissionDeniedError) as denied:
        client.messages.create(
            model="any",
            max_tokens=1,
            messages=MESSAGES,
            extra_headers={"Origin": "https://elsewhere.example"},
        )
    assert kind_of(denied.value) == "permission_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_for_a_model_that_sees_none(client: anthropic.Anthropic, stream: bool) -> None:
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    turns: Any = [{"role": "user", "content": [picture]}]

    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="any", max_tokens=1, messages=turns, stream=stream)

    assert kind_of(caught.value) == "invalid_request_error"
    assert "image input is not supported" in caught.value.message


def test_leaving_a_stream_frees_the_slot(client: anthropic.Anthropic, pair: Pair) -> None:
    with client.messages.stream(
        model="any",
        max_tokens=ENDLESS["max_tokens"],
        messages=MESSAGES,
        extra_body={"ignore_eos": True},
        timeout=60,
    ) as stream:
        next(iter(stream.text_stream))
        assert pair.busy_slots() == 1

    until(lambda: pair.busy_slots() == 0, within_s=FREE_S, what="the slot is free")
