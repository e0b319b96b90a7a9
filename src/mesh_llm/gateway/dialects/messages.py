"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from mesh_llm.gateway.api_errors import ApiError, anthropic_error
from mesh_llm.gateway.dialects.base import Dialect, Document, Said, Seam, documents, rendered_chat
from mesh_llm.gateway.sse import make

_MAX_TOKENS = 4096


class Messages(Dialect):
    def understood(self, body: Document) -> Document:
        # The engine's own limit where there is none, so that it goes for all parts of an answer together.
        return {"max_tokens": _MAX_TOKENS, **body}

    def is_plain(self, body: Document) -> bool:
        choice = body.get("tool_choice")
        forced = isinstance(choice, dict) and choice.get("type") in ("any", "tool")
        return not forced and super().is_plain({**body, "tool_choice": None})

    def continued(self, body: Document, said: Said) -> Document | None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or said.reasoning or not said.content:
            return None
        beginning = ""
        if messages[-1].get("role") == "assistant":
            own = messages[-1].get("content")
            if not isinstance(own, str):
                return None
            messages, beginning = messages[:-1], own
        last = {"role": "assistant", "content": beginning + said.content}
        return {**body, "messages": [*messages, last]}

    def rendering(self, body: Document) -> tuple[str, Document] | None:
        last = body["messages"][-1]
        return rendered_chat(body, last["content"] if last.get("role") == "assistant" else None)

    def counting(self, body: Document) -> tuple[str, Document] | None:
        return "/v1/messages/count_tokens", body

    def said(self, events: Sequence[bytes]) -> Said:
        told = documents(events)
        deltas = [data["delta"] for data in told if data.get("type") == "content_block_delta"]
        return Said(
            content="".join(delta.get("text") or "" for delta in deltas),
            reasoning="".join(delta.get("thinking") or "" for delta in deltas),
            calls=any(
                data.get("type") == "content_block_start" and data["content_block"].get("type") == "tool_use"
                for data in told
            ),
            ended=any(data.get("type") in ("content_block_stop", "message_delta") for data in told),
        )

    def lacks_start(self, event: bytes) -> bool:
        # The engine tells it with its first token, and only if that is a whole letter.
        return not event.startswith(b"event: message_start")

    def start(self, *, model: str, prompt_tokens: int) -> bytes:
        usage = {"cache_read_input_tokens": 0, "input_tokens": prompt_tokens, "output_tokens": 0}
        message: Document = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return make({"type": "message_start", "message": message}, "message_start")

    def is_last(self, event: bytes) -> bool:
        return event.startswith(b"event: message_stop")

    def joined(self, data: Document, seam: Seam) -> Document | None:
        match data.get("type"):
            case "message_start":
                return None
            case "content_block_start" if data["content_block"].get("type") == "text":
                return None
            case "content_block_start" | "content_block_delta" if seam.is_full:
                return None
            case "message_delta":
                if seam.is_full:
                    data["delta"].update(stop_reason="max_tokens", stop_sequence=None)
                    data["usage"]["output_tokens"] = 0
                data["usage"]["output_tokens"] += seam.tokens
        return data

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        told = documents(events)
        starts = [data["message"] for data in told if data.get("type") == "message_start"]
        message: Document = starts[0]
        blocks: dict[int, Document] = {}
        arguments: dict[int, str] = {}
        for data in told:
            match data.get("type"):
                case "content_block_start":
                    blocks[data["index"]] = dict(data["content_block"])
                case "content_block_delta":
                    _add(blocks[data["index"]], arguments, data["index"], data["delta"])
                case "message_delta":
                    message |= data["delta"]
                    message["usage"] |= data["usage"]
        for index, text in arguments.items():
            blocks[index]["input"] = _parsed(text)
        return {**message, "content": [blocks[index] for index in sorted(blocks)]}

    def failed(self, failure: ApiError, events: Sequence[bytes]) -> bytes:
        return make(anthropic_error(failure.status, failure.message), "error")


def _add(block: Document, arguments: dict[int, str], index: int, delta: Document) -> None:
    match delta.get("type"):
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            arguments[index] = arguments.get(index, "") + delta["partial_json"]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}
