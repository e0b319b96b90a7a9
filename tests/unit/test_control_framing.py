"""Control frames: bytes in any pieces, limits, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mesh_llm.transport.close_codes import CloseReason, Code, closing_of
from mesh_llm.transport.endpoint import ordered
from mesh_llm.transport.framing import (
    HEAD,
    Frame,
    FrameError,
    FrameParser,
    FrameType,
    decode_document,
    encode_frame,
)

LIMIT = 256 << 10


def parse(data: bytes, **options: Any) -> list[Frame]:
    parser = FrameParser(**options)
    parser.feed(data)
    frames = []
    while (frame := parser.next()) is not None:
        frames.append(frame)
    return frames


def test_frames_in_any_pieces() -> None:
    bodies: list[dict[str, Any]] = [{}, {"a": "ä" * 100}, {"list": list(range(1000))}]
    data = b"".join(encode_frame(FrameType.MESSAGE, body) for body in bodies)
    expected = [Frame(type=16, body=body) for body in bodies]
    chance = random.Random(4)

    assert parse(data) == expected
    for _ in range(20):
        parser, found, start = FrameParser(), [], 0
        while start < len(data):
            end = start + chance.choice((1, 2, 5, 6, 7, 100, 4000))
            parser.feed(data[start:end])
            start = end
            while (frame := parser.next()) is not None:
                found.append(frame)
        assert found == expected
        assert not parser.has_rest


def test_an_unfinished_frame_is_a_rest() -> None:
    parser = FrameParser()
    parser.feed(encode_frame(FrameType.HELLO, {"a": 1})[:-1])

    assert parser.next() is None
    assert parser.has_rest


def test_unknown_types_are_passed_on() -> None:
    assert parse(HEAD.pack(2, 1, 200) + b"{}") == [Frame(type=200, body={})]


def test_the_limit_is_exact_and_the_head_is_enough() -> None:
    body = {"a": "x" * (LIMIT - len('{"a":""}'))}

    assert parse(encode_frame(FrameType.MESSAGE, body)) == [Frame(type=16, body=body)]
    with pytest.raises(FrameError, match=f"a frame of {LIMIT + 1} bytes; the limit is {LIMIT}"):
        encode_frame(FrameType.MESSAGE, {"a": body["a"] + "x"})
    with pytest.raises(FrameError, match=f"a frame of {LIMIT + 1} bytes; the limit is {LIMIT}"):
        parse(HEAD.pack(LIMIT + 1, 1, 16))
    with pytest.raises(FrameError, match="a frame of 4294967295 bytes; the limit is 100"):
        parse(b"\xff\xff\xff\xff\x01\x01", limit_bytes=100)


def test_other_versions_are_refused() -> None:
    with pytest.raises(FrameError, match="a frame of version 2; this is version 1"):
        parse(HEAD.pack(2, 2, 16) + b"{}")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 200_000, b"{} {}"],
)
def test_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(FrameError, match="a body that is not"):
        parse(HEAD.pack(len(body), 1, 16) + body)


def test_numbers_of_absurd_length() -> None:
    with pytest.raises(FrameError):
        decode_document(b'{"a": ' + b"9" * 10_000 + b"}")


@pytest.mark.parametrize(
    ("words", "closing"),
    [
        ("closed by peer: bye (code 13)", CloseReason(code=Code.LEAVING, reason="bye")),
        ("closed by peer: \x1b[31mred\n (code 15)", CloseReason(code=Code.CLOSED, reason=" [31mred ")),
        ("closed by peer: (code 3) (code 2)", CloseReason(code=Code.EXPIRED, reason="(code 3)")),
        ("closed by peer: 3", CloseReason(code=Code.REVOKED, reason="expelled: the invite was revoked")),
        ("closed by peer: 0", CloseReason(code=Code.UNKNOWN, reason="the other node closed the connection")),
        ("closed by peer: x (code 99999)", CloseReason(code=Code.UNKNOWN, reason="x")),
        ("timed out", CloseReason(code=Code.UNKNOWN, reason="the connection was lost (timed out)")),
    ],
)
def test_why_a_connection_ended(words: str, closing: CloseReason) -> None:
    assert closing_of(words) == closing


def test_reasons_are_cut() -> None:
    assert len(closing_of(f"closed by peer: {'x' * 5000} (code 15)").reason) == 200


def test_the_likeliest_addresses_come_first() -> None:
    interfaces = {
        "172.17.0.1": "docker0",
        "192.168.1.7": "eth0",
        "127.0.0.1": "lo",
        "100.100.3.4": "tailscale0",
        "2001:db8::7": "eth0",
        "fe80::1": "eth0",
    }
    addresses = [
        *("172.17.0.1:9", "127.0.0.1:9", "203.0.113.5:777", "[fe80::1]:9", "100.100.3.4:9"),
        *("[2001:db8::7]:9", "192.168.1.7:9", "192.168.1.7:9", "nonsense", "1.2.3.4:0", "1.2.3.4:99999"),
    ]

    assert ordered(addresses, interfaces) == (
        "192.168.1.7:9",
        "[2001:db8::7]:9",
        "100.100.3.4:9",
        "203.0.113.5:777",
        "172.17.0.1:9",
        "127.0.0.1:9",
        "[fe80::1]:9",
    )
