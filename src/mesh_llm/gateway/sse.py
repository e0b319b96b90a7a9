"""Server-sent events as bytes: where one ends, and the document that it carries. Pure."""

from __future__ import annotations

import json
from typing import Any

from mesh_llm.gateway.http_framing import MalformedAnswer

GATEWAY_EVENT_LIMIT_BYTES = 32 << 20
"""One event; the last of llama-server's own kind repeats the prompt, at worst twice what is kept of one."""


END = b"\n\n"
_DATA = b"data:"


class EventCutter:
    """Cuts what arrives into whole events, comments included."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._waiting_bytes = 0
        self._rest = b""
        """The last of them."""

    def feed(self, payload: bytes) -> list[bytes]:
        # An engine writes each token as one event, which arrives as one payload.
        if not self._rest and payload.endswith(END) and payload.find(END) == len(payload) - len(END):
            return [payload]
        if END not in self._rest[-1:] + payload:
            # Of a large event: only the end of it is looked at, and all of it joined once.
            self._parts.append(payload)
            self._rest = payload or self._rest
            self._waiting_bytes += len(payload)
            if self._waiting_bytes > GATEWAY_EVENT_LIMIT_BYTES:
                raise MalformedAnswer("an event is too long")
            return []
        *whole, rest = b"".join((*self._parts, payload)).split(END)
        self._parts, self._rest, self._waiting_bytes = ([rest] if rest else []), rest, len(rest)
        return [event + END for event in whole if event]


def data_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object that it carries; None for comments, `[DONE]` and whatever else is no object."""
    at = event.find(_DATA)
    if at < 0 or (at and event[at - 1 : at] != b"\n"):
        return None
    try:
        data = json.loads(event[at + len(_DATA) :])
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def with_data(event: bytes, data: dict[str, Any]) -> bytes:
    """The same event with another document, written as compactly as the engine does."""
    return event[: event.find(_DATA)] + _DATA + b" " + dump(data) + END


def make(data: dict[str, Any], name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + _DATA + b" " + dump(data) + END


def comment(text: str) -> bytes:
    """Clients skip it; a person who looks at the stream reads it."""
    return b": " + " ".join(text.split()).encode() + END


def dump(document: Any) -> bytes:
    """Compact JSON; raises `ValueError` for numbers that JSON does not have."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Half a pair of surrogates: JSON can escape it, UTF-8 cannot hold it.
        return json.dumps(document, separators=(",", ":")).encode()
