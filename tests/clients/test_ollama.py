"""Ollama's own Python client, and the `llm` command with its plugin for Ollama."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.clients.test_llm import llm
from tests.support.lone_engine import LoneEngine
from tests.support.node import NodeProcess
from tests.support.pairs import Pair
from tests.support.questions import (
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

OPTIONS = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(api: NodeProcess) -> Iterator[ollama.Client]:
    with ollama.Client(host=api.url, timeout=60) as client:
        yield client


def test_a_chat(client: ollama.Client, chat_text: str) -> None:
    answer = client.chat(model="any", messages=MESSAGES, options=OPTIONS)

    assert answer.message.content == chat_text
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 12)
    assert answer.prompt_eval_count
    assert answer.eval_duration
    assert answer.total_duration
    assert answer.total_duration >= answer.eval_duration


def test_a_streamed_chat(client: ollama.Client, chat_text: str) -> None:
    *parts, last = client.chat(model="any", messages=MESSAGES, options=OPTIONS, stream=True)

    assert "".join(part.message.content or "" for part in parts) == chat_text
    assert len(parts) > 6
    assert (last.done, last.eval_count) == (True, 12)


def test_a_prompt(client: ollama.Client, chat_text: str) -> None:
    assert client.generate(model="any", prompt=QUESTION, options=OPTIONS).response == chat_text
    streamed = client.generate(model="any", prompt=QUESTION, options=OPTIONS, stream=True)
    assert "".join(part.response or "" for part in streamed) == chat_text


def test_a_raw_prompt(client: ollama.Client, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).json()["choices"][0]["text"]
    options = {"temperature": 0, "num_predict": TEXT["max_tokens"]}
    answer = client.generate(model="any", prompt=TEXT["prompt"], raw=True, options=options)
    assert answer.response == expected


def test_a_form(client: ollama.Client) -> None:
    question = [{"role": "user", "content": WEATHER}]
    answer = client.chat(model="any", messages=question, format=SCHEMA, options={"temperature": 0})
    assert answer.message.content
    check_weather(answer.message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(client: ollama.Client, stream: bool) -> None:
    turns = [_as_ollama(turn) for turn in WEATHER_TURNS]
    chat: Any = client.chat
    answer = chat(model="any", messages=turns, tools=[TOOL], options={"temperature": 0}, stream=stream)
    told = list(answer) if stream else [answer]
    (call,) = [call for part in told for call in part.message.tool_calls or ()]
    assert call.function.name == "weather"
    check_weather(dict(call.function.arguments))


def _as_ollama(turn: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in turn:
        return {name: turn[name] for name in ("role", "content")}
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = [{"function": {**each, "arguments": json.loads(each["arguments"])}} for each in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_what_is_told_of_the_model(client: ollama.Client, api: NodeProcess) -> None:
    (model,) = client.list().models
    assert model.model
    assert model.size
    assert model.details is not None
    assert model.details.parameter_size == "134.5M"
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.digest, loaded.context_length) == (model.model, model.digest, 2048)
    shown = client.show(model.model)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["model.context_length"] == 2048


def test_refusals_are_sentences(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="mesh-llm load"):
        client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="2048"):
        client.generate(model="any", prompt="one " * 4000)
    with pytest.raises(ollama.ResponseError, match="image input is not supported") as refused:
        client.generate(model="any", prompt="What is it?", images=[PIXEL])
    assert refused.value.status_code == 400


def test_embeddings(embedding_pair: Pair) -> None:
    with ollama.Client(host=embedding_pair.client.url, timeout=60) as client:
        answer = client.embed(model="any", input=["one", "two", "one"])
        first, second, third = answer.embeddings
        assert math.isclose(math.hypot(*first), 1.0, rel_tol=1e-4)
        assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(first, third, strict=True))
        assert first != second
        assert answer.prompt_eval_count
        assert len(client.embed(model="any", input="one", dimensions=8).embeddings[0]) == 8
        old = client.embeddings(model="any", prompt="one").embedding
        assert len(old) == len(first)
        assert "embedding" in (client.show("any").capabilities or ())


@pytest.fixture
def user(api: NodeProcess, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has installed the plugin."""
    return {**os.environ, "LLM_USER_PATH": str(tmp_path), "OLLAMA_HOST": api.url}


@pytest.fixture
def name(client: ollama.Client) -> str:
    """What the plugin calls the model that it finds."""
    (model,) = client.list().models
    return f"ollama/{model.model}"


@pytest.mark.parametrize("mode", [(), pytest.param(("--no-stream",), marks=pytest.mark.full)])
def test_the_llm_command_finds_the_model_by_itself(
    user: dict[str, str], name: str, chat_text: str, mode: tuple[str, ...]
) -> None:
    options = ("-o", "temperature", "0", "-o", "num_predict", "12")
    assert llm(user, "-m", name, *mode, *options, QUESTION) == f"{chat_text}\n"


@pytest.mark.full
def test_the_llm_command_with_a_schema(user: dict[str, str], name: str) -> None:
    check_weather(llm(user, "-m", name, "-o", "temperature", "0", "--schema", json.dumps(SCHEMA), WEATHER))
