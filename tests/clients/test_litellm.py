"""LiteLLM, through which many agents and gateways call what speaks like OpenAI."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import FromPyPI
from tests.support.lone_engine import LoneEngine
from tests.support.node import NodeProcess
from tests.support.pairs import Pair
from tests.support.questions import EXACT, MESSAGES, SCHEMA, TEXT, TOOL, WEATHER_TURNS, check_weather
from tests.support.strangers import Strangers

Call = Callable[..., dict[str, Any]]
Result = Callable[..., Any]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
LOCKED = Path(__file__).parent / "litellm"
END_S = 60.0


@pytest.fixture(scope="module")
def litellm(strangers: Strangers) -> Iterator[subprocess.Popen[str]]:
    """It starts for seconds: one process serves them all."""
    client = FromPyPI(LOCKED)
    why_not = client.install()
    assert why_not is None, why_not
    # Not this one's packages, wherever the tests run from.
    argv = [str(client.python), "-P", str(LOCKED / "answer.py")]
    env = {**os.environ, **strangers.environment()}
    called = len(strangers.called)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process
        assert strangers.called[called:] == []
        assert process.stdin is not None
        process.stdin.close()
        try:
            assert process.wait(END_S) == 0
        finally:
            process.kill()


@pytest.fixture
def call(litellm: subprocess.Popen[str], api: NodeProcess) -> Call:
    def call(function: str, *, model: str = "openai/any", **arguments: Any) -> dict[str, Any]:
        assert litellm.stdin is not None
        assert litellm.stdout is not None
        where = {"model": model, "api_base": f"{api.url}/v1", "api_key": "mesh"}
        limits = {"timeout": 60, "max_retries": 0}
        asked = {"function": function, "arguments": {**where, **limits, **arguments}}
        litellm.stdin.write(json.dumps(asked) + "\n")
        litellm.stdin.flush()
        answer: dict[str, Any] = json.loads(litellm.stdout.readline())
        return answer

    return call


@pytest.fixture
def result(call: Call) -> Result:
    def result(function: str, **arguments: Any) -> Any:
        answer = call(function, **arguments)
        assert "result" in answer, answer
        return answer["result"]

    return result


def short(**more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "extra_body": EXACT, **more}


@pytest.mark.parametrize("function", ["completion", "acompletion"])
def test_chat(result: Result, chat_text: str, function: str) -> None:
    answer = result(function, **short())

    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (chat_text, "length")
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("function", ["completion", "acompletion"])
def test_stream(result: Result, chat_text: str, function: str) -> None:
    pieces = result(function, **short(stream=True, stream_options={"include_usage": True}))

    deltas = [piece["choices"][0] for piece in pieces if piece["choices"]]
    assert len(pieces) > 6
    assert "".join(choice["delta"]["content"] or "" for choice in deltas) == chat_text
    assert [choice["finish_reason"] for choice in deltas if choice["finish_reason"]] == ["length"]
    assert [piece["usage"]["completion_tokens"] for piece in pieces if piece.get("usage")] == [12]


def test_text(result: Result, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).json()["choices"][0]["text"]
    given = {"prompt": TEXT["prompt"], "temperature": 0, "max_tokens": 8, "extra_body": EXACT}

    answer = result("text_completion", model="text-completion-openai/any", **given)

    assert answer["choices"][0]["text"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_tools(result: Result, stream: bool) -> None:
    asked = {"messages": WEATHER_TURNS, "tools": [TOOL], "tool_choice": "required", "stream": stream}

    answer = result("completion", **short(max_tokens=60, **asked))

    if stream:
        deltas = [piece["choices"][0]["delta"] for piece in answer if piece["choices"]]
        called = [tool["function"] for delta in deltas for tool in delta["tool_calls"] or ()]
        check_weather("".join(function["arguments"] or "" for function in called))
        assert [function["name"] for function in called if function["name"]] == ["weather"]
    else:
        (called_once,) = answer["choices"][0]["message"]["tool_calls"]
        assert called_once["function"]["name"] == "weather"
        check_weather(called_once["function"]["arguments"])


def test_schema(result: Result) -> None:
    answer = result("completion", **short(max_tokens=60, response_format=FORMAT))

    check_weather(answer["choices"][0]["message"]["content"])


def test_responses(result: Result) -> None:
    answer = result("responses", input="Say hello.", max_output_tokens=16, temperature=0)

    assert answer["output"][0]["content"][0]["text"]
    assert answer["usage"]["output_tokens"] == 16


def test_a_refusal_is_the_error_that_the_client_knows(call: Call) -> None:
    answer = call("completion", **short(messages=[{"role": "user", "content": "word " * 5000}]))

    assert (answer["error"], answer["status"]) == ("ContextWindowExceededError", 400), answer


def test_the_model_is_named_by_the_mesh(result: Result, pair: Pair) -> None:
    answer = result("completion", model=f"openai/{pair.model}", **short(max_tokens=1))

    assert answer["model"].endswith(pair.model)
