"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.dialects.base import (
    Dialect,
    Document,
    Polish,
    Said,
    Seam,
    answers_for_each_prompt,
    documents,
    head_of,
    is_several,
)
from mesh_llm.gateway.dialects.choices import OneUsage, total_usage, usages_of
from mesh_llm.gateway.sse import data_of, make

_CALLS_LIMIT = 1024
"""Of one answer; an engine may be a stranger's, and name any number."""


class Chat(Dialect):
    assembles_several = True

    def understood(self, body: Document) -> Document:
        # The engine reads a word here, and would take a function's name for "auto".
        match body.get("tool_choice"):
            case {"type": "function", "function": {"name": str(name)}} if isinstance(body.get("tools"), list):
                named = [tool for tool in body["tools"] if _name_of(tool) == name]
                return {**body, "tools": named, "tool_choice": "required"} if named else body
        return body

    def continued(self, body: Document, said: Said) -> Document | None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or "continue_final_message" in body:
            return None
        last: Document = {"role": "assistant", "content": said.content}
        if said.reasoning:
            last["reasoning_content"] = said.reasoning
        if messages[-1].get("role") == "assistant":
            # The client has written the beginning of the answer itself.
            own = messages[-1].get("content")
            if not isinstance(own, str) or said.reasoning or messages[-1].get("reasoning_content"):
                return None
            messages, last = messages[:-1], {"role": "assistant", "content": own + said.content}
            if body.get("echo"):
                return None
        return {
            **body,
            "messages": [*messages, last],
            "echo": False,
            "add_generation_prompt": False,
            "continue_final_message": "content" if said.content else "reasoning_content",
        }

    def is_plain(self, body: Document) -> bool:
        # As "none" it leaves the marks of reasoning in the text, and the engine would add its own.
        apart = body.get("reasoning_format") in (None, "auto", "deepseek")
        return apart and super().is_plain(body)

    def rendering(self, body: Document) -> tuple[str, Document] | None:
        return "/apply-template", body

    def counting(self, body: Document) -> tuple[str, Document] | None:
        return "/v1/chat/completions/input_tokens", body

    def said(self, events: Sequence[bytes]) -> Said:
        content, reasoning, calls, ended = [], [], False, False
        for choice, delta in _deltas(events):
            content.append(delta.get("content") or "")
            reasoning.append(delta.get("reasoning_content") or "")
            calls = calls or "tool_calls" in delta
            ended = ended or choice.get("finish_reason") is not None
        return Said(content="".join(content), reasoning="".join(reasoning), calls=calls, ended=ended)

    def is_last(self, event: bytes) -> bool:
        return event.startswith(b"data: [DONE]")

    def polish(self, body: Document) -> Polish:
        return _Roles(body)

    def ending(self, events: Sequence[bytes], body: Document) -> bytes | None:
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        if wants_usage and not any("usage" in data for data in documents(events)):
            return None
        return b"data: [DONE]\n\n"

    def joined(self, data: Document, seam: Seam) -> Document | None:
        if usage := data.get("usage"):
            count(usage, seam)
        for choice in data.get("choices", ()):
            delta = choice.get("delta", {})
            if "role" in delta:
                return None
            if seam.is_full and choice.get("finish_reason") is None:
                return None
            if seam.is_full:
                choice["finish_reason"] = "length"
        return data

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        told = documents(events)
        last = told[-1]
        answer = {
            "choices": _choices(events),
            "created": last["created"],
            "model": last["model"],
            "system_fingerprint": last.get("system_fingerprint"),
            "object": "chat.completion",
            "usage": total_usage(usages_of(told), answers_for_each_prompt(body)),
            "id": last["id"],
        }
        return {**answer, "timings": last["timings"]} if "timings" in last else answer

    def failed(self, failure: ApiError, events: Sequence[bytes]) -> bytes:
        choice = {"finish_reason": "error", "index": 0, "delta": {}}
        return make({**head_of(events), **failure.document(), "choices": [choice]})


class _Roles:
    """Each choice begins with its role; the engine leaves it out where the first token is no whole letter."""

    def __init__(self, body: Document) -> None:
        self._missing = answers_for_each_prompt(body)
        self._seen: set[int] = set()
        self._usage = OneUsage(body) if is_several(body) else None

    def feed(self, event: bytes) -> bytes:
        role = self._role_before(event) if self._missing > 0 else b""
        return role + (event if self._usage is None else self._usage.feed(event))

    def _role_before(self, event: bytes) -> bytes:
        choices = (data_of(event) or {}).get("choices") or [None]
        index = choices[0].get("index") if isinstance(choices[0], dict) else None
        if not isinstance(index, int) or index in self._seen:
            return b""
        self._seen.add(index)
        self._missing -= 1
        if "role" in (choices[0].get("delta") or {}):
            return b""
        delta = {"role": "assistant", "content": None}
        return make(
            {**head_of([event]), "choices": [{"finish_reason": None, "index": index, "delta": delta}]}
        )


def _choices(events: Sequence[bytes]) -> list[Document]:
    """What was told of each, put together."""
    found: dict[int, Document] = {}
    for choice, delta in _deltas(events):
        index = choice["index"]
        empty = {"finish_reason": None, "index": index, "message": {"role": "assistant", "content": ""}}
        whole = found.setdefault(index, empty)
        message = whole["message"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + (
                delta["reasoning_content"] or ""
            )
        for part in delta.get("tool_calls", ()):
            add_call(message.setdefault("tool_calls", []), part)
        whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    return [found[index] for index in sorted(found)]


def count(usage: Document, seam: Seam) -> None:
    """Prompt and answer as if there had been no seam."""
    usage["prompt_tokens"] = seam.prompt_tokens
    usage["completion_tokens"] = seam.tokens + (0 if seam.is_full else usage["completion_tokens"])
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


def _deltas(events: Sequence[bytes]) -> list[tuple[Document, Document]]:
    return [
        (choice, choice.get("delta") or {})
        for data in documents(events)
        for choice in data.get("choices", ())
    ]


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def add_call(calls: list[Document], part: Any) -> None:
    """A tool call arrives in pieces: its name first, then its arguments bit by bit."""
    index = part.get("index", 0)
    if not 0 <= index < _CALLS_LIMIT:
        raise LookupError("there is no such tool call")
    while len(calls) <= index:
        calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function", {})
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
    if part.get("id"):
        call["id"] = part["id"]
