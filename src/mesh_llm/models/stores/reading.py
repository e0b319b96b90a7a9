"""One store being read: its folders, its files, what is left out of it and why."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mesh_llm.defaults import STORE_DEPTH
from mesh_llm.models.stores.local import Skipped, Store

STORE_ENTRIES = 100_000
"""Files and folders looked at in one store: a hundred times what a collector has, and half a second."""
STORE_SKIPPED = 1000
"""Reasons kept of one store: nobody reads more, and a folder may be full of damaged files."""


_MAGIC = b"GGUF"


class Reading:
    """Keeps count of what the store has cost so far: a folder of a million files is left half read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.skipped: list[Skipped] = []
        self._left = STORE_ENTRIES
        self._cut = False

    def skip(self, path: Path, reason: str) -> None:
        if len(self.skipped) < STORE_SKIPPED:
            self.skipped.append(Skipped(path=path, store=self.store, reason=reason))

    def entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """What lies in a folder, by name, without what is hidden; none where it is not there."""
        found: list[os.DirEntry[str]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._left == 0:
                        self._stop(folder)
                        break
                    self._left -= 1
                    if not entry.name.startswith("."):
                        found.append(entry)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.skip(folder, f"cannot be opened: {error.strerror}")
        return sorted(found, key=lambda entry: entry.name)

    def _stop(self, folder: Path) -> None:
        if not self._cut:
            self._cut = True
            self.skip(folder, f"not searched further: more than {STORE_ENTRIES:,} files and folders")

    def files(self, folder: Path, *, suffix: str = "", depth: int = STORE_DEPTH) -> Iterator[Path]:
        """Files below a folder whose names end so, whatever they are. Follows links, each folder once."""
        yield from self._below(folder, suffix.lower(), depth, set())

    def _below(self, folder: Path, suffix: str, depth: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
        for entry in self.entries(folder):
            if not _is_folder(entry):
                if entry.name.lower().endswith(suffix):
                    yield Path(entry.path)
            elif depth > 0 and self._first_time(Path(entry.path), seen):
                yield from self._below(Path(entry.path), suffix, depth - 1, seen)

    def _first_time(self, folder: Path, seen: set[tuple[int, int]]) -> bool:
        try:
            about = folder.stat()
        except OSError as error:
            self.skip(folder, f"cannot be opened: {error.strerror}")
            return False
        identity = (about.st_dev, about.st_ino)
        new = identity not in seen
        seen.add(identity)
        return new

    def gguf(self, path: Path) -> os.stat_result | None:
        """What the disk says of a file that begins as GGUF; None, and the reason is noted, of another."""
        try:
            descriptor = open_regular(path)
            try:
                about, magic = os.fstat(descriptor), os.read(descriptor, len(_MAGIC))
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            gone = path.is_symlink()
            self.skip(path, "is a link to a file that is gone" if gone else "is not there")
            return None
        except OSError as error:
            self.skip(path, f"cannot be read: {error.strerror}")
            return None
        if magic != _MAGIC:
            self.skip(path, "is not GGUF" if magic else "is empty")
            return None
        return about


def open_regular(path: Path) -> int:
    """A descriptor to read from; raises OSError for what is no regular file."""
    # A pipe would otherwise wait for somebody who writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file", str(path))
    return descriptor


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link that leads to itself: whoever opens it will be told.
        return False
