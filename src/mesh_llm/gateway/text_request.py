"""A request for text: what the client wants, and how the engine is asked for it."""

from __future__ import annotations

import json
import random

from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.dialects import Dialect, Said, dialect_of, ollama
from mesh_llm.gateway.dialects.base import Document, is_several
from mesh_llm.gateway.sse import dump

_SEED_BITS = 31
_PARTS_LIMIT = 1_000_000
"""Of a document that is read here: more would keep everybody waiting. A photograph is one part."""


@frozen
class TextRequest:
    dialect: Dialect
    body: Document
    """As the client wrote it."""
    asked: Document
    """As the engine gets it: always for a stream, which can be cancelled, counted and continued."""
    streamed: bool
    """The client wants the events; else one document."""

    @classmethod
    def read(cls, method: str, path: str, raw: bytes, *, seed: int | None = None) -> TextRequest | None:
        """None where it asks for no text, or the engine had better answer it as it is.

        `seed`: the model's, for a request that brings none.
        """
        dialect = dialect_of(path) if method == "POST" else None
        if dialect is None or count_parts(raw) > _PARTS_LIMIT:
            return None
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                return None
            streamed = body.get("stream") is True
            if not streamed and (body.get("stream") or not dialect.can_assemble(body)):
                return None
            if body.get("response_fields"):
                return None  # nobody could tell the last event
            asked = _asked(dialect, body, streamed, seed)
            dump(asked)
        except (ValueError, RecursionError):
            # Numbers that are none, or boxes in boxes: the engine has its own words for them.
            return None
        return cls(dialect=dialect, body=body, asked=asked, streamed=streamed)

    @classmethod
    def of_ollama(cls, path: str, document: Document, *, seed: int | None = None) -> TextRequest:
        """No engine would read it: raises the refusal where it makes no sense."""
        asked = ollama.read(path, document)
        return cls(
            dialect=asked.dialect,
            body=asked.body,
            asked=_asked(asked.dialect, asked.body, asked.streamed, seed),
            streamed=asked.streamed,
        )

    @property
    def is_several(self) -> bool:
        """It wants more than one answer: the end of one says nothing of the others."""
        return is_several(self.body)

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is always taken: the same request has the same answer."""
        return self.body.get("temperature") == 0 or self.body.get("top_k") == 1

    @property
    def hides_progress(self) -> bool:
        """The client has not asked how far the engine is with the prompt."""
        return self.dialect.reports_progress and not self.body.get("return_progress")

    def continued(self, said: Said) -> Document | None:
        """The request for the rest of an answer; None where it cannot be told from what was said."""
        if not (said.is_text and self.dialect.is_plain(self.body)):
            return None
        try:
            return self.dialect.continued(self.asked, said)
        except (AttributeError, TypeError, LookupError):
            # An engine that answers what is not made as it should be may do so again.
            return None


def count_parts(raw: bytes) -> int:
    """At most so many does a document have, without reading it."""
    return raw.count(b",") + raw.count(b"[")


def read_document(raw: bytes) -> Document:
    """Of a request that must be understood, within the same bounds; raises its refusal."""
    if count_parts(raw) > _PARTS_LIMIT:
        raise api_errors.mistake(f"the request has more than {_PARTS_LIMIT:,} parts")
    try:
        document = json.loads(raw)
        dump(document)
    except (ValueError, RecursionError):
        raise api_errors.mistake("the request's body is no JSON that can be read") from None
    if not isinstance(document, dict):
        raise api_errors.mistake("the request's body must be a JSON object")
    return document


def _asked(dialect: Dialect, body: Document, streamed: bool, seed: int | None) -> Document:
    asked = {**dialect.understood(body), "stream": True}
    if dialect.reports_progress:
        # Between two events nobody looks whether the client is still there; prompts take their time.
        asked["return_progress"] = True
    if not streamed:
        asked["stream_options"] = {"include_usage": True}
    if body.get("seed") is None and seed is not None:
        asked["seed"] = seed
    elif body.get("seed") in (None, -1):
        # The same dice once more, if the answer has to be made again.
        asked["seed"] = random.getrandbits(_SEED_BITS)
    return asked
