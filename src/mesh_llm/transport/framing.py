"""Control messages as bytes.

A frame is a head of six bytes (u32 length of the body, u8 version, u8 type; big endian) and a JSON
object. Types that nobody knows are passed on for the reader to count and ignore; anything else that
is not as it should be ends the connection.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any

from mesh_llm.defaults import FRAME_LIMIT_BYTES
from mesh_llm.frozen import frozen

FRAME_VERSION = 1
HEAD = struct.Struct(">IBB")
LENGTH = struct.Struct(">I")


class FrameType(IntEnum):
    HELLO = 1
    PROVE = 2
    ADMITTED = 3
    CONFIRM = 4
    EXPELLED = 5
    MESSAGE = 16


@frozen
class Frame:
    type: int
    body: dict[str, Any]


class FrameError(Exception):
    """Bytes that are no frame; says what is wrong with them."""


def encode_frame(type: FrameType, body: dict[str, Any]) -> bytes:
    text = encode_document(body)
    if len(text) > FRAME_LIMIT_BYTES:
        raise FrameError(f"a frame of {len(text)} bytes; the limit is {FRAME_LIMIT_BYTES}")
    return HEAD.pack(len(text), FRAME_VERSION, type) + text


class FrameParser:
    """Bytes in, frames out. After an error it is of no more use."""

    def __init__(self, *, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive."""
        if len(self._buffer) < HEAD.size:
            return None
        length, version, type = HEAD.unpack_from(self._buffer)
        if version != FRAME_VERSION:
            raise FrameError(f"a frame of version {version}; this is version {FRAME_VERSION}")
        if length > self.limit_bytes:
            raise FrameError(f"a frame of {length} bytes; the limit is {self.limit_bytes}")
        end = HEAD.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[HEAD.size : end])
        del self._buffer[:end]
        return Frame(type=type, body=decode_document(body))

    @property
    def has_rest(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)


def encode_document(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode_document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise FrameError("a body that is not JSON") from None
    if not isinstance(document, dict):
        raise FrameError("a body that is not a JSON object")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)
