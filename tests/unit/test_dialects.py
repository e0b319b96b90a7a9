"""Answers in every dialect: put together from events, continued, numbered, ended with an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.dialects import PATHS, Said, dialect_of
from mesh_llm.gateway.dialects.base import Dialect, Seam
from mesh_llm.gateway.resume_join import Continuing, Diverged, Matching
from mesh_llm.gateway.sse import EventCutter, comment, data_of, make
from mesh_llm.gateway.text_request import TextRequest

USER = {"role": "user", "content": "Count"}

FAILURE = api_errors.not_resumed("the engine was killed")


def dialect(path: str) -> Dialect:
    found = dialect_of(path)
    assert found is not None
    return found


def read(path: str, body: dict[str, Any], **more: Any) -> TextRequest:
    generation = TextRequest.read("POST", path, json.dumps(body).encode(), **more)
    assert generation is not None
    return generation


# -- what is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_engine_is_always_asked_for_a_stream(path: str) -> None:
    body = {"messages": [], "prompt": "x", "input": "x"}
    generation = read(path, body)
    assert generation.asked["stream"] is True
    assert not generation.streamed
    assert 0 <= generation.asked["seed"] < 1 << 31
    assert {key: generation.asked[key] for key in body} == body
    assert read(path, {**body, "seed": 7}).asked["seed"] == 7
    assert read(path, {**body, "seed": None}, seed=3).asked["seed"] == 3
    assert read(path, body, seed=0).asked["seed"] == 0
    assert read(path, {**body, "seed": 7}, seed=3).asked["seed"] == 7
    # Any seed, at the client's own word.
    assert read(path, {**body, "seed": -1}, seed=3).asked["seed"] != 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'"x"',
        b'{"n": 2, "logprobs": true}',
        b'{"n": 65}',
        b'{"n": 33, "prompt": ["a", "b"]}',
        b'{"logprobs": true}',
        b'{"verbose": true}',
    ],
)
def test_what_cannot_be_put_together_goes_through_as_it_came(body: bytes) -> None:
    assert TextRequest.read("POST", "/v1/completions", body) is None


def test_several_choices_are_put_together() -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert read(path, {"n": 2, "messages": [], "prompt": "x"}).is_several
    assert read("/v1/completions", {"n": 32, "prompt": ["a", "b"]}).is_several
    # The engine's own form is a list of answers.
    assert TextRequest.read("POST", "/completion", b'{"prompt": ["a", "b"]}') is None


def test_other_requests_are_none() -> None:
    assert TextRequest.read("GET", "/v1/chat/completions", b"{}") is None
    assert TextRequest.read("POST", "/v1/embeddings", b"{}") is None
    assert TextRequest.read("POST", "/completion", b"[" * 100_000) is None


def test_a_named_function_is_the_only_one() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("clock", "weather")]
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = read("/v1/chat/completions", {"messages": [], "tools": tools, "tool_choice": choice}).asked
    assert (asked["tools"], asked["tool_choice"]) == ([tools[1]], "required")
    unknown = {"type": "function", "function": {"name": "radar"}}
    asked = read("/v1/chat/completions", {"messages": [], "tools": tools, "tool_choice": unknown}).asked
    assert (asked["tools"], asked["tool_choice"]) == (tools, unknown)
    flat = [{"type": "function", "name": name} for name in ("clock", "weather")]
    asked = read(
        "/v1/responses", {"input": "x", "tools": flat, "tool_choice": {"type": "function", "name": "clock"}}
    ).asked
    assert (asked["tools"], asked["tool_choice"]) == ([flat[0]], "required")


def test_the_form_of_a_response_is_asked_for_as_in_a_chat() -> None:
    """The engine knows no `text.format`."""

    def asked(form: dict[str, Any], **more: Any) -> Any:
        return read("/v1/responses", {"input": "x", "text": {"format": form}, **more}).asked

    schema = {"name": "weather", "strict": True, "schema": {"type": "object"}}
    wanted = {"type": "json_schema", "json_schema": schema}
    assert asked({"type": "json_schema", **schema})["response_format"] == wanted
    assert asked({"type": "json_object"})["response_format"] == {"type": "json_object"}
    assert "response_format" not in asked({"type": "text"})
    own = {"type": "json_object", "schema": {"type": "array"}}
    assert asked({"type": "json_schema", **schema}, response_format=own)["response_format"] == own


@pytest.mark.parametrize(
    ("path", "body", "key", "value"),
    [
        ("/v1/completions", {"prompt": "One"}, "prompt", "One two"),
        ("/v1/completions", {"prompt": ["One"]}, "prompt", "One two"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            "messages",
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": " two"}],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "One"}]},
            "messages",
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "One two"}],
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "One"}]},
            "messages",
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "One two"}],
        ),
        (
            "/v1/responses",
            {"input": "x"},
            "input",
            [
                {"role": "user", "content": "x"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": " two"}],
                },
            ],
        ),
    ],
)
def test_text_is_continued(path: str, body: dict[str, Any], key: str, value: Any) -> None:
    continued = read(path, body).continued(Said(content=" two"))
    assert continued is not None
    assert continued[key] == value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [USER]}),
        ("/v1/messages", {"messages": [USER, {"role": "assistant", "content": "One"}]}),
        ("/v1/responses", {"input": "Count"}),
        ("/v1/responses", {"input": [USER]}),
    ],
)
def test_a_template_shows_whether_it_adds_to_what_was_said(path: str, body: dict[str, Any]) -> None:
    """In every dialect of a chat: the end of both prompts, in the form in which the engine shows them."""
    generation = read(path, {**body, "chat_template_kwargs": {"enable_thinking": False}})
    continued = generation.continued(Said(content=" two"))
    assert continued is not None
    ends = []
    for asked in (generation.asked, continued):
        rendering = generation.dialect.rendering(asked)
        assert rendering is not None
        where, question = rendering
        assert where == "/apply-template"
        assert question["chat_template_kwargs"] == {"enable_thinking": False}
        user, *assistant = question["messages"]
        assert user["role"] == "user"
        ends.append("".join(message["content"] for message in assistant))
    assert ends[1] == ends[0] + " two"


def test_a_native_completion_is_continued_by_its_tokens() -> None:
    said = Said(content=" two", tokens=(7, 8))
    continued = read("/completion", {"prompt": "One"}).continued(said)
    assert continued is not None
    assert continued["prompt"] == ["One", 7, 8]
    continued = read("/completion", {"prompt": [1, 2]}).continued(said)
    assert continued is not None
    assert continued["prompt"] == [1, 2, 7, 8]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ["x"], "stream": True}),
        ("/v1/chat/completions", {"messages": [], "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "response_format": {"type": "json_object"}},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{}], "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": "x", "grammar": 'root ::= "a"'}),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}),
        ("/v1/messages", {"messages": [{"role": "user"}], "tool_choice": {"type": "any"}, "tools": [{}]}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}),
    ],
)
def test_what_has_a_form_is_not(path: str, body: dict[str, Any]) -> None:
    assert read(path, body).continued(Said(content="text")) is None


@pytest.mark.parametrize("said", [Said(), Said(content="x", calls=True), Said(content="x", ended=True)])
def test_nothing_is_continued_where_there_is_no_text(said: Said) -> None:
    assert read("/v1/completions", {"prompt": "x"}).continued(said) is None


def test_reasoning_is_continued_apart_from_the_answer() -> None:
    generation = read("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    thinking = generation.continued(Said(reasoning="Hm"))
    assert thinking is not None
    assert thinking["messages"][-1] == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert thinking["continue_final_message"] == "reasoning_content"
    answering = generation.continued(Said(reasoning="Hm", content="So"))
    assert answering is not None
    assert answering["messages"][-1] == {"role": "assistant", "content": "So", "reasoning_content": "Hm"}
    assert answering["continue_final_message"] == "content"


# -- Anthropic's messages --------------------------------------------------------------------------


def message_events(run: str, words: list[str], *, tokens: int) -> list[bytes]:
    message = {"id": run, "type": "message", "role": "assistant", "content": [], "model": "tiny"}
    usage = {"cache_read_input_tokens": 3, "input_tokens": 7, "output_tokens": 0}
    start = {"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
        for word in words
    ]
    stop = {"type": "content_block_stop", "index": 0}
    end = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": tokens},
    }
    documents: list[dict[str, Any]] = [
        start,
        *([block] if words else []),
        *deltas,
        stop,
        end,
        {"type": "message_stop"},
    ]
    return [make(document, str(document["type"])) for document in documents]


def test_a_message_is_put_together() -> None:
    events = message_events("m1", ["One", " two"], tokens=2)
    assert dialect("/v1/messages").assembled(events, {}) == {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "One two"}],
        "model": "tiny",
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"cache_read_input_tokens": 3, "input_tokens": 7, "output_tokens": 2},
    }


def test_a_tool_use_is_put_together() -> None:
    events = message_events("m1", ["One"], tokens=5)
    start = {"type": "content_block_start", "index": 1}
    block = {"type": "tool_use", "id": "t", "name": "f"}
    pieces = [
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": part},
        }
        for part in ('{"a"', ": 1}")
    ]
    more = [make(document, "x") for document in ({**start, "content_block": block}, *pieces)]
    message = dialect("/v1/messages").assembled([*events[:3], *more, *events[3:]], {})
    assert message["content"][1] == {**block, "input": {"a": 1}}
    assert dialect("/v1/messages").said([*events[:3], *more]).calls


def test_a_message_goes_on() -> None:
    told = message_events("m1", ["One", " two"], tokens=2)[:4]
    said = dialect("/v1/messages").said(told)
    assert (said.content, said.is_text) == ("One two", True)
    seam = Seam(said=said, prompt_tokens=10, tokens=2)
    joint = Continuing(dialect("/v1/messages"), seam, told)
    fed = [joint.feed(event) for event in message_events("m2", [" three"], tokens=1)]
    rest = [event for event in fed if event is not None]
    documents = [data_of(event) or {} for event in rest]
    kinds = [document["type"] for document in documents]
    assert kinds == ["content_block_delta", "content_block_stop", "message_delta", "message_stop"]
    assert documents[2]["usage"] == {"output_tokens": 3}
    assert dialect("/v1/messages").is_last(rest[-1])
    whole = dialect("/v1/messages").assembled([*told, *rest], {})
    assert whole["content"] == [{"type": "text", "text": "One two three"}]


def test_a_message_ends_with_anthropics_own_error() -> None:
    event = dialect("/v1/messages").failed(FAILURE, [])
    assert event.startswith(b"event: error\n")
    error = {"type": "api_error", "message": "the engine was killed"}
    assert data_of(event) == {"type": "error", "error": error}


# -- OpenAI's responses ----------------------------------------------------------------------------


def response_events(run: str, words: list[str], *, before: str = "", tokens: int) -> list[bytes]:
    text = before + "".join(words)
    begun = {"id": f"resp_{run}", "object": "response", "status": "in_progress"}
    item = {"content": [], "id": f"msg_{run}", "role": "assistant", "type": "message"}
    done = {**item, "content": [{"type": "output_text", "text": text}]}
    usage = {"input_tokens": 10 + len(before.split()), "output_tokens": tokens, "total_tokens": 99}
    response = {**begun, "status": "completed", "created_at": 5, "output": [done], "usage": usage}
    named = {"item_id": f"msg_{run}"}
    documents: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "item": item},
        {"type": "response.content_part.added", **named, "part": {"type": "output_text", "text": ""}},
        *({"type": "response.output_text.delta", **named, "delta": word} for word in words),
        {"type": "response.output_text.done", **named, "text": text},
        {"type": "response.output_item.done", "item": done},
        {"type": "response.completed", "response": response},
    ]
    return [make(document, str(document["type"])) for document in documents]


def test_a_response_goes_on_under_its_own_names() -> None:
    responses = dialect("/v1/responses")
    told = response_events("a", ["One", " two"], tokens=2)[:6]
    said = responses.said(told)
    assert said.content == "One two"
    joint = Continuing(responses, Seam(said=said, prompt_tokens=10, tokens=2), told)
    fed = [joint.feed(e) for e in response_events("b", [" three"], before="One two", tokens=1)]
    rest = [event for event in fed if event is not None]
    assert not any(b"_b" in event for event in rest)
    documents = [data_of(event) or {} for event in rest]
    assert [document["type"].removeprefix("response.") for document in documents] == [
        "output_text.delta",
        "output_text.done",
        "output_item.done",
        "completed",
    ]
    assert documents[1]["text"] == "One two three"
    usage = documents[-1]["response"]["usage"]
    assert usage == {"input_tokens": 10, "output_tokens": 3, "total_tokens": 13}
    assert responses.is_last(rest[-1])


def test_a_response_that_was_full_gets_no_word_more() -> None:
    responses = dialect("/v1/responses")
    told = response_events("a", ["One", " two"], tokens=2)[:6]
    seam = Seam(said=responses.said(told), prompt_tokens=10, tokens=2, is_full=True)
    joint = Continuing(responses, seam, told)
    fed = [joint.feed(e) for e in response_events("b", [" three"], before="One two", tokens=1)]
    assert not any(b"three" in event for event in fed if event is not None)
    assert (data_of(fed[-1] or b"") or {})["response"]["usage"]["output_tokens"] == 2


def test_events_of_a_response_are_numbered() -> None:
    polish = dialect("/v1/responses").polish({})
    assert polish is not None
    documents = [data_of(polish.feed(e)) or {} for e in response_events("a", ["One"], tokens=1)]
    assert [document["sequence_number"] for document in documents] == list(range(len(documents)))
    assert documents[0]["response"]["output"] == []
    assert {d["output_index"] for d in documents if "item" in d or "item_id" in d} == {0}
    assert all(document["content_index"] == 0 for document in documents if "item_id" in document)


# -- made again and matched ------------------------------------------------------------------------


def chunk(run: str, delta: dict[str, Any], *, created: int) -> bytes:
    choice = {"finish_reason": None, "index": 0, "delta": delta}
    return make({"choices": [choice], "created": created, "id": f"chatcmpl-{run}"})


def call(run: str, *, arguments: str, created: int, name: str | None = None) -> bytes:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    part = {"index": 0, "function": function}
    named = part if name is None else {**part, "id": f"call-{run}", "type": "function"}
    return chunk(run, {"tool_calls": [named]}, created=created)


def test_a_call_made_again_keeps_its_names() -> None:
    told = [call("a", name="f", arguments="", created=1), call("a", arguments='{"id"', created=1)]
    again = [call("b", name="f", arguments="", created=9), call("b", arguments='{"id"', created=9)]
    joint = Matching(told)
    assert [joint.feed(event) for event in again] == [None, None]
    rest = joint.feed(call("b", arguments=': "chatcmpl-b"}', created=9))
    assert rest is not None
    data = data_of(rest) or {}
    assert (data["id"], data["created"]) == ("chatcmpl-a", 1)
    # A text is left alone, even one that speaks of names.
    part = data["choices"][0]["delta"]["tool_calls"][0]
    assert part["function"]["arguments"] == ': "chatcmpl-b"}'


@pytest.mark.parametrize(
    "other",
    [
        chunk("b", {"content": "Two"}, created=1),
        chunk("b", {"content": "One", "more": 1}, created=1),
        make({"choices": []}),
        b"data: [DONE]\n\n",
        make({"choices": [], "created": 1, "id": "x"}, "named"),
    ],
)
def test_the_first_difference_ends_it(other: bytes) -> None:
    joint = Matching([chunk("a", {"content": "One"}, created=1)])
    with pytest.raises(Diverged):
        joint.feed(other)


# -- events ----------------------------------------------------------------------------------------


def test_events_are_cut_wherever_the_network_cuts() -> None:
    stream = b'data: {"a": 1}\n\n: ping\n\nevent: x\ndata: {"b": "\\n"}\n\ndata: [DONE]\n\n'
    whole = EventCutter().feed(stream)
    assert len(whole) == 4
    for size in range(1, 12):
        cutter = EventCutter()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [event for piece in pieces for event in cutter.feed(piece)] == whole
    assert [data_of(event) for event in whole] == [{"a": 1}, None, {"b": "\n"}, None]


def test_a_comment_is_one_line() -> None:
    assert comment("two\nlines\r\n: data: x") == b": two lines : data: x\n\n"


# -- llama-server's own completions ----------------------------------------------------------------


def native(content: str, tokens: list[int], predicted: int, **more: Any) -> bytes:
    return make({"content": content, "tokens": tokens, "stop": False, "tokens_predicted": predicted, **more})


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([native("One", [5], 1), native(" two", [6], 2)], (5, 6)),
        # Two tokens are one letter, and only the second is told: none of them can be relied on.
        ([native("One", [5], 1), native("é", [8], 3)], ()),
        # It may be the beginning of a stop sequence: the next engine says it again.
        ([native("One", [5], 1), native("", [9], 2)], (5,)),
        ([native("", [9], 1)], ()),
    ],
)
def test_tokens_are_used_only_if_all_are_known(events: list[bytes], tokens: tuple[int, ...]) -> None:
    assert dialect("/completion").said(events).tokens == tokens


def test_a_native_answer_has_tokens_if_they_were_asked_for() -> None:
    events = [native("One", [5], 1), native("", [], 1, stop=True, stop_type="eos")]
    document = dialect("/completion").assembled(events, {"return_tokens": True})
    assert (document["content"], document["tokens"], document["stop_type"]) == ("One", [5], "eos")
    assert dialect("/completion").assembled(events, {})["tokens"] == []


# -- what the engine leaves out --------------------------------------------------------------------


def test_a_message_without_a_start_gets_one() -> None:
    messages = dialect("/v1/messages")
    whole = message_events("m1", ["é"], tokens=2)
    events = whole[1:]
    assert messages.lacks_start(events[0])
    assert not messages.lacks_start(whole[0])
    start = messages.start(model="tiny", prompt_tokens=7)
    assert start.startswith(b"event: message_start\n")
    message = messages.assembled([start, *events], {"model": "x"})
    assert (message["model"], message["content"][0]["text"]) == ("tiny", "é")
    assert message["usage"] == {"cache_read_input_tokens": 0, "input_tokens": 7, "output_tokens": 2}


def test_a_response_begins_once() -> None:
    events = response_events("a", ["One"], tokens=1)
    polish = dialect("/v1/responses").polish({})
    assert polish is not None
    sent = b"".join(polish.feed(event) for event in [*events[:2], *events])
    assert sent.count(b"event: response.created") == 1


@pytest.mark.parametrize(
    ("limit", "names"),
    [(5, ["max_tokens"]), (5.0, ["max_tokens"]), (-1, []), (True, []), (None, []), ("5", [])],
)
def test_limits_are_numbers(limit: Any, names: list[str]) -> None:
    assert dialect("/v1/completions").limits({"max_tokens": limit}) == names


def test_a_message_without_a_limit_has_the_engines() -> None:
    assert read("/v1/messages", {"messages": []}).asked["max_tokens"] == 4096
    assert read("/v1/messages", {"messages": [], "max_tokens": 9}).asked["max_tokens"] == 9


@pytest.mark.parametrize(
    "body", [b'{"temperature": 1e999}', b'{"x": NaN}', b'{"x": [' + b"[]," * 1_000_001 + b"[]]}"]
)
def test_what_json_does_not_have_is_the_engines_to_refuse(body: bytes) -> None:
    assert TextRequest.read("POST", "/v1/completions", body) is None
