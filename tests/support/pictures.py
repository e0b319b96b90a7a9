"""Pictures of one colour."""

from __future__ import annotations

import base64
import struct
import zlib


def png(red: int, *, side: int = 32) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((red, 0, 0)) * side) * side
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def url(red: int, *, side: int = 32) -> str:
    return "data:image/png;base64," + base64.b64encode(png(red, side=side)).decode()
