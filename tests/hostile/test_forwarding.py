"""Streams that come through a member: who sits at the other end is not for that member to say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.conftest import Villain
from tests.hostile.honest import id_of, serves
from tests.support.joining import JoiningNode, lab

Pair = tuple[JoiningNode, JoiningNode]
REQUEST = b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    """Two honest nodes that hear each other."""
    with lab(model) as nodes:
        one = nodes.create("one")
        two = nodes.join("two", one)
        one.until_nodes("one", "two")
        yield one, two


@pytest.mark.parametrize("kind", ["serving", "http", "file", "lease"])
def test_a_member_does_not_speak_for_another(pair: Pair, villain: Villain, kind: str) -> None:
    """It opens a stream as if it forwarded one, of a member that has a connection of its own."""
    one, two = pair
    status = one.until_state("serving")
    epoch, fingerprint = status["plan"]["epoch"], status["model"]["fingerprint"]
    bad = villain(one.token())
    header: dict[str, Any] = {
        "serving": bad.to_serving(epoch),
        "http": bad.to_http(epoch),
        "file": bad.to_manifest(fingerprint),
        "lease": bad.to_lease(fingerprint),
    }[kind]

    stream = bad.open("forwarded", bad.to_forwarded(id_of(two), kind, header))
    if kind == "http":
        stream.write(REQUEST)
        answer: object = stream.all()
    elif kind == "file":
        answer = stream.all()
    else:
        answer = stream.document()
    stream.reset()

    assert answer is None, f"it was served as two: {str(answer)[:200]}"
    assert serves(two) == serves(one)
