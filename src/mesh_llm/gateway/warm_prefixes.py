"""Which engine has read the beginning of a prompt before: it need not read that again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mesh_llm.frozen import frozen
from mesh_llm.gateway.text_request import count_parts

_BEFORE = ("tools", "system", "instructions")
"""What templates put before the conversation."""
_CONVERSATION = ("messages", "input", "prompt")
_BLOCK = 256
"""Characters of a text, or tokens of a list of them, after which its beginning is noted."""
_BLOCK_TOKENS = 64
_LONG_TEXT = 2048
"""A text of so many characters may continue one that somebody else has sent."""
ASKED_LIMIT = 64
"""Beginnings that another node is asked about: the longest."""
_REMEMBERED = 4096
_PARTS_LIMIT = 250_000
_BYTES_LIMIT = 16 << 20
"""Of a request that is read for this alone, while everybody waits: others go to any engine."""


@frozen
class Prompt:
    """Of one request; texts are only told by their digests."""

    size: int = 0
    """Characters, about."""
    beginnings: tuple[tuple[str, int], ...] = ()
    """Digests of what it begins with, the longest last; and how long that is with the answer to it."""
    continues: bool = False
    """An engine has answered an earlier part of it."""

    @property
    def asked(self) -> list[str]:
        """Digests to ask others about."""
        return [digest for digest, _ in self.beginnings[-ASKED_LIMIT:]]

    def size_of(self, digest: str) -> int:
        return next((size for each, size in self.beginnings if each == digest), 0)


def prompt_of(body: Mapping[str, Any]) -> Prompt:
    """Of a request in whichever API."""
    before = "".join(_text(body[name]) for name in _BEFORE if body.get(name))
    conversation = next((body[name] for name in _CONVERSATION if body.get(name)), "")
    digest = hashlib.blake2b(before.encode(errors="replace"), digest_size=12)
    answers = _answers(conversation)
    size = len(before)
    beginnings: dict[str, int] = {}
    for number, (part, is_whole) in enumerate(islice(_parts(conversation), _REMEMBERED)):
        size += len(part)
        if number in answers and beginnings:
            # Whoever read what is before it wrote it.
            beginnings[digest.hexdigest()] = size
        digest.update(f"{len(part)}:".encode() + part.encode(errors="replace"))
        if is_whole:
            beginnings[digest.hexdigest()] = size
    continues = bool(answers) or (isinstance(conversation, str) and size >= _LONG_TEXT)
    return Prompt(size=size, beginnings=tuple(beginnings.items()), continues=continues)


def read_prompt(body: bytes) -> Prompt:
    if len(body) > _BYTES_LIMIT or count_parts(body) > _PARTS_LIMIT:
        return Prompt()
    try:
        document = json.loads(body)
        return prompt_of(document) if isinstance(document, dict) else Prompt()
    except (ValueError, RecursionError):
        return Prompt()


def _parts(conversation: object) -> Iterator[tuple[str, bool]]:
    """Its parts in their order, and whether a longer conversation would have the same part."""
    if isinstance(conversation, str):
        for start in range(0, len(conversation), _BLOCK):
            part = conversation[start : start + _BLOCK]
            yield part, len(part) == _BLOCK
    elif isinstance(conversation, list) and conversation and isinstance(conversation[0], int):
        for start in range(0, len(conversation), _BLOCK_TOKENS):
            tokens = conversation[start : start + _BLOCK_TOKENS]
            yield _text(tokens), len(tokens) == _BLOCK_TOKENS
    elif isinstance(conversation, list):
        for message in conversation:
            yield _text(message), True


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _answers(messages: object) -> set[int]:
    """Which messages an engine has written."""
    known = messages if isinstance(messages, list) else []
    return {
        number
        for number, each in enumerate(known)
        if isinstance(each, dict) and each.get("role") == "assistant"
    }


class WarmPrefixes:
    """What engines were asked last, by the beginnings of prompts."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._engines: dict[str, dict[str, None]] = {}
        """Urls, by digest; the latest digest last."""

    def note(self, engine: str, prompt: Prompt) -> None:
        for digest, _ in prompt.beginnings:
            engines = self._engines.pop(digest, {})
            self._engines[digest] = {**engines, engine: None}
        while len(self._engines) > self._limit:
            del self._engines[next(iter(self._engines))]

    def forget(self, engine: str) -> None:
        """It is gone."""
        for engines in self._engines.values():
            engines.pop(engine, None)

    def sizes(self, prompt: Prompt) -> dict[str, int]:
        """How much of the prompt each engine has read."""
        found = {}
        for digest, size in prompt.beginnings:
            found.update(dict.fromkeys(self._engines.get(digest, ()), size))
        return found

    def longest(self, engine: str, digests: Iterable[str]) -> str:
        """Of these, the last one that the engine has read; empty where it has read none."""
        known = [digest for digest in digests if engine in self._engines.get(digest, ())]
        return known[-1] if known else ""


def checked_digests(value: object) -> Sequence[str]:
    """As another node asks about them."""
    known = value if isinstance(value, list) else []
    return [each for each in known[:ASKED_LIMIT] if isinstance(each, str)]
