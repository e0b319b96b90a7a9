"""HTTP/1.1 answers as bytes: the head, and where the body ends. Pure: bytes in, values out.

A body is checked while it is unwrapped, so that an answer that was cut off or does not
keep to its own framing is never taken for a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from mesh_llm.frozen import frozen

GATEWAY_ANSWER_HEAD_LIMIT_BYTES = 64 << 10
"""Of the engine's answers, all headers together; llama-server's take less than 1 KB."""
GATEWAY_CHUNK_HEAD_LIMIT_BYTES = 4 << 10
"""A chunk's length and extensions that nobody uses."""


_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: (.*))?")
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = bytes({*range(0x20), 0x7F} - {ord("\t")})
_LENGTH = re.compile("[0-9]{1,18}")
_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_TRAILER_LINE = re.compile(rb"([^\r\n]*)\r\n")
_CRLF = b"\r\n"
_HEAD_END = b"\r\n\r\n"


class MalformedAnswer(Exception):
    """What arrived is not an HTTP answer, or breaks its own framing."""


# -- the head -----------------------------------------------------------------------------------


@frozen
class Head:
    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    kept: bool
    """The other side means to keep the connection after this answer."""

    @property
    def is_stream(self) -> bool:
        """Of events, which may take their time."""
        return self.headers.get("Content-Type", "").lower().startswith("text/event-stream")


def split_head(data: bytes) -> tuple[Head, bytes] | None:
    """A head and what follows it, or None while it is not all there yet."""
    end = data.find(_HEAD_END, 0, GATEWAY_ANSWER_HEAD_LIMIT_BYTES)
    if end < 0:
        if len(data) >= GATEWAY_ANSWER_HEAD_LIMIT_BYTES:
            raise MalformedAnswer("the head is too long")
        return None
    return _parse_head(data[:end]), data[end + len(_HEAD_END) :]


def has_control(text: bytes) -> bool:
    """Whether there are control characters in it; line ends are some, too."""
    return len(text.translate(None, _CONTROL)) < len(text)


def _parse_head(raw: bytes) -> Head:
    try:
        first, *lines = raw.decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise MalformedAnswer("the head is not text") from error
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise MalformedAnswer("there is no status line")
    if has_control(raw.replace(_CRLF, b"")):
        raise MalformedAnswer("there are control characters in the head")
    headers = CIMultiDict[str]()
    for line in lines:
        name, colon, value = line.partition(":")
        if not (colon and _FIELD_NAME.fullmatch(name)):
            raise MalformedAnswer("a header is malformed")
        headers.add(name, value.strip(" \t"))
    options = [option.strip() for option in ",".join(headers.getall("Connection", ())).lower().split(",")]
    return Head(
        status=int(status_line[2]),
        reason=status_line[3] or "",
        headers=CIMultiDictProxy(headers),
        kept=status_line[1] == "1" and "close" not in options,
    )


# -- the body -----------------------------------------------------------------------------------


class FramedBody(Protocol):
    """One way to say where a body ends."""

    done: bool
    """All of it has been seen."""
    surplus: bool
    """More came than the body: nobody knows what the connection holds now."""

    def feed(self, data: bytes) -> bytes:
        """The payload in what arrived next."""

    def closed(self) -> bool:
        """The connection has ended: whether the body ended with it, as it should."""


def body_of(head: Head, method: str) -> FramedBody:
    """How the answer to a `method` request is framed (RFC 9112, 6.3)."""
    if method == "HEAD" or head.status in (204, 304):
        return SizedBody(0)
    codings = head.headers.getall("Transfer-Encoding", ())
    lengths = set(head.headers.getall("Content-Length", ()))
    if codings:
        if lengths or [coding.lower() for coding in codings] != ["chunked"]:
            raise MalformedAnswer("the length of the body is unknown")
        return ChunkedBody()
    if not lengths:
        return EndlessBody()
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise MalformedAnswer("the length of the body is not a number")
    return SizedBody(int(length))


class SizedBody:
    """Content-Length."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = not length
        self.surplus = False

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            self.surplus = True
            data = data[: self._left]
        self._left -= len(data)
        self.done = not self._left
        return data

    def closed(self) -> bool:
        return self.done


class EndlessBody:
    """Neither length nor chunks: it ends with the connection, and nobody can tell whether it was all."""

    done = False
    surplus = False

    def feed(self, data: bytes) -> bytes:
        return data

    def closed(self) -> bool:
        return True


class ChunkedBody:
    """Transfer-Encoding: chunked. Extensions and trailers are skipped, within bounds."""

    def __init__(self) -> None:
        self.done = False
        self.surplus = False
        self._read: Callable[[bytes, int], int | None] = self._chunk_head
        """Reads what is due next; returns where it ends, or None if it does not end yet."""
        self._left = 0
        """Of the chunk that is being read."""
        self._pieces: list[bytes] = []
        self._trailer_bytes = 0
        self._pending = b""
        """The beginning of a line whose end has not arrived."""
        self._between = True
        """A chunk is due next, and nothing of it has arrived."""

    def feed(self, data: bytes) -> bytes:
        # An engine writes each token as one chunk, which arrives as one segment. Looking at that and
        # nothing else takes a third of the time.
        if self._between and data.endswith(_CRLF):
            at = data.find(_CRLF) + 2
            if data[: at - 2] == b"%x" % (len(data) - at - 2) and at < len(data) - 2:
                return data[at:-2]
        return self._feed(data)

    def closed(self) -> bool:
        return self.done

    def _feed(self, data: bytes) -> bytes:
        data, self._pending = self._pending + data, b""
        at = 0
        while at < len(data):
            past = self._read(data, at)
            if past is None:
                self._pending = data[at:]
                break
            at = past
        self._between = self._read == self._chunk_head and not self._pending
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def _chunk_head(self, data: bytes, at: int) -> int | None:
        head = _CHUNK_HEAD.match(data, at)
        if head is None:
            self._check_unfinished(data, at)
            return None
        self._left = int(head[1], 16)
        self._read = self._payload if self._left else self._trailer
        return head.end()

    def _payload(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._left]
        self._pieces.append(piece)
        self._left -= len(piece)
        if not self._left:
            self._read = self._chunk_tail
        return at + len(piece)

    def _chunk_tail(self, data: bytes, at: int) -> int | None:
        tail = data[at : at + 2]
        if tail == _CRLF:
            self._read = self._chunk_head
            return at + 2
        if tail != _CRLF[: len(tail)]:
            raise MalformedAnswer("a chunk is longer than it says")
        return None

    def _trailer(self, data: bytes, at: int) -> int | None:
        line = _TRAILER_LINE.match(data, at)
        if line is None:
            self._check_unfinished(data, at)
            return None
        self._trailer_bytes += len(line[0])
        if self._trailer_bytes > GATEWAY_ANSWER_HEAD_LIMIT_BYTES:
            raise MalformedAnswer("the trailers are too long")
        if not line[1]:
            self.done = True
            self._read = self._surplus
        return line.end()

    def _surplus(self, data: bytes, at: int) -> int:
        self.surplus = True
        return len(data)

    def _check_unfinished(self, data: bytes, at: int) -> None:
        if data.find(b"\n", at) >= 0 or len(data) - at > GATEWAY_CHUNK_HEAD_LIMIT_BYTES:
            raise MalformedAnswer("a chunk has no valid size")
