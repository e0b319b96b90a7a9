"""Streams that come through a member: who sits at the other end is not for that member to say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.transport.claims import Claim
from tests.hostile.adversary import Adversary
from tests.hostile.conftest import Villain
from tests.hostile.ends import Opened
from tests.hostile.honest import id_of, serves
from tests.support.joining import JoiningNode, lab

Pair = tuple[JoiningNode, JoiningNode]
REQUEST = b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"
KINDS = ("serving", "http", "file", "lease")


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    """Two honest nodes that hear each other."""
    with lab(model) as nodes:
        one = nodes.create("one")
        two = nodes.join("two", one)
        one.until_nodes("one", "two")
        yield one, two


def header_of(bad: Adversary, kind: str, one: JoiningNode) -> dict[str, Any]:
    status = one.until_state("serving")
    epoch, fingerprint = status["plan"]["epoch"], status["model"]["fingerprint"]
    return {
        "serving": bad.to_serving(epoch),
        "http": bad.to_http(epoch),
        "file": bad.to_manifest(fingerprint),
        "lease": bad.to_lease(fingerprint),
    }[kind]


def answer_of(stream: Opened, kind: str) -> object:
    """What it is served; None where that is nothing."""
    if kind == "http":
        stream.write(REQUEST)
    answer: object = stream.all() if kind in ("http", "file") else stream.document()
    stream.reset()
    return answer


def challenged(bad: Adversary) -> tuple[Opened, dict[str, Any]]:
    stream = bad.open("forwarded", {})
    challenge = stream.document()
    assert challenge is not None
    return stream, challenge


@pytest.mark.parametrize("kind", KINDS)
def test_who_proves_itself_is_served_as_itself(pair: Pair, villain: Villain, kind: str) -> None:
    """Or the refusals below would say nothing."""
    one, _ = pair
    bad = villain(one.token())
    stream, challenge = challenged(bad)
    stream.say(bad.sealed(bad.proof(challenge, bad.inviter, kind, header_of(bad, kind, one))))
    assert answer_of(stream, kind)


@pytest.mark.parametrize("way", ["their signature", "their credential", "by what they say"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_does_not_speak_for_another(pair: Pair, villain: Villain, kind: str, way: str) -> None:
    """It opens a stream as if it forwarded one, of a member that has a connection of its own."""
    one, two = pair
    bad = villain(one.token())
    theirs = bad.record_of(id_of(two))
    header = header_of(bad, kind, one)
    stream, challenge = challenged(bad)
    if way == "by what they say":
        # What two has signed of itself: it asks for nothing.
        answer = {key: theirs[key] for key in ("text", "signature", "credential")}
    else:
        text = json.dumps(bad.proof(challenge, bad.inviter, kind, header)["text"])
        answer = bad.forge(theirs, Claim.STREAM, text, way)

    stream.say(answer)

    served = answer_of(stream, kind)
    assert served is None, f"it was served as two: {str(served)[:200]}"
    assert serves(two) == serves(one)


@pytest.mark.parametrize("wrong", ["another challenge", "another receiver", "another claim"])
def test_a_proof_is_good_for_one_stream(pair: Pair, villain: Villain, wrong: str) -> None:
    """As one in the middle could have kept it."""
    one, two = pair
    bad = villain(one.token())
    header = header_of(bad, "serving", one)
    first, before = challenged(bad)
    kept = bad.proof(before, bad.inviter, "serving", header)
    first.say(bad.sealed(kept))
    assert answer_of(first, "serving"), "the first use is right"
    stream, challenge = challenged(bad)
    fresh = bad.proof(challenge, bad.inviter, "serving", header)
    answers = {
        "another challenge": kept,
        "another receiver": bad.proof(challenge, id_of(two), "serving", header),
        "another claim": fresh | {"claim": "record"},
    }

    stream.say(bad.sealed(answers[wrong]))

    assert answer_of(stream, "serving") is None


@pytest.mark.parametrize("kind", ["file", "lease", "link", "introduce", "forward", "forwarded"])
def test_a_client_gets_no_more_through_a_member(pair: Pair, villain: Villain, kind: str) -> None:
    """Than it would on a connection of its own; nor is a stream forwarded twice."""
    one, _ = pair
    bad = villain(one.token())
    client = villain(one.token(role="client"), name="client")
    header: dict[str, Any] = {"to": bad.inviter}
    if kind in KINDS:
        header = header_of(bad, kind, one)
    elif kind == "link":
        header = {"way": "quic", "purpose": {"kind": "session", "epoch": 1}}
    stream, challenge = challenged(bad)

    # Its own proof, which the member in the middle hands on.
    stream.say(client.sealed(client.proof(challenge, bad.inviter, kind, header)))

    assert answer_of(stream, kind) is None
