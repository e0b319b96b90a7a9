"""What all dialects have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from mesh_llm.frozen import frozen
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.sse import comment, data_of, make

Document = dict[str, Any]

_CHOICES_LIMIT = 64
"""Of one answer that is put together here: all their events at once, while everybody else waits."""


@frozen
class Said:
    """What a client has been told of an answer."""

    content: str = ""
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    """Its tokens, where the events tell them."""
    calls: bool = False
    """A tool call has begun."""
    ended: bool = False
    """Why the text ends has been said; only the end of the stream is missing."""

    @property
    def is_text(self) -> bool:
        return bool(self.content or self.reasoning) and not self.calls and not self.ended


class Polish(Protocol):
    def feed(self, event: bytes) -> bytes:
        """What the client is told instead: any number of events, or nothing at all."""


class Dialect(ABC):
    """Pure: documents in, documents out."""

    reports_progress = True
    """The engine tells how far it is with the prompt in events that can be told from the others."""
    engine_path = ""
    """Where the engine is asked, where that is not the client's path."""
    content_type = ""
    """Of a stream, where the client gets no server-sent events."""
    assembles_several = False
    """More than one choice can be put together from the events of one stream, too."""

    # -- the request ---------------------------------------------------------------------------

    def understood(self, body: Document) -> Document:
        """In words that the engine takes as they are meant."""
        return body

    def is_plain(self, body: Document) -> bool:
        """Whether it wants one text, of no given form: the kind that can be continued."""
        choice = body.get("tool_choice")
        forced = choice not in (None, "auto", "none") and bool(body.get("tools"))
        shaped = body.get("grammar") or body.get("json_schema") or _is_shape(body.get("response_format"))
        return not forced and not shaped and not is_several(body)

    def can_assemble(self, body: Document) -> bool:
        """Whether a whole answer can be put together from the events of a stream."""
        extra = ("logprobs", "top_logprobs", "n_probs", "verbose", "response_fields", "timings_per_token")
        return not any(body.get(name) for name in extra) and self._can_assemble_all(body)

    def _can_assemble_all(self, body: Document) -> bool:
        if not is_several(body):
            return True
        return self.assembles_several and prompts_of(body) * answers_for_each_prompt(body) <= _CHOICES_LIMIT

    @abstractmethod
    def continued(self, body: Document, said: Said) -> Document | None:
        """The request that goes on where the answer was cut; None where there is none."""

    def rendering(self, body: Document) -> tuple[str, Document] | None:
        """Where to see the text of the prompt of `body`, and how to ask; None where it is plain to see."""
        return None

    @abstractmethod
    def counting(self, body: Document) -> tuple[str, Document] | None:
        """Where to ask how many tokens the prompt of `body` has, and what."""

    def counted(self, answer: Document) -> int:
        return int(answer["input_tokens"])

    def limits(self, body: Document) -> list[str]:
        """The keys that bound the length of the answer."""
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
        return [name for name in names if _is_count(body.get(name))]

    # -- the answer ----------------------------------------------------------------------------

    @abstractmethod
    def said(self, events: Sequence[bytes]) -> Said: ...

    @abstractmethod
    def is_last(self, event: bytes) -> bool:
        """Whether a proper answer may end after it."""

    def lacks_start(self, event: bytes) -> bool:
        """Whether `event`, the first one of the engine's, should have come after another one."""
        return False

    def start(self, *, model: str, prompt_tokens: int) -> bytes:
        """The event that an answer begins with, where the engine has left it out."""
        raise NotImplementedError

    def is_error(self, event: bytes) -> bool:
        """Whether the engine gives up."""
        return event.startswith((b'data: {"error"', b"event: error"))

    def polish(self, body: Document) -> Polish | None:
        """For one answer to `body`: adds what clients expect of its events and the engine leaves out."""
        return None

    def ending(self, events: Sequence[bytes], body: Document) -> bytes | None:
        """What is left to say once the text has ended; None where only the engine knows it."""
        return None

    @abstractmethod
    def joined(self, data: Document, seam: Seam) -> Document | None:
        """An event of a continuation as part of the answer that it continues; None to leave it out."""

    @abstractmethod
    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        """The whole answer as one document; `LookupError` or `TypeError` where something is missing."""

    def sign_of_life(self, text: str) -> bytes:
        """For a client that waits; `text` is for whoever looks at the stream."""
        return comment(text)

    def failed(self, failure: ApiError, events: Sequence[bytes]) -> bytes:
        """The event that ends an answer which cannot go on."""
        return make(failure.document())


@frozen
class Seam:
    """Where a continuation begins."""

    said: Said
    prompt_tokens: int
    """Of the request as the client made it."""
    tokens: int
    """Of the answer up to here."""
    is_full: bool = False
    """It has reached its limit already: nothing but its end is wanted."""


def rendered_chat(body: Document, begun: str | None) -> tuple[str, Document]:
    """How the model's template treats the end of a conversation, in the only form in which the engine shows
    a prompt. `begun`: what the assistant has said already; None where it is still to begin."""
    messages: list[Document] = [{"role": "user", "content": "?"}]
    if begun is not None:
        messages.append({"role": "assistant", "content": begun})
    settings: Document = {
        name: body[name] for name in ("chat_template_kwargs", "reasoning_format") if name in body
    }
    return "/apply-template", {**settings, "messages": messages}


def documents(events: Sequence[bytes]) -> list[Document]:
    return [data for event in events if (data := data_of(event)) is not None]


def head_of(events: Sequence[bytes]) -> Document:
    """What all events of an answer in OpenAI's form have in common."""
    names = ("id", "created", "model", "system_fingerprint", "object")
    first = next(iter(documents(events[:1])), {})
    return {name: first[name] for name in names if name in first}


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return whole and value >= 0


def _is_shape(response_format: Any) -> bool:
    return isinstance(response_format, dict) and response_format.get("type") not in (None, "text")


def prompts_of(body: Document) -> int:
    match body.get("prompt"):
        case [*parts] if not any(isinstance(part, int | float) for part in parts):
            return max(1, len(parts))
    # Tokens, and texts among them, are one.
    return 1


def answers_for_each_prompt(body: Document) -> int:
    for name in ("n", "n_cmpl"):
        if isinstance(asked := body.get(name), int) and asked > 0:
            return asked
    return 1


def is_several(body: Document) -> bool:
    """Whether it wants more than one answer."""
    match body.get("prompt"):
        case [str()]:
            batch = False
        case [*parts]:
            batch = any(isinstance(part, str | list | dict) for part in parts)
        case _:
            batch = False
    return batch or any(body.get(name) not in (None, 1) for name in ("n", "n_cmpl", "best_of"))
