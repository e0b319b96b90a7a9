"""Requests and answers of Ollama's API, in the words of the engine's and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mesh_llm.gateway import ollama
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.dialects import ollama_request
from mesh_llm.gateway.dialects.base import Document
from mesh_llm.gateway.dialects.ollama import OLLAMA_CALL_BYTES, OllamaText, loaded, read
from mesh_llm.gateway.http_framing import MalformedAnswer
from mesh_llm.gateway.sse import make
from mesh_llm.gateway.text_request import read_document
from tests.support.questions import PIXEL, SCHEMA, TOOL

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def asked(**more: Any) -> Document:
    return read("/api/chat", {**ASK, **more}).body


def generated(**more: Any) -> Document:
    return read("/api/generate", {"model": "tiny", "prompt": "Hello", **more}).body


# -- requests --------------------------------------------------------------------------------------


def test_a_chat_is_asked_as_one() -> None:
    assert asked() == {"messages": ASK["messages"], "stream_options": {"include_usage": True}}
    assert read("/api/chat", ASK).dialect.engine_path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("given", "streamed"), [({}, True), ({"stream": True}, True), ({"stream": False}, False)]
)
def test_an_answer_is_streamed_unless_it_is_not_wanted(given: Document, streamed: bool) -> None:
    assert read("/api/chat", {**ASK, **given}).streamed is streamed


def test_options_have_the_engines_names() -> None:
    options = {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.2}
    body = asked(options={**options, "num_predict": 5, "stop": "x", "num_keep": 2, "unheard_of": "y"})
    assert body == {**asked(), **options, "max_tokens": 5, "stop": ["x"], "n_keep": 2}
    assert "max_tokens" not in asked(options={"num_predict": -1})
    assert generated(raw=True, options={"num_predict": 5})["n_predict"] == 5


@pytest.mark.parametrize(
    "options",
    [
        "hot",
        {"temperature": "hot"},
        {"seed": True},
        {"num_predict": 1e300},
        {"stop": 3},
        {"stop": [3]},
        {"stop": ["x"] * 65},
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(ApiError, match="option") as refused:
        asked(options=options)
    assert refused.value.status == 400


def test_what_is_set_where_a_node_starts_is_named() -> None:
    told = ollama_request.ignored({"options": {"num_ctx": 8192, "num_gpu": 1, "top_k": 1}, "context": [1]})
    assert told == ["num_ctx", "num_gpu", "context"]
    assert ollama_request.ignored({"options": "hot"}) == ollama_request.ignored({}) == []


def test_forms() -> None:
    assert asked(format="json")["response_format"] == {"type": "json_object"}
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert asked(format=SCHEMA)["response_format"] == generated(format=SCHEMA)["response_format"] == schema
    assert "response_format" not in asked(format="")
    assert generated(format=SCHEMA, raw=True)["json_schema"] == SCHEMA
    with pytest.raises(ApiError, match="format"):
        asked(format="xml")


@pytest.mark.parametrize(
    ("think", "settings"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_thinking(think: Any, settings: Document) -> None:
    assert asked(think=think)["chat_template_kwargs"] == settings
    with pytest.raises(ApiError, match="think"):
        asked(think="a lot")


def test_images_are_parts_of_a_message() -> None:
    message = {"role": "user", "content": "What is it?", "images": [PIXEL, "/9j/4AAQ"]}
    content = asked(messages=[message])["messages"][0]["content"]
    assert content[0] == {"type": "text", "text": "What is it?"}
    assert content[1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    assert content[2]["image_url"]["url"] == "data:image/jpeg;base64,/9j/4AAQ"
    assert generated(images=[PIXEL])["messages"][0]["content"][1] == content[1]
    with pytest.raises(ApiError, match="base64"):
        asked(messages=[{**message, "images": [7]}])
    with pytest.raises(ApiError, match="raw"):
        generated(images=[PIXEL], raw=True)


def test_a_call_and_its_result_are_told_as_the_engine_reads_them() -> None:
    calls = [{"function": {"name": name, "arguments": {"city": "Rome"}}} for name in ("weather", "time")]
    body = asked(
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "thinking": "Well.", "tool_calls": calls},
            {"role": "tool", "content": "noon", "tool_name": "time"},
            {"role": "tool", "content": "18"},
        ],
    )
    assert body["tools"] == [TOOL]
    said, first, second = body["messages"][1:]
    assert said["reasoning_content"] == "Well."
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    ids = [call["id"] for call in said["tool_calls"]]
    assert first == {"role": "tool", "content": "noon", "tool_call_id": ids[1], "name": "time"}
    assert second == {"role": "tool", "content": "18", "tool_call_id": ids[0], "name": "weather"}


@pytest.mark.parametrize(
    "messages",
    [
        "x",
        [7],
        [{}],
        [{"role": 7}],
        [{"role": "user", "content": 7}],
        [{"role": "assistant", "tool_calls": [7]}],
    ],
)
def test_messages_that_make_no_sense_are_refused(messages: Any) -> None:
    with pytest.raises(ApiError) as refused:
        asked(messages=messages)
    assert refused.value.status == 400


def test_a_prompt_is_a_conversation_of_one_question() -> None:
    body = generated(system="Be brief.")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    with pytest.raises(ApiError, match="raw"):
        generated(template="{{ .Prompt }}")


def test_a_raw_prompt_and_one_with_an_end() -> None:
    raw = read("/api/generate", {"prompt": "Hello", "raw": True})
    assert (raw.dialect.engine_path, raw.body) == ("/completion", {"prompt": "Hello"})
    around = read("/api/generate", {"prompt": "def ", "suffix": "return"})
    assert around.dialect.engine_path == "/infill"
    assert around.body == {"input_prefix": "def ", "input_suffix": "return", "prompt": ""}
    assert not around.dialect.is_plain(around.body)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"x": NaN}', b"[" * 100_000, b"," * 1_000_001])
def test_bodies_that_nobody_can_read_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_document(raw)
    assert refused.value.status == 400


STAYS: list[Any] = [None, "5m", 1, -1, "-1", "10s", False, [], {}, "", "s"]
GOES: list[Any] = [0, 0.0, -0.0, "0", "0s", "0m", "0ms", "0.0s"]


@pytest.mark.parametrize(
    ("keep", "stops"), [*((keep, False) for keep in STAYS), *((keep, True) for keep in GOES)]
)
def test_a_request_without_a_question_wants_the_model_there_or_gone(keep: Any, stops: bool) -> None:
    document = {"model": "tiny", "keep_alive": keep}
    assert ollama_request.is_load(document)
    assert ollama_request.is_stop(document) is stops
    assert not ollama_request.is_stop({**document, "prompt": "Hello"})
    told = loaded("/api/generate", document, goes=stops)
    expected = ("", True, "unload" if stops else "load")
    assert (told["response"], told["done"], told["done_reason"]) == expected


# -- answers ---------------------------------------------------------------------------------------


def test_a_call_of_a_stranger_is_bounded() -> None:
    polish = read("/api/chat", ASK).dialect.polish({})
    assert polish is not None
    for index in (-1, 1 << 40, "x"):
        with pytest.raises(MalformedAnswer):
            polish.feed(_delta({"tool_calls": [{"index": index, "function": {"name": "f"}}]}))
    long = _delta({"tool_calls": [{"index": 0, "function": {"arguments": "x" * (OLLAMA_CALL_BYTES // 4)}}]})
    assert [polish.feed(long) for _ in range(3)] == [b""] * 3
    with pytest.raises(MalformedAnswer, match="too long"):
        polish.feed(long)


@pytest.mark.parametrize("choices", [None, 7, [], [7], [{"delta": 7}], [{"delta": {"content": 7}}]])
def test_an_event_without_a_sense_tells_nothing(choices: Any) -> None:
    polish = read("/api/chat", ASK).dialect.polish({})
    assert polish is not None
    assert polish.feed(make({"choices": choices, "usage": 7, "timings": []})) == b""


@pytest.mark.parametrize("arguments", ['{"a', '{"a": NaN}', "[]"])
def test_a_call_that_was_cut_off_is_left_out(arguments: str) -> None:
    polish = read("/api/chat", ASK).dialect.polish({})
    assert polish is not None
    polish.feed(
        _delta({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": arguments}}]}, "length")
    )
    (line,) = polish.feed(b"data: [DONE]\n\n").splitlines()
    assert json.loads(line)["done_reason"] == "length"


def test_the_time_of_an_answer_by_two_engines_is_that_of_all_its_tokens() -> None:
    polish = read("/api/chat", ASK).dialect.polish({})
    assert polish is not None
    usage = {"prompt_tokens": 9, "completion_tokens": 40}
    polish.feed(make({"choices": [], "usage": usage, "timings": {"predicted_n": 10, "predicted_ms": 20.0}}))
    last = json.loads(polish.feed(b"data: [DONE]\n\n"))
    assert (last["eval_count"], last["eval_duration"]) == (40, 80_000_000)
    assert last["prompt_eval_duration"] == 1  # clients divide by it


def test_a_text_in_lines() -> None:
    dialect = read("/api/generate", {"model": "m", "prompt": "x", "raw": True}).dialect
    assert isinstance(dialect, OllamaText)
    polish = dialect.polish({})
    assert polish is not None
    assert json.loads(polish.feed(make({"content": "a", "stop": False})))["response"] == "a"
    last = make(
        {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 1, "tokens_evaluated": 2}
    )
    told = json.loads(polish.feed(last))
    assert (told["done"], told["done_reason"], told["eval_count"], told["prompt_eval_count"]) == (
        True,
        "length",
        1,
        2,
    )


def _delta(delta: Document, finish: str | None = None) -> bytes:
    return make({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


# -- models and embeddings -------------------------------------------------------------------------


def test_what_is_shown_of_a_model() -> None:
    meta = {"n_ctx": 4096, "n_params": 8_190_000_000, "n_embd": 64, "ftype": "Q4_K - Medium", "size": 5}
    props = {
        "chat_template": "<think>",
        "chat_template_caps": {"supports_tools": True},
        "modalities": {"vision": True},
    }
    told = ollama.shown({"meta": meta}, props, embeds=True)
    assert told["capabilities"] == ["completion", "embedding", "tools", "thinking", "vision"]
    assert told["details"]["parameter_size"] == "8.2B"
    assert told["details"]["quantization_level"] == "Q4_K"
    kind = told["model_info"]["general.architecture"]
    assert told["model_info"][f"{kind}.context_length"] == 4096
    assert ollama.shown({}, {}, embeds=False)["capabilities"] == ["completion"]


@pytest.mark.parametrize("number", [10**400, -1, 1.5, float("nan"), "x", None])
def test_numbers_of_a_stranger(number: Any) -> None:
    meta = {"meta": {"n_ctx": number, "n_params": number, "size": number}}
    assert ollama.running("a", meta)["context_length"] == ollama.tag("a", meta)["size"] == 0
    assert ollama.shown(meta, {}, embeds=False)["details"]["parameter_size"] == ""
    usage = {"prompt_tokens": number, "completion_tokens": number}
    polish = read("/api/chat", ASK).dialect.polish({})
    assert polish is not None
    polish.feed(make({"usage": usage, "timings": {"predicted_n": number}}) if number == number else b"")
    assert json.loads(polish.feed(b"data: [DONE]\n\n"))["eval_count"] == 0


def test_two_models_have_two_digests() -> None:
    one, two = ollama.tag("a", {}), ollama.tag("b", {})
    assert one["digest"] != two["digest"]
    assert len(one["digest"]) == 64
    assert ollama.tag("a", {"created": 7})["digest"] == ollama.tag("a", {"created": 8})["digest"]


def test_embeddings_are_told_as_they_were_written() -> None:
    data = [{"embedding": [0.5, -2e-05], "index": 1}, {"embedding": [3, 4, 12], "index": 0}]
    body = json.dumps({"data": data, "usage": {"prompt_tokens": 3}}).encode()
    told = json.loads(ollama.embedding_answer("/api/embed", {"model": "m"}, 0.0, body))
    assert told["embeddings"] == [[3, 4, 12], [0.5, -2e-05]]
    assert (told["model"], told["prompt_eval_count"]) == ("m", 3)
    short = json.loads(ollama.embedding_answer("/api/embed", {"dimensions": 2}, 0.0, body))
    assert [math.hypot(*each) for each in short["embeddings"]] == [1.0, math.hypot(0.5, -2e-05)]
    assert json.loads(ollama.embedding_answer("/api/embeddings", {}, 0.0, body)) == {"embedding": [3, 4, 12]}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": 7},
        {"data": [{}]},
        {"data": [{"index": 0, "embedding": "x"}], "usage": {}},
        [7],
        {"data": [{"index": float("inf"), "embedding": [1]}]},
    ],
)
def test_what_are_no_embeddings_is_not_passed_on(answer: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        ollama.embedding_answer("/api/embed", {}, 0.0, json.dumps(answer).encode())


@pytest.mark.parametrize("given", [None, 7, [7], {}, ["x"] * (ollama.OLLAMA_EMBED_INPUTS + 1)])
def test_what_cannot_be_embedded_is_refused(given: Any) -> None:
    with pytest.raises(ApiError, match="input"):
        ollama.embedding_request("/api/embed", {"input": given})
