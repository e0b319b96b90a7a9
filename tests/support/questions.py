"""What tests ask through one client after the other, and what has to come back."""

from __future__ import annotations

import json
from typing import Any

from mesh_llm.lab.chaos.questions import SCHEMA as SCHEMA
from mesh_llm.lab.chaos.questions import TOOL as TOOL

QUESTION = "Why is the sky blue?"
ABOUT_SKY = r"The (sky|answer)\b"
"""How SmolLM2's answer begins; which way it takes depends on the arithmetic of the CPU."""
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
WEATHER = "What is the weather in Paris, in C?"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG."""
EXACT: dict[str, Any] = {"cache_prompt": False}
"""A prompt that is computed in other batches may end in another text."""
CHAT: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **EXACT}
TEXT: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, **EXACT}
_CALLED = {"name": "weather", "arguments": '{"city": "Rome", "unit": "C"}'}
_ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": _CALLED}],
}
WEATHER_TURNS: Any = [
    {"role": "user", "content": "What is the weather in Rome, in C?"},
    _ASSISTANT,
    {"role": "tool", "tool_call_id": "1", "content": "18"},
    {"role": "user", "content": WEATHER},
]
"""With an example: so small a model rarely calls anything of its own accord."""


def check_weather(arguments: str | dict[str, Any]) -> None:
    """They are what the schema allows."""
    document = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert sorted(document) == ["city", "unit"]
    assert document["city"] in ("Paris", "Rome")
    assert document["unit"] in ("C", "F")
