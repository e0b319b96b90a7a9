"""OpenAI's client on asyncio: several requests at once, and one that is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.support.lone_engine import LoneEngine
from tests.support.node import ENDLESS, NodeProcess
from tests.support.pairs import Pair
from tests.support.questions import (
    EXACT,
    MESSAGES,
    QUESTION,
    SCHEMA,
    TEXT,
    TOOL,
    WEATHER,
    WEATHER_TURNS,
    check_weather,
)
from tests.support.split import until

FREE_S = 10.0


@pytest.fixture
async def client(api: NodeProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="mesh", max_retries=0, timeout=60
    ) as client:
        yield client


async def streamed(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=12, stream=True, extra_body=EXACT
    )
    async with stream:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def whole(client: openai.AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=12, extra_body=EXACT
    )
    return answer.choices[0].message.content or ""


async def test_models(client: openai.AsyncOpenAI, pair: Pair) -> None:
    assert [model.id async for model in client.models.list()] == [pair.model]


async def test_more_requests_at_once_than_slots(client: openai.AsyncOpenAI, chat_text: str) -> None:
    texts = await asyncio.gather(*(ask(client) for ask in (whole, streamed, whole, streamed)))

    assert texts == [chat_text] * 4


async def test_tools_stream(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="any",
        messages=WEATHER_TURNS,
        temperature=0,
        max_tokens=96,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        answer = await stream.get_final_completion()

    (call,) = answer.choices[0].message.tool_calls or []
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "weather")
    check_weather(call.function.arguments)


async def test_json_schema(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": WEATHER}],
        temperature=0,
        max_tokens=96,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA},
        },
    )

    check_weather(answer.choices[0].message.content or "")


async def test_completion_stream(client: openai.AsyncOpenAI, engine: LoneEngine) -> None:
    expected = await asyncio.to_thread(engine.ask, "/v1/completions", TEXT)

    stream = await client.completions.create(
        model="any", prompt=TEXT["prompt"], temperature=0, max_tokens=8, stream=True, extra_body=EXACT
    )
    async with stream:
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    assert text == expected.json()["choices"][0]["text"]


async def test_response_stream(client: openai.AsyncOpenAI, chat_text: str) -> None:
    stream = await client.responses.create(
        model="any", input=QUESTION, temperature=0, max_output_tokens=12, stream=True, extra_body=EXACT
    )
    async with stream:
        events = [event async for event in stream]

    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == chat_text
    assert events[-1].type == "response.completed"


async def test_a_bad_request_says_what_is_bad(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(
            model="any", messages=MESSAGES, extra_body={"temperature": "warm"}, max_tokens=1
        )


async def test_cancelling_a_task_frees_the_slot(client: openai.AsyncOpenAI, pair: Pair) -> None:
    begun = asyncio.Event()

    async def read_on() -> None:
        stream = await client.completions.create(
            model="any",
            prompt=ENDLESS["prompt"],
            max_tokens=ENDLESS["max_tokens"],
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            async for _ in stream:
                begun.set()

    task = asyncio.create_task(read_on(), name="reader")
    async with asyncio.timeout(60):
        await begun.wait()
    assert await asyncio.to_thread(pair.busy_slots) == 1

    task.cancel()
    await asyncio.wait((task,))

    await until(lambda: pair.busy_slots() == 0, within_s=FREE_S, what="the slot is free")
