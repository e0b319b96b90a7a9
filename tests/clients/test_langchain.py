"""LangChain's chat model on top of OpenAI's client."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.support.node import NodeProcess
from tests.support.questions import EXACT, QUESTION, TOOL, WEATHER, WEATHER_TURNS, check_weather


class Weather(BaseModel):
    """Current weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


def chat(api: NodeProcess, **options: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": EXACT, **options}
    return ChatOpenAI(
        base_url=f"{api.url}/v1",
        api_key=SecretStr("mesh"),
        model="any",
        max_retries=0,
        timeout=60,
        **settings,
    )


def test_invoke(api: NodeProcess, chat_text: str) -> None:
    message = chat(api).invoke(QUESTION)

    assert message.content == chat_text
    assert message.response_metadata["finish_reason"] == "length"
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 12


def test_stream(api: NodeProcess, chat_text: str) -> None:
    pieces = list(chat(api, stream_usage=True).stream(QUESTION))

    assert len(pieces) > 6
    assert "".join(str(piece.content) for piece in pieces) == chat_text
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 12


async def test_ainvoke(api: NodeProcess, chat_text: str) -> None:
    assert (await chat(api).ainvoke(QUESTION)).content == chat_text


def test_bound_tools(api: NodeProcess) -> None:
    bound = chat(api, max_tokens=96).bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)

    message = bound.invoke(WEATHER_TURNS)

    (call,) = message.tool_calls
    assert call["name"] == "weather"
    check_weather(call["args"])


def test_structured_output(api: NodeProcess) -> None:
    structured = chat(api, max_tokens=96).with_structured_output(Weather)

    assert isinstance(structured.invoke(WEATHER), Weather)
