"""Reading documents that strangers wrote: every type, length and range is checked."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from enum import StrEnum
from typing import NoReturn, TypeVar

from mesh_llm.errors import MalformedMessage
from mesh_llm.types import NodeId

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

WHOLE_LIMIT = (1 << 53) - 1
"""The largest number that every JSON reader keeps exactly."""
_FIELD_LIMIT = 64
_COUNT_SLACK = 86_400_000
"""A day in milliseconds: clocks differ."""
_NODE = re.compile(r"[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f]")


class Fields:
    """A JSON object, read field by field. Fields that nobody asks for are from a newer version: ignored."""

    def __init__(self, document: object, where: str) -> None:
        self._where = where
        if not isinstance(document, dict) or len(document) > _FIELD_LIMIT:
            raise MalformedMessage(f"{where}: not an object of at most {_FIELD_LIMIT} fields")
        self._document = document

    def _fail(self, name: str, wanted: str) -> NoReturn:
        raise MalformedMessage(f"{self._where}.{name}: not {wanted}")

    def has(self, name: str) -> bool:
        return self._document.get(name) is not None

    def get(self, name: str) -> object:
        return self._document.get(name)

    def text(self, name: str, limit: int, default: str | None = None) -> str:
        value = self._document.get(name, default)
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            # Unprintable ones would reach somebody's terminal.
            self._fail(name, f"a printable text of at most {limit} characters")
        return value

    def raw(self, name: str, limit: int) -> str:
        """A text that is read again before anybody sees it."""
        value = self._document.get(name)
        if not isinstance(value, str) or not _is_sendable(value, limit):
            self._fail(name, f"a text of at most {limit} bytes without control characters")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._document.get(name, default)
        if not isinstance(value, bool):
            self._fail(name, "true or false")
        return value

    def whole(self, name: str, *, most: int = WHOLE_LIMIT, default: int | None = None) -> int:
        value = self._document.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            self._fail(name, f"a whole number from 0 to {most}")
        return value

    def number(self, name: str, *, most: float) -> float:
        value = self._document.get(name)
        if not is_number(value, most):
            self._fail(name, f"a number from 0 to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def word(self, name: str, kind: type[E], default: E | None = None) -> E:
        value = self._document.get(name, default)
        if not isinstance(value, str) or value not in kind.__members__.values():
            self._fail(name, "one of " + ", ".join(kind))
        return kind(value)

    def node(self, name: str) -> NodeId:
        return node_id(self._document.get(name), f"{self._where}.{name}")

    def digest(self, name: str) -> str:
        """A SHA-256."""
        value = self._document.get(name)
        if not isinstance(value, str) or not _NODE.fullmatch(value):
            self._fail(name, "64 hexadecimal digits")
        return value

    def items(self, name: str, limit: int, read: Callable[[object], T]) -> tuple[T, ...]:
        value = self._document.get(name, [])
        if not isinstance(value, list) or len(value) > limit:
            self._fail(name, f"a list of at most {limit}")
        return tuple(read(item) for item in value)


def _is_sendable(text: str, limit: int) -> bool:
    """Whether it can be passed on: half of a surrogate pair can be escaped in JSON, and not written."""
    try:
        return len(text) <= limit and len(text.encode()) <= limit and not _CONTROL.search(text)
    except UnicodeEncodeError:
        return False


def counts_up_to(unix_s: float) -> int:
    """The highest epoch, or version of settings, that anybody can have come to by now.

    They count from one, a few a day. Somebody who claims a huge one would leave no higher one to others; one
    that grows by the millisecond outruns everybody who counts, and every claim is overtaken in the end.
    """
    return max(0, int(unix_s * 1000)) + _COUNT_SLACK


def is_number(value: object, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= most and math.isfinite(value)


def node_id(value: object, where: str = "node") -> NodeId:
    if not isinstance(value, str) or not _NODE.fullmatch(value):
        raise MalformedMessage(f"{where}: not 64 hexadecimal digits")
    return NodeId(value)


def is_direct(text: str) -> bool:
    """Whether it is an IP:PORT that can be dialled."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return False
    return (address.version == 6) == bracketed and not address.is_multicast and not address.is_unspecified
