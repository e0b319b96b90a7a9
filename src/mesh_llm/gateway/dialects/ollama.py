"""Ollama's `/api/chat` and `/api/generate`.

The engine is asked as for a chat of OpenAI's, or for a plain text. What it says is kept as it says it, so
that another engine can go on with it; only the client is told in lines of JSON. The names of fields are
Ollama's, and durations are in nanoseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.dialects import ollama_request
from mesh_llm.gateway.dialects.base import Dialect, Document, Polish, documents
from mesh_llm.gateway.dialects.chat import Chat, add_call
from mesh_llm.gateway.dialects.completion import Native
from mesh_llm.gateway.http_framing import MalformedAnswer
from mesh_llm.gateway.sse import data_of, dump

CHAT_PATH, GENERATE_PATH = "/api/chat", "/api/generate"
TEXT_PATHS = frozenset({CHAT_PATH, GENERATE_PATH})
CONTENT_TYPE = "application/x-ndjson"
OLLAMA_CALL_BYTES = 8 << 20
"""Of an answer's tool calls, held back until they are whole: longer than any context."""


@frozen
class OllamaAsked:
    """A request as the engine gets it, and how its answer is told."""

    dialect: Dialect
    body: Document
    streamed: bool


def read(path: str, asked: Document) -> OllamaAsked:
    """Raises the refusal of what makes no sense."""
    streamed = asked.get("stream") is not False
    teller = Teller(path, ollama_request.text_of(asked, "model"))
    if path == CHAT_PATH:
        return OllamaAsked(dialect=OllamaChat(teller), body=ollama_request.chat(asked), streamed=streamed)
    if asked.get("suffix"):
        infill = OllamaText(teller, "/infill")
        return OllamaAsked(dialect=infill, body=ollama_request.infill(asked), streamed=streamed)
    if asked.get("raw"):
        text = OllamaText(teller, "/completion")
        return OllamaAsked(dialect=text, body=ollama_request.raw(asked), streamed=streamed)
    return OllamaAsked(dialect=OllamaChat(teller), body=ollama_request.generate(asked), streamed=streamed)


def loaded(path: str, asked: Document, *, goes: bool = False) -> Document:
    """The answer where nothing was asked for but that the model is there, or that it goes."""
    teller = Teller(path, ollama_request.text_of(asked, "model"))
    return {**teller.part(), "done": True, "done_reason": "unload" if goes else "load"}


class Teller:
    """What the lines of one answer have in common."""

    def __init__(self, path: str, model: str) -> None:
        self._path = path
        self._model = model
        self._began_s = time.monotonic()

    def part(self, content: str = "", thinking: str = "", calls: Sequence[Document] = ()) -> Document:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head: Document = {"model": self._model, "created_at": now}
        more: Document = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = list(calls)
        if self._path == CHAT_PATH:
            return {**head, "message": {"role": "assistant", "content": content, **more}, "done": False}
        return {**head, "response": content, **more, "done": False}

    def end(self, part: Document, *, is_cut: bool, counts: tuple[int, int], timings: Document) -> Document:
        """`counts`: tokens of the prompt and of the answer."""
        total = time.monotonic() - self._began_s
        read_s, written_s = _ms(timings, "prompt_ms") / 1e3, _ms(timings, "predicted_ms") / 1e3
        if 0 < (of_last := _ms(timings, "predicted_n")) < counts[1]:
            # Another engine began it, and only the last one tells its time.
            written_s *= counts[1] / of_last
        return {
            **part,
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": _ns(total),
            # Whatever else it waited for: a slot, or an engine to go on with.
            "load_duration": _ns(max(0.0, total - read_s - written_s)),
            "prompt_eval_count": counts[0],
            "prompt_eval_duration": _ns(read_s),
            "eval_count": counts[1],
            "eval_duration": _ns(written_s),
        }


class _Lines(Dialect):
    """Told in lines."""

    content_type = CONTENT_TYPE

    def __init__(self, teller: Teller, engine_path: str) -> None:
        self.engine_path = engine_path
        self._teller = teller

    def sign_of_life(self, text: str) -> bytes:
        # A line is JSON, and JSON may begin with spaces: clients would not take an empty line.
        return b" "

    def failed(self, failure: ApiError, events: Sequence[bytes]) -> bytes:
        return _line(api_errors.ollama_error(failure.message))


