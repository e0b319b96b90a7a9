"""Changes to a JSON text that leave everything else in it as it was, byte for byte.

Parsing and writing anew would lose a person's layout, and with it the way in which
they find their own things again. So the places that change are found in the text,
and only those are replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from mesh_llm.errors import AgentConfigRefused

Path = tuple[str | int, ...]

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_LONE_WORD = re.compile(r'\[\n\s*("[^"\\]*")\n\s*\]')
_INDENT = re.compile(r"\n([ \t]+)\S")


@dataclass(frozen=True, slots=True)
class _Part:
    """A member of an object or an element of an array: what it is called, and where its value stands."""

    key: str | int
    start: int
    end: int


def merge(text: str, changes: dict[str, Any], *, keep: Collection[Path] = ()) -> str:
    """`text` with `changes` in it, objects into objects. What stands at a path of `keep` stays as it is."""
    text = _checked(text)
    for path, value in _leaves(changes, ()):
        text = _put(text, path, value, kept=path in keep)
    return text


def merge_item(text: str, path: Path, item: dict[str, Any], *, by: str, keep: Collection[Path] = ()) -> str:
    """`text` with `item` in the array at `path`: merged into the one with the same `by`, or appended.

    Without a `path` it is the document itself.
    """
    text = _checked(text, root=dict if path else list)
    found = _value(text, path)
    if found is None:
        return _put(text, path, [item], kept=False)
    if not isinstance(found, list):
        raise _refused(path, "a list")
    for index, other in enumerate(found):
        if isinstance(other, dict) and other.get(by) == item[by]:
            for inner, value in _leaves(item, ()):
                text = _put(text, (*path, index, *inner), value, kept=inner in keep)
            return text
    return _inserted(text, path, None, item)


def dumps(value: Any, *, indent: str = "  ") -> str:
    """As people write it: a list of one word stays on its line."""
    # A newline in a string would be written as \\n: those that stand here are the layout's.
    return _LONE_WORD.sub(r"[\1]", json.dumps(value, indent=indent, ensure_ascii=False))


def _checked(text: str, *, root: type = dict) -> str:
    """Empty files are empty objects or lists; what is no JSON, or has comments, is not touched."""
    if not text.strip():
        return "{}\n" if root is dict else "[]\n"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        if _has_comments(text):
            what = "it has comments, which would be lost"
        raise AgentConfigRefused(f"it is not plain JSON ({what})", hint="paste the snippet by hand") from None
    if not isinstance(document, root):
        what = "object" if root is dict else "list"
        raise AgentConfigRefused(f"it is not a JSON {what}", hint="paste the snippet by hand")
    return text


def _has_comments(text: str) -> bool:
    return re.search(r"//|/\*", re.sub(r'"(?:\\.|[^"\\])*"', '""', text)) is not None


def _leaves(value: dict[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, (*path, name))
        else:
            yield (*path, name), inner


def _put(text: str, path: Path, value: Any, *, kept: bool) -> str:
    """Set one value; objects that are missing on the way come with it."""
    for depth in range(1, len(path) + 1):
        part = _locate(text, path[:depth])
        if part is None:
            for name in reversed(path[depth:]):
                value = {name: value}
            return _inserted(text, path[: depth - 1], str(path[depth - 1]), value)
    assert part is not None
    if kept or json.loads(text[part.start : part.end]) == value:
        return text
    depth_now = _depth_at(text, part.start)
    return text[: part.start] + _dumped(text, value, depth_now) + text[part.end :]


def _inserted(text: str, path: Path, key: str | None, value: Any) -> str:
    """`value` as the last part of the object or array at `path`."""
    place = _locate(text, path)
    assert place is not None
    opening, closing = text[place.start], place.end - 1
    if opening not in ("{" if key is not None else "["):
        raise _refused(path, "an object" if key is not None else "a list")
    parts = list(_parts(text, place.start))
    lead = "" if key is None else f"{json.dumps(key, ensure_ascii=False)}: "
    inner = text[place.start + 1 : closing]
    if parts and "\n" not in inner:
        # On one line, and so is what comes to it.
        addition = f", {lead}{json.dumps(value, ensure_ascii=False)}"
        return text[: parts[-1].end] + addition + text[parts[-1].end :]
    indent = _depth_at(text, parts[0].start if parts else place.start) + ("" if parts else _unit(text))
    newline = _newline(text)
    addition = f"{newline}{indent}{lead}{_dumped(text, value, indent)}"
    if parts:
        return text[: parts[-1].end] + f",{addition}" + text[parts[-1].end :]
    outer = _depth_at(text, place.start)
    return text[: place.start + 1] + addition + newline + outer + text[closing:]


def _dumped(text: str, value: Any, indent: str) -> str:
    return (_newline(text) + indent).join(dumps(value, indent=_unit(text)).split("\n"))


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _unit(text: str) -> str:
    found = _INDENT.search(text)
    return found[1] if found else "  "


def _depth_at(text: str, position: int) -> str:
    """The indentation of the line in which `position` stands."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _value(text: str, path: Path) -> Any:
    part = _locate(text, path)
    return None if part is None else json.loads(text[part.start : part.end])


def _locate(text: str, path: Path) -> _Part | None:
    start = _after_space(text, 0)
    part = _Part("", start, _DECODER.raw_decode(text, start)[1])
    for depth, key in enumerate(path):
        opening = text[part.start]
        if opening != ("[" if isinstance(key, int) else "{"):
            raise _refused(path[:depth], "a list" if isinstance(key, int) else "an object")
        found = [other for other in _parts(text, part.start) if other.key == key]
        if not found:
            return None
        # Of a name that stands there twice, readers take the last.
        part = found[-1]
    return part


def _parts(text: str, start: int) -> Iterator[_Part]:
    """Of the object or array at `start`, in a text that is known to be JSON."""
    is_object = text[start] == "{"
    position = _after_space(text, start + 1)
    index = 0
    while text[position] not in "]}":
        key: str | int = index
        if is_object:
            key, position = _DECODER.raw_decode(text, position)
            position = _after_space(text, _after_space(text, position) + 1)
        _, end = _DECODER.raw_decode(text, position)
        yield _Part(key, position, end)
        index += 1
        position = _after_space(text, end)
        if text[position] == ",":
            position = _after_space(text, position + 1)


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _refused(path: Path, what: str) -> AgentConfigRefused:
    where = ".".join(map(str, path)) or "it"
    return AgentConfigRefused(f"{where} is not {what} there", hint="paste the snippet by hand")
