"""OpenAI's `/v1/responses`.

Each item is told three times: in pieces, as a whole, and in the end with all others. A
continuation tells the whole text, what was there before it included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.dialects.base import Dialect, Document, Polish, Said, Seam, documents, rendered_chat
from mesh_llm.gateway.sse import data_of, make, with_data

_EMPTY: Document = {
    "output": [],
    "model": "",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
_BEGINNINGS = frozenset({"response.created", "response.in_progress", "response.content_part.added"})


class Responses(Dialect):
    # It would be told in events that look like those at the beginning of an answer.
    reports_progress = False

    def understood(self, body: Document) -> Document:
        return _with_format(_with_choice(body))

    def polish(self, body: Document) -> Polish:
        return _Numbers()

    def is_plain(self, body: Document) -> bool:
        text = body.get("text")
        form = text.get("format") if isinstance(text, dict) else None
        shaped = isinstance(form, dict) and form.get("type") not in (None, "text")
        return not shaped and super().is_plain(body)

    def continued(self, body: Document, said: Said) -> Document | None:
        asked = body.get("input")
        if said.reasoning or not said.content:
            return None
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if not isinstance(items, list) or not items or items[-1].get("role") == "assistant":
            return None
        text = {"type": "output_text", "text": said.content}
        return {
            **body,
            "echo": False,
            "input": [*items, {"type": "message", "role": "assistant", "content": [text]}],
        }

    def rendering(self, body: Document) -> tuple[str, Document] | None:
        match body["input"]:
            case [*_, {"role": "assistant", "content": [{"text": str(text)}]}]:
                return rendered_chat(body, text)
        return rendered_chat(body, None)

    def counting(self, body: Document) -> tuple[str, Document] | None:
        return "/v1/responses/input_tokens", body

    def said(self, events: Sequence[bytes]) -> Said:
        told = documents(events)
        return Said(
            content="".join(
                data.get("delta", "") for data in told if data.get("type") == "response.output_text.delta"
            ),
            reasoning="".join(data.get("delta", "") for data in told if "reasoning" in str(data.get("type"))),
            calls=any(_kind_of_item(data) == "function_call" for data in told),
            ended=any(data.get("type") == "response.completed" for data in told),
        )

    def is_last(self, event: bytes) -> bool:
        return event.startswith(b"event: response.completed")

    def joined(self, data: Document, seam: Seam) -> Document | None:
        kind = data.get("type")
        if kind in _BEGINNINGS or _kind_of_item(data) == "message":
            return None
        if seam.is_full:
            if str(kind).endswith(".delta"):
                return None
            data = _cut(data, seam.said.content)
        usage = (data.get("response") or {}).get("usage")
        if usage:
            usage["input_tokens"] = seam.prompt_tokens
            usage["output_tokens"] = seam.tokens + (0 if seam.is_full else usage["output_tokens"])
            usage["total_tokens"] = usage["input_tokens"] + usage["output_tokens"]
        return data

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        response: Document = documents(events)[-1]["response"]
        return {"completed_at": response["created_at"], **response}

    def failed(self, failure: ApiError, events: Sequence[bytes]) -> bytes:
        error = {"type": "error", "code": str(failure.code), "message": failure.message, "param": None}
        return make({**error, **failure.document()}, "error")


class _Numbers:
    """Clients gather the pieces by numbers, which the engine does not give."""

    def __init__(self) -> None:
        self._sequence = 0
        self._items: dict[str, int] = {}
        self._begun: set[str] = set()

    def feed(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        kind = str(data.get("type"))
        if kind in ("response.created", "response.in_progress"):
            # Told again and again where the first token is no whole letter. A report on the prompt that the
            # client has asked for comes as one of them, too.
            if kind in self._begun and "prompt_progress" not in data:
                return b""
            self._begun.add(kind)
        data["sequence_number"] = self._sequence
        self._sequence += 1
        item = data.get("item_id") or (data.get("item") or {}).get("id")
        if isinstance(item, str):
            data["output_index"] = self._items.setdefault(item, len(self._items))
            if "item" not in data:
                data["content_index"] = 0
        if isinstance(response := data.get("response"), dict):
            data["response"] = {**_EMPTY, "created_at": int(time.time()), **response}
        return with_data(event, data)


def _with_choice(body: Document) -> Document:
    # The engine reads a word here, and would take a function's name for "auto".
    match body.get("tool_choice"):
        case {"type": "function", "name": str(name)} if isinstance(body.get("tools"), list):
            named = [tool for tool in body["tools"] if isinstance(tool, dict) and tool.get("name") == name]
            return {**body, "tools": named, "tool_choice": "required"} if named else body
    return body


def _with_format(body: Document) -> Document:
    """The form of the text where the engine looks for it: as in a chat."""
    if body.get("response_format") is not None:
        return body
    match body.get("text"):
        case {"format": {"type": "json_schema", **schema}}:
            return {**body, "response_format": {"type": "json_schema", "json_schema": schema}}
        case {"format": {"type": "json_object"} as form}:
            return {**body, "response_format": form}
    return body


def _kind_of_item(data: Document) -> str | None:
    """Of an item that begins."""
    if data.get("type") != "response.output_item.added":
        return None
    return str((data.get("item") or {}).get("type"))


def _cut(value: Any, text: str) -> Any:
    """Without what one token too many has added to the text."""
    if isinstance(value, list):
        return [_cut(inner, text) for inner in value]
    if not isinstance(value, dict):
        return value
    cut = {key: _cut(inner, text) for key, inner in value.items()}
    if isinstance(cut.get("text"), str) and cut["text"].startswith(text):
        cut["text"] = text
    return cut
