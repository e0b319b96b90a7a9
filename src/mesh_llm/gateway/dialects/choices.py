"""Answers with several choices: one role for each of them, and one usage for all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mesh_llm.gateway.dialects.base import Document, answers_for_each_prompt
from mesh_llm.gateway.sse import data_of, make, with_data


def total_usage(usages: Sequence[tuple[int, Document]], each: int) -> Document:
    """Of all choices, by their indices; `each`: how many of them go back to one prompt, which counts once."""
    if len(usages) == 1:
        return usages[0][1]
    first_of_prompt: dict[int, Document] = {}
    for index, usage in usages:
        first_of_prompt.setdefault(index // each, usage)
    if not first_of_prompt:
        raise LookupError("the engine has not reported the usage of the answer")
    completion_tokens = sum(usage.get("completion_tokens", 0) for _, usage in usages)
    prompt_tokens = sum(usage.get("prompt_tokens", 0) for usage in first_of_prompt.values())
    cached = sum(_cached_tokens(usage) for usage in first_of_prompt.values())
    return {
        "completion_tokens": completion_tokens,
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usages_of(told: Iterable[Document]) -> list[tuple[int, Document]]:
    """With the index of the choice; those of a chat stand alone, and all go back to the same prompt."""
    return [
        (data["choices"][0]["index"] if data.get("choices") else 0, data["usage"])
        for data in told
        if data.get("usage")
    ]


class OneUsage:
    """The engine tells each choice's usage for itself; OpenAI's API tells the sum, once, at the end."""

    def __init__(self, body: Document) -> None:
        options = body.get("stream_options")
        self._is_wanted = isinstance(options, dict) and bool(options.get("include_usage"))
        self._each = answers_for_each_prompt(body)
        self._usages: list[tuple[int, Document]] = []
        self._last: Document = {}

    def feed(self, event: bytes) -> bytes:
        if b'"usage"' not in event:
            return self._total() + event if event.startswith(b"data: [DONE]") else event
        data = data_of(event)
        if data is None or not data.get("usage"):
            return event
        self._usages += usages_of([data])
        self._last = dict(data)
        del data["usage"]
        return with_data(event, data) if data.get("choices") else b""

    def _total(self) -> bytes:
        if not (self._is_wanted and self._usages):
            return b""
        return make({**self._last, "choices": [], "usage": total_usage(self._usages, self._each)})


def _cached_tokens(usage: Document) -> int:
    details = usage.get("prompt_tokens_details")
    return int(details.get("cached_tokens", 0)) if isinstance(details, dict) else 0
