"""How texts of the engine are read, whichever compiler made it."""

from __future__ import annotations

import ctypes

import pytest

from mesh_llm.engine.children.page import text

LONG = b"_app/immutable/bundle.js"


@pytest.mark.parametrize("string_bytes", [8, 24, 32])
def test_a_string_elsewhere(string_bytes: int) -> None:
    kept = ctypes.create_string_buffer(LONG)
    capacity = (1 << 63).to_bytes(8, "little")
    raw = ctypes.addressof(kept).to_bytes(8, "little") + len(LONG).to_bytes(8, "little") + capacity + bytes(8)
    string = ctypes.create_string_buffer(raw[:string_bytes], string_bytes)

    assert text(ctypes.addressof(string), string_bytes) == LONG.decode()


def test_a_short_string_of_libcxx_is_where_it_is() -> None:
    string = ctypes.create_string_buffer(b"sw.js".ljust(23, b"\0") + bytes([5]), 24)

    assert text(ctypes.addressof(string), 24) == "sw.js"
