"""The Hugging Face cache: models--OWNER--NAME/snapshots/REVISION/FILE, a link to a blob.

A repository is there in as many revisions as were ever asked for. Of a file that
several of them have, the one counts that `main` points to, or else the newest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mesh_llm.models.stores.files import SUFFIX, gather, printable
from mesh_llm.models.stores.local import LocalModel
from mesh_llm.models.stores.reading import Reading, open_regular

_PREFIX = "models--"
_REVISION = re.compile(r"[0-9a-f]{40}")


def in_cache(reading: Reading, folder: Path) -> Iterator[LocalModel]:
    for entry in reading.entries(folder):
        if entry.name.startswith(_PREFIX):
            yield from _in_repository(reading, Path(entry.path))


def _in_repository(reading: Reading, folder: Path) -> Iterator[LocalModel]:
    repo = printable(folder.name.removeprefix(_PREFIX).replace("--", "/", 1))
    best: dict[tuple[Path, str], LocalModel] = {}
    for snapshot in _snapshots(reading, folder):
        for model in gather(reading, reading.files(snapshot, suffix=SUFFIX), repo=repo):
            key = (_place(model.path.parent, snapshot), model.name)
            if key not in best or (best[key].missing and not model.missing):
                best[key] = model
    yield from best.values()


def _place(folder: Path, snapshot: Path) -> Path:
    return folder.relative_to(snapshot) if folder.is_relative_to(snapshot) else folder


def _snapshots(reading: Reading, folder: Path) -> list[Path]:
    """The best first."""
    main = _main(folder / "refs" / "main")
    dated = [
        (entry.name != main, -_time_ns(entry), Path(entry.path))
        for entry in reading.entries(folder / "snapshots")
    ]
    return [path for _, _, path in sorted(dated)]


def _main(reference: Path) -> str | None:
    with suppress(OSError):
        descriptor = open_regular(reference)
        try:
            text = os.read(descriptor, 64).decode("ascii", errors="replace").strip()
        finally:
            os.close(descriptor)
        return text if _REVISION.fullmatch(text) else None
    return None


def _time_ns(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns
    except OSError:
        return 0
