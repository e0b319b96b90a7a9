"""GGUF files in a folder of any program's: shards put together, projectors left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mesh_llm.defaults import GGUF_SHARD_LIMIT
from mesh_llm.frozen import frozen
from mesh_llm.models.stores.local import LocalModel
from mesh_llm.models.stores.reading import Reading

SUFFIX = ".gguf"
_PROJECTOR = "mmproj"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_NAME_CHARS = 200


@frozen
class _Part:
    """What a file's name says of it."""

    stem: str
    index: int = 1
    count: int = 1


def in_folder(reading: Reading, folder: Path) -> Iterator[LocalModel]:
    """Models anywhere below a folder, its links followed."""
    yield from gather(reading, reading.files(folder, suffix=SUFFIX))


def in_lmstudio(reading: Reading, folder: Path) -> Iterator[LocalModel]:
    """publisher/repo/file.gguf"""
    yield from gather(reading, reading.files(folder, suffix=SUFFIX), top=folder)


def gather(
    reading: Reading, paths: Iterable[Path], *, top: Path | None = None, repo: str = ""
) -> Iterator[LocalModel]:
    """Files as models. With `top`, the two folders below it are the repository's name."""
    shards: dict[tuple[Path, str, int], dict[int, Path]] = {}
    for path in paths:
        if _PROJECTOR in path.name.lower():
            continue
        part = _part(path.name)
        if part.count > GGUF_SHARD_LIMIT or not 1 <= part.index <= part.count:
            reading.skip(path, f"claims to be file {part.index} of {part.count}")
            continue
        shards.setdefault((path.parent, part.stem, part.count), {})[part.index] = path
    for (folder, stem, count), paths_here in shards.items():
        owner = repo or (_repo(folder, top) if top is not None else "")
        if model := _model(reading, stem, count, paths_here, owner):
            yield model


def _part(name: str) -> _Part:
    match = _SHARD.fullmatch(name)
    if match is None:
        return _Part(stem=name[: -len(SUFFIX)])
    return _Part(stem=match["stem"], index=int(match["index"]), count=int(match["count"]))


def _model(reading: Reading, stem: str, count: int, paths: dict[int, Path], repo: str) -> LocalModel | None:
    good = {index: about.st_size for index, path in paths.items() if (about := reading.gguf(path))}
    if not good:
        return None
    files = tuple(paths[index] for index in sorted(good))
    return LocalModel(
        name=printable(stem),
        path=files[0],
        files=files,
        size_bytes=sum(good.values()),
        store=reading.store,
        repo=repo,
        missing=tuple(
            printable(f"{stem}-{index:05d}-of-{count:05d}{SUFFIX}")
            for index in range(1, count + 1)
            if index not in good
        ),
    )


def _repo(folder: Path, top: Path) -> str:
    """Which need not be below it: links lead anywhere."""
    parts = folder.relative_to(top).parts if folder.is_relative_to(top) else ()
    return printable("/".join(parts[:2])) if len(parts) > 1 else ""


def printable(name: str) -> str:
    """As it can be shown: without what would move somebody's cursor, and no longer than anybody reads."""
    return "".join(sign if sign.isprintable() else "?" for sign in name[:_NAME_CHARS])
