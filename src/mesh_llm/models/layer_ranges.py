"""Which bytes of a model's files some of its layers are, by its tensor table. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mesh_llm.defaults import FINGERPRINT_SAMPLE_BYTES, FINGERPRINT_STRIDE_BYTES
from mesh_llm.frozen import frozen
from mesh_llm.models.metadata import damaged

_BLOCK = re.compile(r"(?:enc\.)?blk\.(\d{1,6})\.")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
"""What only the host reads, unless the first of them is the output head, too."""
_SMALL_BYTES = 1 << 20
"""Of tensors outside the layers: factors of rotations, norms. Engines place them with layers as they like."""


@frozen
class Extent:
    """Bytes of one of a model's files."""

    file: int
    """Counted from 0."""
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@frozen
class Share:
    """Layers [first, last) of a model, for one worker."""

    first: int
    last: int
    head: bool
    """Whether the output head may be computed there, too."""


@frozen
class Table:
    """Where everything is: the extents of all tensors by name, and of all headers."""

    headers: tuple[Extent, ...]
    sizes: tuple[int, ...]
    """Of the files, in bytes."""
    tensors: dict[str, Extent]

    @property
    def layers(self) -> int:
        return 1 + max((layer for name in self.tensors if (layer := layer_of(name)) is not None), default=-1)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """One of the pieces of equal size that a file is hashed in."""

    file: int
    index: int


def tensor_table(document: Mapping[str, Any]) -> Table:
    """What `engine/children/gguf.py` printed about a model; raises ModelError for what it cannot have."""
    sizes: list[int] = []
    headers: list[Extent] = []
    tensors: dict[str, Extent] = {}
    for index, entry in enumerate(_list(document, "files")):
        match entry:
            case {"bytes": int(size), "data_offset": int(start)} if 0 < start <= size:
                sizes.append(size)
                headers.append(Extent(file=index, offset=0, size_bytes=start))
            case _:
                raise damaged("the model", "a file without a header is listed")
    for row in _list(document, "tensors"):
        match row:
            case [str(name), _, _, int(size), int(file), int(offset)] if (
                0 <= file < len(sizes) and size >= 0 and offset >= 0 and offset + size <= sizes[file]
            ):
                tensors[name] = Extent(file=file, offset=offset, size_bytes=size)
            case _:
                raise damaged("the model", "its tensor table cannot be read")
    return Table(headers=tuple(headers), sizes=tuple(sizes), tensors=tensors)


def _list(document: Mapping[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list) or not value:
        raise damaged("the model", f"its {key} are missing")
    return value


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for embedding, head and the like."""
    found = _BLOCK.match(name)
    return int(found[1]) if found else None


def samples(table: Table) -> Iterator[Extent]:
    """What the fingerprint is made of, beside the headers: a sample of every tensor every few MB."""
    for where in table.tensors.values():
        for start in range(0, where.size_bytes, FINGERPRINT_STRIDE_BYTES):
            size = min(FINGERPRINT_SAMPLE_BYTES, where.size_bytes - start)
            yield Extent(file=where.file, offset=where.offset + start, size_bytes=size)


def needed(table: Table, share: Share) -> tuple[str, ...]:
    """The tensors that a worker with these layers reads, or could."""
    return tuple(name for name, where in table.tensors.items() if _is_needed(table, share, name, where))


def _is_needed(table: Table, share: Share, name: str, where: Extent) -> bool:
    layer = layer_of(name)
    if layer is not None:
        return share.first <= layer < share.last
    if where.size_bytes <= _SMALL_BYTES:
        return True
    if not share.head or share.last < table.layers:
        return False
    tied = "output.weight" not in table.tensors
    return name not in _EMBEDDINGS or (tied and name == _EMBEDDINGS[0])


def pieces_of(extents: Iterable[Extent], piece_bytes: int) -> frozenset[Piece]:
    """The pieces that cover these bytes."""
    return frozenset(
        Piece(where.file, index)
        for where in extents
        if where.size_bytes
        for index in range(where.offset // piece_bytes, -(-where.end // piece_bytes))
    )


def whole_tensors(table: Table, held: frozenset[Piece], piece_bytes: int) -> tuple[str, ...]:
    """Those of which every byte is there."""
    return tuple(name for name, where in table.tensors.items() if pieces_of((where,), piece_bytes) <= held)


def whole_layers(table: Table, names: Iterable[str]) -> tuple[int, ...]:
    """Layers of which every tensor is among these."""
    here = set(names)
    broken = {layer_of(name) for name in table.tensors if name not in here}
    return tuple(layer for layer in range(table.layers) if layer not in broken)


def runs(pieces: Iterable[Piece]) -> list[tuple[Piece, int]]:
    """Pieces one behind the other, as the first of them and their number."""
    found: list[tuple[Piece, int]] = []
    for piece in sorted(pieces):
        if found and piece == Piece(found[-1][0].file, found[-1][0].index + found[-1][1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((piece, 1))
    return found
