"""Documents that are almost right: seeded, so that a run that found something can be had again."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

_PLAIN = re.compile("[0-9a-zA-Z_-]+")
_LENGTH_LIMIT = 60_000
_DEEP: Any = 0
for _ in range(60):
    _DEEP = [_DEEP]

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 5e-324),
    *((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) - 1, 1 << 53, 1 << 63, 1 << 64, 10**30),
    *("", " ", "x", "x" * 2000, "0", "\0", "\n", "\x1b[2J", "\u202e", "\ud800", "é" * 200, "../../x", "{}"),
    *("alive", "dead", "left", "serving", "client", "node", "quic", "tcp", "local", "manifest", "bytes"),
    *([], {}, [None], [[]], {"": {}}, list(range(600)), {str(key): key for key in range(80)}, _DEEP),
)
"""No addresses, and none is altered: nodes dial them, and no packet may leave this machine."""


Seal = Callable[[Any], Any]
"""Signs what is to be signed in a document."""


class Mutations:
    """`ids` are those of nodes, which mean something where they are put."""

    def __init__(self, *, seed: int, ids: tuple[str, ...], seal: Seal = lambda document: document) -> None:
        self.dice = Random(seed)
        self._ids = ids
        self._seal = seal

    def text(self, document: dict[str, Any]) -> bytes:
        """One of that document, as JSON, in which also characters travel that Python would not encode."""
        while True:
            text = json.dumps(self._next(document), separators=(",", ":"), allow_nan=False).encode()
            # A longer one ends the connection before it is looked at.
            if len(text) <= _LENGTH_LIMIT:
                return text

    def _next(self, document: dict[str, Any]) -> dict[str, Any]:
        """Before it is signed, so that every signature is right; or afterwards, so that one may not be."""
        before = self.dice.random() < 0.6
        document = copy.deepcopy(document if before else self._seal(document))
        for _ in range(self.dice.choice((1, 1, 1, 2, 3, 5))):
            self._mutate(document)
        changed: dict[str, Any] = self._seal(document) if before else document
        return changed

    def _mutate(self, document: dict[str, Any]) -> None:
        """Somewhere, but not the word that says what kind of document it is: there is a test for each."""
        places = [
            (holder, key) for holder, key in _places(document) if holder is not document or key != "kind"
        ]
        if not places:
            return
        holder, key = self.dice.choice(places)
        match self.dice.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.extend([copy.deepcopy(holder[key])] * self.dice.choice((1, 2, 300)))
            case 1 | 2 if isinstance(holder, dict):
                holder[self.dice.choice(("", "kind", "x" * 100, "\0", "records", "\ud800"))] = self._strange()
            case 3:
                holder[key] = self.dice.choice(self._ids)
            case 4:
                holder[key] = self._altered(holder[key])
            case 5:
                holder[key] = [holder[key]]
            case _:
                holder[key] = self._strange()

    def _strange(self) -> Any:
        return copy.deepcopy(self.dice.choice(STRANGE))

    def _altered(self, value: Any) -> Any:
        match value:
            case bool():
                return not value
            case int():
                return value + self.dice.choice((-1, 1, 1 << 20, -(1 << 20), (1 << 53) - 1 - value))
            case float():
                return -value
            case str() if _PLAIN.fullmatch(value):
                place = self.dice.randrange(len(value))
                return value[:place] + self.dice.choice("0fgZ-") + value[place + 1 :]
        return self._strange()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key within it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
