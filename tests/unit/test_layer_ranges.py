"""Which bytes of a model's files its layers are: exact, padded, tied, and over several files."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_llm.defaults import FINGERPRINT_STRIDE_BYTES
from mesh_llm.errors import ModelError
from mesh_llm.models.layer_ranges import (
    Extent,
    Piece,
    Share,
    Table,
    layer_of,
    needed,
    pieces_of,
    runs,
    samples,
    tensor_table,
    whole_layers,
    whole_tensors,
)

BIG = 2 << 20


def row(name: str, size: int, offset: int, file: int = 0) -> list[Any]:
    return [name, "f32", [size // 4, 1, 1, 1], size, file, offset]


def document(*rows: list[Any], sizes: tuple[int, ...] = (64 << 20,), start: int = 4096) -> dict[str, Any]:
    files = [
        {"path": f"{index}.gguf", "bytes": size, "data_offset": start} for index, size in enumerate(sizes)
    ]
    return {"files": files, "tensors": list(rows)}


def table(*, tied: bool = False) -> Table:
    """Three layers of two tensors, the head and the embedding around them, and a small one for all."""
    rows = [row("token_embd.weight", BIG, 4096), row("rope_freqs.weight", 128, 4096 + BIG)]
    offset = 8192 + BIG
    for layer in range(3):
        rows += [
            row(f"blk.{layer}.attn_q.weight", 5000, offset),
            row(f"blk.{layer}.norm.bias", 100, offset + 5024),
        ]
        offset += 8192
    rows += [row("output_norm.weight", 256, offset)]
    rows += [] if tied else [row("output.weight", BIG, offset + 256)]
    return tensor_table(document(*rows))


def test_the_bytes_of_layers_are_exactly_their_tensors() -> None:
    names = needed(table(), Share(first=1, last=2, head=False))
    assert names == ("rope_freqs.weight", "blk.1.attn_q.weight", "blk.1.norm.bias", "output_norm.weight")
    where = table().tensors["blk.1.norm.bias"]
    assert (where.file, where.offset, where.end) == (0, 16384 + BIG + 5024, 16384 + BIG + 5124)


@pytest.mark.parametrize(
    ("tied", "share", "large"),
    [
        (False, Share(first=2, last=3, head=True), {"output.weight"}),
        (False, Share(first=2, last=3, head=False), set()),
        (False, Share(first=1, last=2, head=True), set()),
        (True, Share(first=2, last=3, head=True), {"token_embd.weight"}),
        (True, Share(first=0, last=3, head=False), set()),
    ],
)
def test_the_head_comes_with_the_last_layer_if_it_is_computed_there(
    tied: bool, share: Share, large: set[str]
) -> None:
    names = needed(table(tied=tied), share)
    assert {name for name in names if name in ("output.weight", "token_embd.weight")} == large
    # Small ones outside the layers come along: engines place them as they like.
    assert {"rope_freqs.weight", "output_norm.weight"} <= set(names)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *[
            ("blk.7.attn_q.weight", 7),
            ("enc.blk.11.ffn.weight", 11),
            ("blk.7", None),
            ("token_embd.weight", None),
        ],
        *[("my.blk.3.x", None), ("blk.-1.x", None), ("blk.1234567.x", None)],
    ],
)
def test_the_layer_of_a_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_pieces_cover_bytes_and_no_more() -> None:
    def indices(offset: int, size: int) -> list[int]:
        pieces = pieces_of([Extent(file=3, offset=offset, size_bytes=size)], 100)
        assert {piece.file for piece in pieces} <= {3}
        return sorted(piece.index for piece in pieces)

    assert indices(0, 100) == [0]
    assert indices(99, 1) == [0]
    assert indices(99, 2) == [0, 1]
    assert indices(100, 200) == [1, 2]
    assert indices(100, 201) == [1, 2, 3]
    assert indices(50, 0) == []


def test_pieces_one_behind_the_other_are_asked_for_together() -> None:
    pieces = [Piece(1, 0), Piece(0, 4), Piece(0, 2), Piece(0, 3), Piece(0, 7), Piece(1, 1)]
    assert runs(pieces) == [(Piece(0, 2), 3), (Piece(0, 7), 1), (Piece(1, 0), 2)]
    assert runs([]) == []


def test_a_layer_is_there_when_all_of_it_is() -> None:
    made = table()
    names = whole_tensors(
        made, frozenset({Piece(0, (8192 + BIG) // 4096), Piece(0, (8192 + BIG) // 4096 + 1)}), 4096
    )
    assert names == ("blk.0.attn_q.weight", "blk.0.norm.bias")
    assert whole_layers(made, names) == (0,)
    assert whole_layers(made, ("blk.0.attn_q.weight", "blk.2.attn_q.weight", "blk.2.norm.bias")) == (2,)
    # One byte short of it is not there.
    assert whole_tensors(made, frozenset({Piece(0, (8192 + BIG) // 4096)}), 4096) == ()


def test_samples_are_those_of_the_fingerprint() -> None:
    size = 2 * FINGERPRINT_STRIDE_BYTES + 1000
    made = tensor_table(document(row("blk.0.x", size, 8192), row("blk.0.y", 12, 4096), sizes=(1 << 30,)))
    assert [(each.offset, each.size_bytes) for each in samples(made)] == [
        (8192, 4096),
        (8192 + FINGERPRINT_STRIDE_BYTES, 4096),
        (8192 + 2 * FINGERPRINT_STRIDE_BYTES, 1000),
        (4096, 12),
    ]


def test_layers_over_several_files() -> None:
    made = tensor_table(
        document(
            row("blk.0.x", 100, 4096),
            row("blk.1.x", 100, 4096, 1),
            row("blk.1.y", 9, 5000, 2),
            sizes=(9000,) * 3,
        )
    )
    wanted = [made.tensors[name] for name in needed(made, Share(first=1, last=2, head=True))]
    assert pieces_of(wanted, 4096) == {Piece(1, 1), Piece(2, 1)}
    assert [header.file for header in made.headers] == [0, 1, 2]


@pytest.mark.parametrize(
    "broken",
    [
        document(row("x", 100, (64 << 20) - 99)),
        document(row("x", 100, -1)),
        document(row("x", -4, 0)),
        document(row("x", 4, 0, 1)),
        document(["x", "f32", [1], 4, 0]),
        document(row("x", 4, 0), start=0),
        document(row("x", 4, 0), start=1 << 40),
        document(),
        {"files": [], "tensors": [row("x", 4, 0)]},
        {"files": [{"bytes": 5}], "tensors": [row("x", 4, 0)]},
        {},
    ],
)
def test_an_impossible_table_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        tensor_table(broken)
