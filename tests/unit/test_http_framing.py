"""Answers as bytes: every split of the same bytes reads the same, and nothing broken looks whole."""

from __future__ import annotations

import pytest

from mesh_llm.gateway.http_framing import (
    GATEWAY_ANSWER_HEAD_LIMIT_BYTES,
    GATEWAY_CHUNK_HEAD_LIMIT_BYTES,
    ChunkedBody,
    EndlessBody,
    FramedBody,
    Head,
    MalformedAnswer,
    SizedBody,
    body_of,
    split_head,
)


def head(*lines: str, first: str = "HTTP/1.1 200 OK") -> Head:
    found = split_head("\r\n".join([first, *lines, "", ""]).encode())
    assert found is not None
    return found[0]


def feed(body: FramedBody, data: bytes, size: int) -> bytes:
    return b"".join(body.feed(data[at : at + size]) for at in range(0, len(data), size))


# -- heads --------------------------------------------------------------------------------------


def test_head_and_what_follows() -> None:
    raw = b"HTTP/1.1 404 Not Found\r\nA: 1\r\nb:  two \t\r\nA: \xc3\xa9\r\nEmpty:\r\n\r\nrest\r\n\r\n"
    found = split_head(raw)
    assert found is not None
    parsed, rest = found
    assert (parsed.status, parsed.reason, parsed.kept, rest) == (404, "Not Found", True, b"rest\r\n\r\n")
    assert list(parsed.headers.items()) == [("A", "1"), ("b", "two"), ("A", "é"), ("Empty", "")]
    for size in range(raw.index(b"rest")):
        assert split_head(raw[:size]) is None


@pytest.mark.parametrize(
    ("first", "lines", "kept"),
    [
        ("HTTP/1.1 200 OK", (), True),
        ("HTTP/1.1 200", (), True),
        ("HTTP/1.1 200 OK", ("Connection: X-Close, Keep-Alive",), True),
        ("HTTP/1.1 200 OK", ("Connection: keep-alive", "connection: x ,Close"), False),
        ("HTTP/1.0 200 OK", ("Connection: keep-alive",), False),
    ],
)
def test_whether_the_connection_is_kept(first: str, lines: tuple[str, ...], kept: bool) -> None:
    assert head(*lines, first=first).kept is kept


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01 not HTTP\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 O\rK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nspace : 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 1\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 1\nB: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: \xff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * GATEWAY_ANSWER_HEAD_LIMIT_BYTES,
    ],
)
def test_what_is_no_head(raw: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        split_head(raw)


# -- which body ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "method", "lines", "kind"),
    [
        ("HTTP/1.1 200 OK", "GET", ("Content-Length: 5",), SizedBody),
        ("HTTP/1.1 200 OK", "GET", ("Content-Length: 5", "Content-Length: 5"), SizedBody),
        ("HTTP/1.1 200 OK", "GET", ("Transfer-Encoding: Chunked",), ChunkedBody),
        ("HTTP/1.1 200 OK", "GET", (), EndlessBody),
        ("HTTP/1.1 200 OK", "HEAD", ("Content-Length: 5",), SizedBody),
        ("HTTP/1.1 204 No Content", "GET", (), SizedBody),
        ("HTTP/1.1 304 Not Modified", "GET", ("Content-Length: 5",), SizedBody),
    ],
)
def test_which_body_an_answer_has(
    first: str, method: str, lines: tuple[str, ...], kind: type[FramedBody]
) -> None:
    body = body_of(head(*lines, first=first), method)
    assert isinstance(body, kind)
    assert body.done is (method == "HEAD" or "200" not in first)


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: -5",),
        ("Content-Length: 5, 5",),
        ("Content-Length: 0x5",),
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: identity",),
    ],
)
def test_lengths_that_nobody_can_rely_on(lines: tuple[str, ...]) -> None:
    with pytest.raises(MalformedAnswer):
        body_of(head(*lines), "GET")


# -- bodies -------------------------------------------------------------------------------------

CHUNKS = (
    b"5\r\nhello\r\n"
    b'6;name=value;other="x"\r\n world\r\n'
    b"1 \t\r\n!\r\n"
    b"00000a\r\n0123456789\r\n"
    b"0;last\r\nX-Checksum: 1\r\nX-Other: 2\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_chunks_in_any_portions(size: int) -> None:
    body = ChunkedBody()
    assert feed(body, CHUNKS, size) == b"hello world!0123456789"
    assert (body.done, body.surplus, body.closed()) == (True, False, True)


def test_chunks_that_were_cut_off() -> None:
    for size in range(len(CHUNKS)):
        body = ChunkedBody()
        assert b"hello world!0123456789".startswith(body.feed(CHUNKS[:size]))
        assert not body.done
        assert not body.closed()


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "raw",
    [
        b"zz\r\n",
        b"\r\n",
        b"-5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"5_0\r\n",
        b" 5\r\nhello\r\n",
        b"5\nhello\n",
        b"1234567890abcdef\r\n",
        b"5\r\nhello5\r\nworld\r\n",
        b"5\r\nhello\r5\r\n",
        b"5\r\nhello world\r\n",
        b"0\r\nX: 1\n\r\n",
        b"5;" + b"x" * (2 * GATEWAY_CHUNK_HEAD_LIMIT_BYTES),
        b"0\r\n" + b"X: 1\r\n" * GATEWAY_ANSWER_HEAD_LIMIT_BYTES,
    ],
)
def test_what_is_no_chunk(raw: bytes, size: int) -> None:
    body = ChunkedBody()
    with pytest.raises(MalformedAnswer):
        feed(body, raw, size)
    assert not body.done


def test_more_than_the_body() -> None:
    chunked, sized = ChunkedBody(), SizedBody(5)
    assert chunked.feed(b"1\r\nx\r\n0\r\n\r\nHTTP/1.1") == b"x"
    assert sized.feed(b"hello, world") == b"hello"
    assert (chunked.done, chunked.surplus) == (True, True)
    assert (sized.done, sized.surplus) == (True, True)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_body_of_known_length(size: int) -> None:
    body = SizedBody(5)
    assert feed(body, b"hell", size) == b"hell"
    assert not body.closed()
    assert body.feed(b"o") == b"o"
    assert (body.done, body.surplus) == (True, False)


def test_a_body_that_ends_with_the_connection() -> None:
    body = EndlessBody()
    assert body.feed(b"hello") == b"hello"
    assert not body.done
    assert body.closed()
