"""What a source says about a model's files before it sends them: sizes, and a hash of every piece."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any, TypeGuard

from mesh_llm.defaults import (
    FETCH_LARGEST_PIECE_BYTES,
    FETCH_PIECE_LIMIT,
    FETCH_SIZE_LIMIT_BYTES,
    FETCH_SMALLEST_PIECE_BYTES,
    GGUF_SHARD_LIMIT,
)
from mesh_llm.frozen import frozen
from mesh_llm.peer_fetch.channel import SourceWrong

FETCH_NAME_LIMIT = 120
"""Of a fetched file's name, in characters, without numbering: file systems take 255 bytes."""


_HASH_DIGITS = 64
_HEX = re.compile(r"[0-9a-f]*")
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_OUTSIDE_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")


@frozen
class FilePieces:
    """One file: its size, and the SHA-256 of each of its pieces."""

    size_bytes: int
    pieces: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All files of a model, in order. Equal `digest`: equal bytes, whatever the files are called."""

    stem: str
    """Of their names here; made safe."""
    piece_bytes: int
    files: tuple[FilePieces, ...]

    @cached_property
    def digest(self) -> str:
        whole = hashlib.sha256(f"{self.piece_bytes}".encode())
        for file in self.files:
            whole.update(f"\n{file.size_bytes} {''.join(file.pieces)}".encode())
        return whole.hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def names(self, stem: str) -> tuple[str, ...]:
        """The files' names, as llama.cpp numbers them."""
        return file_names(stem, len(self.files))

    def to_message(self) -> dict[str, Any]:
        files = [{"size": file.size_bytes, "pieces": "".join(file.pieces)} for file in self.files]
        return {"name": self.stem, "piece_bytes": self.piece_bytes, "files": files}


def file_names(stem: str, count: int) -> tuple[str, ...]:
    if count == 1:
        return (f"{stem}.gguf",)
    return tuple(f"{stem}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1))


def parse(message: dict[str, Any]) -> Manifest:
    """The manifest that a peer sent; raises SourceWrong for anything that it cannot be."""
    piece_bytes, files, name = message.get("piece_bytes"), message.get("files"), message.get("name")
    if not _within(piece_bytes, FETCH_SMALLEST_PIECE_BYTES, FETCH_LARGEST_PIECE_BYTES):
        raise SourceWrong("it sent pieces of an impossible size")
    if not isinstance(name, str) or len(name) > 1024:
        raise SourceWrong("it sent no usable name")
    if not isinstance(files, list) or not 1 <= len(files) <= GGUF_SHARD_LIMIT:
        raise SourceWrong(f"it claims an impossible number of files; at most {GGUF_SHARD_LIMIT} work")
    manifest = Manifest(
        stem=safe_stem(name),
        piece_bytes=piece_bytes,
        files=tuple(_file(file, piece_bytes) for file in files),
    )
    pieces = sum(len(file.pieces) for file in manifest.files)
    if manifest.size_bytes > FETCH_SIZE_LIMIT_BYTES or pieces > FETCH_PIECE_LIMIT:
        raise SourceWrong("it claims an impossible size")
    return manifest


def _file(message: Any, piece_bytes: int) -> FilePieces:
    size = message.get("size") if isinstance(message, dict) else None
    if not _within(size, 1, FETCH_SIZE_LIMIT_BYTES):
        raise SourceWrong("it claims an impossible size")
    hashes = message.get("pieces")
    count = -(-size // piece_bytes)
    if not isinstance(hashes, str) or len(hashes) != count * _HASH_DIGITS or _HEX.fullmatch(hashes) is None:
        raise SourceWrong("it sent hashes that do not belong to its files")
    starts = range(0, len(hashes), _HASH_DIGITS)
    return FilePieces(size_bytes=size, pieces=tuple(hashes[i : i + _HASH_DIGITS] for i in starts))


def _within(value: Any, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def safe_stem(name: str) -> str:
    """A file name's stem out of what a peer calls its file: no folders, nothing hidden, nothing odd."""
    base = PurePath(name.replace("\\", "/").replace("\0", "/")).name
    stem = _SHARD_SUFFIX.sub("", base.removesuffix(".gguf"))
    return _OUTSIDE_NAMES.sub("_", stem).lstrip(".-_")[:FETCH_NAME_LIMIT].rstrip(".") or "model"
