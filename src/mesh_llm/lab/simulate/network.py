"""Ways between simulated nodes: delay, firewalls, partitions; and what their messages weigh."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

from mesh_llm.membership.messages import Message, Update, from_document, to_document

Between = Callable[[object, object], float | None]
"""Seconds one way between two keys; None where no way leads there."""


class SimulatedNetwork:
    def __init__(self, between: Between, jitter_s: float, random: Random) -> None:
        self._between, self._jitter_s, self._random = between, jitter_s, random
        self._blocked: set[frozenset[object]] = set()
        self._sides: dict[object, object] = {}

    def block(self, one: object, other: object) -> None:
        """Two that cannot reach each other: NATs, or a firewall."""
        self._blocked.add(frozenset((one, other)))

    def unblock(self, one: object, other: object) -> None:
        self._blocked.discard(frozenset((one, other)))

    def part(self, *sides: Iterable[object]) -> None:
        self._sides = {key: at for at, side in enumerate(sides) for key in side}

    def heal(self) -> None:
        self._sides = {}

    def reaches(self, one: object, other: object) -> bool:
        if self._sides and self._sides.get(one) != self._sides.get(other):
            return False
        if self._blocked and frozenset((one, other)) in self._blocked:
            return False
        return self._between(one, other) is not None

    def delay_s(self, one: object, other: object) -> float:
        return (self._between(one, other) or 0.0) + self._jitter_s * self._random.random()


class Scales:
    """Weighs messages as JSON: each one, or every so many and scaled up."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.messages = 0
        self.largest_bytes = 0
        self.bytes_to: Counter[tuple[object, object]] = Counter()
        """By (from, to)."""
        self.bytes_of: Counter[str] = Counter()
        """By the kind of message."""

    def weighed(self, sender: object, receiver: object, message: Message) -> Message:
        """Through JSON and back, as on the wire, and counted."""
        self.messages += 1
        if self.messages % self._every:
            return message
        text = json.dumps(to_document(message), separators=(",", ":"))
        self.largest_bytes = max(self.largest_bytes, len(text))
        self.bytes_to[sender, receiver] += len(text) * self._every
        self.bytes_of[type(message).__name__] += len(text) * self._every
        back = from_document(json.loads(text))
        assert back == message or isinstance(message, Update)
        return back
