"""Records as JSON documents: one declaration for writing and for reading.

Whatever is written can be read: texts are cut and cleaned, lists are shortened. What is read is checked
in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from mesh_llm.membership.checked_fields import WHOLE_LIMIT, Fields
from mesh_llm.sanitise import clean

T = TypeVar("T")

Document = dict[str, object]


@dataclass(frozen=True, slots=True)
class Value:
    """A field: how it is read, and how it is written unless it is None."""

    read: Callable[[Fields, str], Any]
    write: Callable[[Any], object] = lambda value: value
    name: str = ""
    """In the document, where it has another one there."""

    def called(self, name: str) -> Value:
        return replace(self, name=name)


FLAG = Value(Fields.flag)
NODE = Value(Fields.node)


def text(limit: int) -> Value:
    return Value(lambda document, name: document.text(name, limit), lambda value: clean(value, limit))


def whole(most: int = WHOLE_LIMIT) -> Value:
    return Value(lambda document, name: document.whole(name, most=most))


def number(most: float) -> Value:
    return Value(lambda document, name: document.number(name, most=most))


def word(kind: type[StrEnum]) -> Value:
    return Value(lambda document, name: document.word(name, kind), lambda value: value.value)


def maybe(value: Value) -> Value:
    """None, or that."""
    return Value(
        lambda document, name: value.read(document, name) if document.has(name) else None, value.write
    )


def inner(read: Callable[[object], Any], write: Callable[[Any], object]) -> Value:
    return Value(lambda document, name: read(document.get(name)), write)


def items(limit: int, read: Callable[[object], Any], write: Callable[[Any], object]) -> Value:
    return Value(
        lambda document, name: document.items(name, limit, read),
        lambda values: [write(each) for each in values[:limit]],
    )


class Shape(Generic[T]):
    """The fields of a record, all of those without a default among them, by their names in the document.

    `terse`: fields with their default value are left out.
    """

    def __init__(self, kind: type[T], where: str, /, *, terse: bool = False, **values: Value) -> None:
        self.kind = kind
        self._where = where
        self._values = [(name, value.name or name, value) for name, value in values.items()]
        defaults = {each.name: each.default for each in fields(kind)}  # type: ignore[arg-type]
        self._defaults = {name: each for name, each in defaults.items() if each is not MISSING}
        self._left_out = self._defaults if terse else {}

    def read(self, document: object) -> T:
        found = Fields(document, self._where)
        return self.kind(
            **{
                name: value.read(found, called)
                for name, called, value in self._values
                if name not in self._defaults or found.has(called)
            }
        )

    def write(self, thing: T) -> Document:
        document: Document = {}
        for name, called, value in self._values:
            found = getattr(thing, name)
            if name not in self._left_out or found != self._left_out[name]:
                document[called] = None if found is None else value.write(found)
        return document
