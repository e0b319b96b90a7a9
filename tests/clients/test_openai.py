"""OpenAI's own client, as a program would use it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.support.lone_engine import LoneEngine
from tests.support.node import ENDLESS, NodeProcess
from tests.support.pairs import Pair
from tests.support.questions import (
    EXACT,
    MESSAGES,
    PIXEL,
    QUESTION,
    SCHEMA,
    TEXT,
    TOOL,
    WEATHER,
    WEATHER_TURNS,
    check_weather,
)
from tests.support.waiting import until

ASK_WEATHER: Any = [{"role": "user", "content": WEATHER}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
FREE_S = 10.0
"""Left alone, an endless answer holds its slot for some twenty seconds."""


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


@pytest.fixture
def client(api: NodeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="mesh", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI, pair: Pair) -> None:
    models = client.models.list().data

    assert [(model.id, model.object) for model in models] == [(pair.model, "model")]


def test_one_model(client: openai.OpenAI, pair: Pair) -> None:
    (listed,) = client.models.list().data

    model = client.models.retrieve(pair.model)

    assert (model.id, model.object, model.owned_by) == (pair.model, "model", listed.owned_by)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")
    assert "'gpt-4o'" in caught.value.message


# -- chat -----------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, pair: Pair, chat_text: str) -> None:
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=12, extra_body=EXACT
    )

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", chat_text)
    assert (choice.finish_reason, answer.object, answer.model) == ("length", "chat.completion", pair.model)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat_stream(client: openai.OpenAI, chat_text: str) -> None:
    with client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=12, stream=True, extra_body=EXACT
    ) as stream:
        chunks = list(stream)

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [delta.content for delta in deltas if delta.content]
    assert deltas[0].role == "assistant"
    assert len(pieces) > 6
    assert "".join(pieces) == chat_text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len({(chunk.id, chunk.object, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks), "nobody asked for it"


def test_usage_of_a_stream_comes_once_and_last(client: openai.OpenAI, chat_text: str) -> None:
    with client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXACT,
    ) as stream:
        *chunks, last = stream

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat_text
    assert [chunk.usage for chunk in chunks if chunk.usage] == []
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert last.usage.total_tokens == last.usage.prompt_tokens + 12


def test_stream_helper_gathers_the_whole_answer(client: openai.OpenAI, chat_text: str) -> None:
    with client.chat.completions.stream(
        model="any", messages=MESSAGES, temperature=0, max_tokens=12, extra_body=EXACT
    ) as stream:
        kinds = [event.type for event in stream]
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            stream.get_final_completion()

    assert "content.delta" in kinds
    assert caught.value.completion.choices[0].message.content == chat_text


def test_stop_sequences(client: openai.OpenAI, chat_text: str) -> None:
    stop = chat_text.split()[2]

    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=12, stop=[stop], extra_body=EXACT
    )

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == chat_text.partition(stop)[0]


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2
    )

    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert [len(token.top_logprobs) for token in tokens] == [2, 2]


# -- tools and schemas ----------------------------------------------------------------------------


def test_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any",
        messages=WEATHER_TURNS,
        temperature=0,
        max_tokens=96,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )

    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.id
    assert call.function.name == "weather"
    check_weather(call.function.arguments)


def test_tools_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="any",
        messages=WEATHER_TURNS,
        temperature=0,
        max_tokens=96,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]

    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    functions = [call.function for call in calls if call.function]
    assert choices[-1].finish_reason == "tool_calls"
    assert {call.index for call in calls} == {0}
    assert len([call.id for call in calls if call.id]) == 1
    assert [function.name for function in functions if function.name] == ["weather"]
    check_weather("".join(function.arguments or "" for function in functions))


def test_the_answer_of_a_tool_is_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=WEATHER_TURNS[:3], max_tokens=4, tools=[TOOL], tool_choice="none"
    )

    assert answer.choices[0].message.content


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(
        model="any",
        messages=WEATHER_TURNS,
        temperature=0,
        max_tokens=96,
        parallel_tool_calls=False,
        tools=[other, TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )

    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "weather"


def test_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=ASK_WEATHER, temperature=0, max_tokens=96, response_format=FORMAT
    )

    assert answer.choices[0].finish_reason == "stop"
    check_weather(answer.choices[0].message.content or "")


def test_json_schema_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="any", messages=ASK_WEATHER, temperature=0, max_tokens=96, response_format=FORMAT, stream=True
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]

    assert choices[-1].finish_reason == "stop"
    check_weather("".join(choice.delta.content or "" for choice in choices))


# -- completions and responses --------------------------------------------------------------------


def test_completion(client: openai.OpenAI, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).json()

    answer = client.completions.create(
        model="any", prompt=TEXT["prompt"], temperature=0, max_tokens=8, extra_body=EXACT
    )

    assert answer.choices[0].text == expected["choices"][0]["text"]
    assert answer.choices[0].text.startswith(" Paris")
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_completion_stream(client: openai.OpenAI, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).json()

    with client.completions.create(
        model="any", prompt=TEXT["prompt"], temperature=0, max_tokens=8, stream=True, extra_body=EXACT
    ) as stream:
        chunks = [chunk for chunk in stream if chunk.choices]

    assert len(chunks) > 4
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected["choices"][0]["text"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_prompts_in_one_request(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="any", prompt=[TEXT["prompt"], "one two three"], temperature=0, max_tokens=2
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 + 3, 2 + 2)


def test_response(client: openai.OpenAI, chat_text: str) -> None:
    answer = client.responses.create(
        model="any", input=QUESTION, temperature=0, max_output_tokens=12, extra_body=EXACT
    )

    assert (answer.object, answer.output_text) == ("response", chat_text)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12


def test_response_stream(client: openai.OpenAI, chat_text: str) -> None:
    with client.responses.create(
        model="any", input=QUESTION, temperature=0, max_output_tokens=12, stream=True, extra_body=EXACT
    ) as stream:
        events = list(stream)

    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created"
    assert "".join(pieces) == chat_text
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == chat_text


def test_response_stream_helper(client: openai.OpenAI, chat_text: str) -> None:
    with client.responses.stream(
        model="any", input=QUESTION, temperature=0, max_output_tokens=12, extra_body=EXACT
    ) as stream:
        assert stream.get_final_response().output_text == chat_text


def test_response_of_a_given_form(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="any", input=WEATHER, temperature=0, max_output_tokens=96, text_format=Weather
    )

    assert answer.output_parsed is not None
    check_weather(answer.output_parsed.model_dump())


def test_response_stream_of_a_given_form(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="any", input=WEATHER, temperature=0, max_output_tokens=96, text_format=Weather
    ) as stream:
        parsed = stream.get_final_response().output_parsed

    assert parsed is not None
    check_weather(parsed.model_dump())


# -- errors, headers, leaving ---------------------------------------------------------------------


def test_a_bad_request_says_what_is_bad(client: openai.OpenAI) -> None:
    wrong: Any = "none"

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=wrong)

    assert (caught.value.status_code, caught.value.type) == (400, "invalid_request_error")
    assert "'messages'" in caught.value.message


def test_a_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="any", prompt="one " * 4000, max_tokens=1)

    assert "2048" in caught.value.message
    assert caught.value.type == "exceed_context_size_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("medium", "part"),
    [
        ("image", {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}),
        ("audio", {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        ("content", {"type": "file", "file": {"file_data": "AAAA", "filename": "a.pdf"}}),
    ],
)
def test_what_the_model_cannot_see_is_refused(
    client: openai.OpenAI, medium: str, part: Any, stream: bool
) -> None:
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=turns, stream=stream)

    assert medium in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_path_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.post("/no/such/path", body={}, cast_to=object)


def test_embeddings_without_the_flag_are_refused_as_the_engine_does(
    client: openai.OpenAI, engine: LoneEngine
) -> None:
    expected = engine.ask("/v1/embeddings", {"input": "one"})

    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model="any", input="one")

    assert caught.value.status_code == expected.status
    assert caught.value.response.json() == expected.json()


def test_headers(client: openai.OpenAI, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).headers

    raw = client.completions.with_raw_response.create(
        model="any", prompt=TEXT["prompt"], temperature=0, max_tokens=8
    )

    assert raw.status_code == 200
    assert raw.headers["content-type"] == expected["Content-Type"] == "application/json; charset=utf-8"
    assert raw.parse().choices[0].text


def test_headers_of_a_stream(client: openai.OpenAI) -> None:
    with client.completions.with_streaming_response.create(
        model="any", prompt=TEXT["prompt"], max_tokens=2, stream=True
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in raw.headers
        lines = [line for line in raw.iter_lines() if line]

    # Comments may stand between the events, and nothing else.
    assert {line.partition(":")[0] for line in lines} <= {"data", ""}
    assert lines[-1] == "data: [DONE]"


def test_closing_a_stream_frees_the_slot(client: openai.OpenAI, pair: Pair) -> None:
    stream = client.completions.create(
        model="any",
        prompt=ENDLESS["prompt"],
        max_tokens=ENDLESS["max_tokens"],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert pair.busy_slots() == 1

    stream.close()

    until(lambda: pair.busy_slots() == 0, within_s=FREE_S, what="the slot is free")


def test_a_timeout_frees_the_slot(client: openai.OpenAI, pair: Pair) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).completions.create(
            model="any",
            prompt=ENDLESS["prompt"],
            max_tokens=ENDLESS["max_tokens"],
            extra_body={"ignore_eos": True},
        )

    def is_free_after_a_while() -> bool:
        # The engine looks for its client after a second without a result for anybody; `/slots` is one.
        time.sleep(1.5)
        return pair.busy_slots() == 0

    until(is_free_after_a_while, within_s=FREE_S, what="the slot is free")