class OllamaChat(_Lines, Chat):
    def __init__(self, teller: Teller) -> None:
        super().__init__(teller, "/v1/chat/completions")

    def polish(self, body: Document) -> Polish:
        return _ChatLines(self._teller)

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        lines = _ChatLines(self._teller)
        whole = Chat.assembled(self, events, body)
        message = whole["choices"][0]["message"]
        for data in documents(events):
            lines.note(data)
        thinking = message.get("reasoning_content") or ""
        part = self._teller.part(message["content"], thinking, _called(message.get("tool_calls", ())))
        scores = [score for data in documents(events) for score in _scores(_choice(data))]
        return lines.end({**part, **({"logprobs": scores} if scores else {})})


class OllamaText(_Lines, Native):
    def polish(self, body: Document) -> Polish:
        return _TextLines(self._teller)

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        whole = Native.assembled(self, events, body)
        return _text_end(self._teller, self._teller.part(whole["content"]), whole)


class _ChatLines:
    """A line for each event with a text; calls are told when they are whole, and the counts at the end."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._finish = ""
        self._usage: Document = {}
        self._timings: Document = {}
        self._calls: list[Document] = []
        self._calls_bytes = 0

    def feed(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return self._last() if event.startswith(b"data: [DONE]") else b""
        self.note(data)
        choice = _choice(data)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return b""
        if isinstance(parts := delta.get("tool_calls"), list):
            self._add(event, parts)
        content, thinking = _text(delta, "content"), _text(delta, "reasoning_content")
        if not content and not thinking:
            return b""
        scores = _scores(choice)
        return _line(self._teller.part(content, thinking) | ({"logprobs": scores} if scores else {}))

    def note(self, data: Document) -> None:
        self._finish = _text(_choice(data), "finish_reason") or self._finish
        self._usage = _object(data, "usage") or self._usage
        self._timings = _object(data, "timings") or self._timings

    def end(self, part: Document) -> Document:
        counts = _count(self._usage, "prompt_tokens"), _count(self._usage, "completion_tokens")
        return self._teller.end(part, is_cut=self._finish == "length", counts=counts, timings=self._timings)

    def _add(self, event: bytes, parts: list[Any]) -> None:
        self._calls_bytes += len(event)
        if self._calls_bytes > OLLAMA_CALL_BYTES:
            raise MalformedAnswer("a tool call is too long")
        try:
            for part in parts:
                add_call(self._calls, part)
        except (LookupError, TypeError, AttributeError) as error:
            raise MalformedAnswer("a tool call is malformed") from error

    def _last(self) -> bytes:
        calls = _called(self._calls)
        told = _line(self._teller.part(calls=calls)) if calls else b""
        return told + _line(self.end(self._teller.part()))


class _TextLines:
    def __init__(self, teller: Teller) -> None:
        self._teller = teller

    def feed(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return b""
        content = _text(data, "content")
        told = _line(self._teller.part(content)) if content else b""
        if data.get("stop") is not True:
            return told
        return told + _line(_text_end(self._teller, self._teller.part(), data))


def _text_end(teller: Teller, part: Document, last: Document) -> Document:
    counts = _count(last, "tokens_evaluated"), _count(last, "tokens_predicted")
    is_cut = last.get("stop_type") == "limit"
    return teller.end(part, is_cut=is_cut, counts=counts, timings=_object(last, "timings"))


def _called(calls: Sequence[Document]) -> list[Document]:
    """Whole ones, with their arguments as an object; one that was cut off has none."""
    told: list[Document] = []
    for call in calls:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
            dump(arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            function = {"index": len(told), "name": call["function"]["name"], "arguments": arguments}
            told.append({**({"id": call["id"]} if "id" in call else {}), "function": function})
    return told


def _choice(data: Document) -> Document:
    match data.get("choices"):
        case [dict(choice), *_]:
            return choice
    return {}


def _scores(choice: Document) -> list[Document]:
    """The probabilities of its tokens, without their numbers."""
    match choice.get("logprobs"):
        case {"content": [*scores]}:
            return [_score(score) for score in scores if isinstance(score, dict)]
    return []


def _score(score: Document) -> Document:
    others = score.get("top_logprobs")
    told = (
        [_of_token(other) for other in others if isinstance(other, dict)] if isinstance(others, list) else []
    )
    return {**_of_token(score), **({"top_logprobs": told} if told else {})}


def _of_token(score: Document) -> Document:
    return {name: score[name] for name in ("token", "logprob", "bytes") if name in score}


def _text(data: Document, name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def _object(data: Document, name: str) -> Document:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _count(data: Document, name: str) -> int:
    value = data.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0


def _ms(timings: Document, name: str) -> float:
    value = timings.get(name)
    return value if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _ns(seconds: float) -> int:
    # Never 0: clients divide by it.
    return max(1, round(seconds * 1e9))


def _line(document: Document) -> bytes:
    try:
        return dump(document) + b"\n"
    except ValueError as error:
        raise MalformedAnswer("a number is none") from error
