"""What clients ask: all of it has one right answer, at temperature 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mesh_llm.frozen import frozen

CHAT = "/v1/chat/completions"
_EXACT: dict[str, Any] = {"temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
"""Closed: what follows it ends soon, whatever the model."""
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Current weather of a city", "parameters": SCHEMA},
}
_NOTES = " ".join(f"Note {number}: the weather was fine." for number in range(30))


@frozen
class ChaosQuestion:
    form: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def _chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {**_EXACT, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


def _stream(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return _chat(text, tokens, stream=True, **more)


_SHAPE = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
_CALLS = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}

QUESTIONS: Mapping[str, ChaosQuestion] = {
    "fox": ChaosQuestion(form="chat", path=CHAT, body=_stream("Tell me of a fox.", 64, ignore_eos=True)),
    "poem": ChaosQuestion(
        form="chat", path=CHAT, body=_stream("Write a poem on rivers.", 96, ignore_eos=True)
    ),
    "count": ChaosQuestion(form="chat", path=CHAT, body=_stream("Count to fifty.", 48, ignore_eos=True)),
    "long": ChaosQuestion(
        form="long prompt", path=CHAT, body=_stream(f"{_NOTES} Tell me of a fox.", 32, ignore_eos=True)
    ),
    "whole": ChaosQuestion(form="whole", path=CHAT, body=_chat("List five colours.", 40, ignore_eos=True)),
    "text": ChaosQuestion(
        form="completion",
        path="/v1/completions",
        body={
            **_EXACT,
            "prompt": "Once upon a time, in a village between two rivers,",
            "max_tokens": 56,
            "ignore_eos": True,
            "stream": True,
        },
    ),
    "json": ChaosQuestion(
        form="JSON",
        path=CHAT,
        body=_stream("What is the weather in Paris, in C?", 60, response_format=_SHAPE),
    ),
    "tools": ChaosQuestion(
        form="tools", path=CHAT, body=_stream("What is the weather in Rome?", 96, **_CALLS)
    ),
    "tokens": ChaosQuestion(
        form="tokenize", path="/tokenize", body={"content": "Tell me of a fox and a goose."}
    ),
}

EMBEDDINGS: Mapping[str, ChaosQuestion] = {
    f"vector{number}": ChaosQuestion(form="embeddings", path="/v1/embeddings", body={"input": text})
    for number, text in enumerate(
        ("Tell me of a fox.", "A village between two rivers.", _NOTES, "Rome is warm in June.")
    )
}
"""For a mesh that answers nothing else."""

NEAR = 1e-3
"""Of a number of a vector whose length is one. What is computed in one batch with other texts is rounded
otherwise in the sixth digit; another text's vector is off by hundredths."""


def is_same(form: str, given: str, undisturbed: str) -> bool:
    """Whether a whole answer is what it would have been: texts to the letter, vectors nearly."""
    return given == undisturbed or (
        form == "embeddings" and _are_near(_numbers(given), _numbers(undisturbed))
    )


def _numbers(vectors: str) -> list[float]:
    return [number for vector in json.loads(vectors) for number in vector]


def _are_near(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= NEAR for a, b in zip(one, other, strict=True))
