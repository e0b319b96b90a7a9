"""Where the header of a GGUF ends, from its first bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mesh_llm.models.header_length import NoHeader, header_length
from tests.support import tiny_gguf

ALIGNMENT = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama").read_bytes()


def test_the_header_of_a_model(data: bytes, tmp_path: Path) -> None:
    length = header_length(data)

    assert length is not None
    # The name of the last tensor is in it, and what follows is nothing but room up to the weights.
    assert b"output_norm.weight" in data[:length]
    assert set(data[length : -(-length // ALIGNMENT) * ALIGNMENT]) <= {0}
    assert header_length(data[:length]) == length


def test_too_little_of_it(data: bytes) -> None:
    length = header_length(data) or 0

    assert all(
        header_length(data[:count]) is None for count in (0, 3, 4, 8, 20, 100, length // 2, length - 1)
    )


def vocabulary(*lengths: int) -> bytes:
    """The start of a header, up to texts of which only the lengths are there."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    return head + struct.pack("<IIQ", 9, 8, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)


def test_what_is_no_model() -> None:
    head = b"GGUF" + struct.pack("<I", 3)
    for data in (
        b"PK" + bytes(100),
        b"GGUF" + struct.pack("<I", 99) + bytes(100),
        head + struct.pack("<QQ", 1 << 60, 0),
        head + struct.pack("<QQ", 0, 1 << 60),
        head + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 40),
        head + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77),
        head + struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 9),
        vocabulary(2**64 - 1, 0),
        vocabulary(0, 2**63),
    ):
        with pytest.raises(NoHeader):
            header_length(data)
