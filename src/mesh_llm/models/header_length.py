"""Where the header of a GGUF ends, from the first bytes of the file. No I/O.

Only lengths are read here; what the header says, the engine's own parser tells of a whole one.
"""

from __future__ import annotations

import struct

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""enum gguf_type: bytes of each scalar."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_KEYS_LIMIT, _TENSORS_LIMIT, _DIMENSIONS_LIMIT = 1 << 16, 1 << 17, 4
_ITEMS_LIMIT = 1 << 24
"""Of an array: a vocabulary has a quarter of a million, and its merges twice as many."""
_TEXT_LIMIT = 1 << 24
_TOO_MUCH = "it claims more than any model has"


class NoHeader(ValueError):
    """These are not the first bytes of a GGUF."""


def header_length(data: bytes) -> int | None:
    """In bytes, with the table of tensors; None where the data end before it does."""
    reader = _Reader(data)
    try:
        reader.header()
    except struct.error:
        return None
    return reader.at if reader.at <= len(data) else None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def header(self) -> None:
        if self._data[:4] != b"GGUF"[: len(self._data)]:
            raise NoHeader("it does not begin with GGUF")
        self.at = 4
        if self._whole("<I") not in _VERSIONS:
            raise NoHeader("it is of a version that is not known")
        tensors = self._bounded(_TENSORS_LIMIT)
        for _ in range(self._bounded(_KEYS_LIMIT)):
            self._text()
            self._value(self._whole("<I"))
        for _ in range(tensors):
            self._text()
            dimensions = self._whole("<I")
            if dimensions > _DIMENSIONS_LIMIT:
                raise NoHeader("a tensor of it has too many dimensions")
            self.at += 8 * dimensions + 4 + 8

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            self._array()
        else:
            self.at += self._size(kind)

    def _array(self) -> None:
        kind, count = self._whole("<I"), self._bounded(_ITEMS_LIMIT)
        if kind != _STRING:
            self.at += count * self._size(kind)
            return
        # A vocabulary: most of the header, so without a call for each text.
        data, at, unpack = self._data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            length = unpack(data, at)[0]
            if length > _TEXT_LIMIT:
                raise NoHeader(_TOO_MUCH)
            at += 8 + length
        self.at = at

    def _text(self) -> None:
        # In two steps: what is read has to be behind it.
        length = self._bounded(_TEXT_LIMIT)
        self.at += length

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise NoHeader("a value of it is of a type that is not known")
        return _SIZES[kind]

    def _bounded(self, limit: int) -> int:
        number = self._whole("<Q")
        if number > limit:
            raise NoHeader(_TOO_MUCH)
        return number

    def _whole(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return int(number)
