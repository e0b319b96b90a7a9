"""Joins what a second engine says to what the first one has said. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from mesh_llm.gateway.dialects.base import Dialect, Seam
from mesh_llm.gateway.engine_connection import EngineError
from mesh_llm.gateway.sse import data_of, with_data

_NAMES = frozenset({"id", "item_id", "call_id"})
"""Random, and another one in each run."""
_PASSING = frozenset({"created", "created_at", "completed_at", "timings", "usage", "id_slot"})
"""May differ between two runs that say the same."""
_CREATED = re.compile(rb'"created":[0-9]+')


class Diverged(EngineError):
    """A second run says something else than the first one did."""


class NotRepeated(EngineError):
    """A continuation that should have begun with the end of what was told begins otherwise."""


class Joint(Protocol):
    def feed(self, event: bytes) -> bytes | None:
        """The event as the client should see it; None where it has seen it already, or need not."""


class AnswerNames:
    """Random names of a second run, and what the first one called the same things."""

    def __init__(self) -> None:
        self._old_of: dict[bytes, bytes] = {}

    def learn(self, old: Any, new: Any) -> bool:
        """Whether both say the same, but for names and for what is new in every run."""
        if isinstance(old, dict) and isinstance(new, dict):
            return old.keys() == new.keys() and all(self._field(key, old[key], new[key]) for key in old)
        if isinstance(old, list) and isinstance(new, list):
            return len(old) == len(new) and all(self.learn(*pair) for pair in zip(old, new, strict=True))
        return bool(old == new)

    def _field(self, key: str, old: Any, new: Any) -> bool:
        if key in _NAMES and isinstance(old, str) and isinstance(new, str) and old and new:
            self._old_of[new.encode()] = old.encode()
            return True
        return key in _PASSING or self.learn(old, new)

    def apply(self, event: bytes) -> bytes:
        # Quotes are escaped within JSON's strings: this is never found in a text.
        for new, old in self._old_of.items():
            event = event.replace(b'"%b"' % new, b'"%b"' % old)
        return event


class Matching:
    """The whole answer once more: what was told is compared and left out, the rest keeps its names."""

    def __init__(self, told: Sequence[bytes]) -> None:
        self._told = tuple(told)
        self._at = 0
        self._names = AnswerNames()
        created = (data_of(told[0]) or {}).get("created") if told else None
        self._created = b'"created":%d' % created if isinstance(created, int) else None

    def feed(self, event: bytes) -> bytes | None:
        if self._at == len(self._told):
            event = self._names.apply(event)
            return event if self._created is None else _CREATED.sub(self._created, event)
        told = self._told[self._at]
        self._at += 1
        if not _is_same(told, event, self._names):
            raise Diverged("the answer was generated again and differs from what was already sent")
        return None


class Continuing:
    """Only what follows, as part of the answer that it continues."""

    def __init__(self, dialect: Dialect, seam: Seam, told: Sequence[bytes]) -> None:
        self._dialect = dialect
        self._seam = seam
        self._names = AnswerNames()
        first = data_of(told[0]) or {}
        self._head = {key: first[key] for key in ("id", "created", "model") if key in first}
        self._told_first: dict[str, dict[str, Any]] = {}
        for event in told:
            if (data := data_of(event)) is not None and isinstance(data.get("type"), str):
                self._told_first.setdefault(data["type"], data)

    def feed(self, event: bytes) -> bytes | None:
        data = data_of(event)
        if data is None:
            return event
        if (told := self._told_first.get(str(data.get("type")))) is not None:
            self._names.learn(told, data)
        joined = self._dialect.joined(data, self._seam)
        if joined is None:
            return None
        joined.update({key: value for key, value in self._head.items() if key in joined})
        return self._names.apply(with_data(event, joined))


class Repeating:
    """A continuation that begins before the end of what was told: what comes again is left out."""

    def __init__(self, joint: Joint, told: Sequence[bytes]) -> None:
        self._joint = joint
        self._told = list(told)
        self.has_differed = False

    def feed(self, event: bytes) -> bytes | None:
        joined = self._joint.feed(event)
        if joined is None or not self._told:
            return joined
        if not _is_same(self._told.pop(0), joined, AnswerNames()):
            self.has_differed = True
            raise NotRepeated("the next engine did not begin with what was sent last")
        return None


def _is_same(told: bytes, event: bytes, names: AnswerNames) -> bool:
    old, new = data_of(told), data_of(event)
    if old is None or new is None:
        return told == event
    same_kind = told.partition(b"data:")[0] == event.partition(b"data:")[0]
    return same_kind and names.learn(old, new)
