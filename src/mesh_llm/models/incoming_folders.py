"""Folders beside the models for what is not whole yet: `.incoming-…`, each locked by whoever fills it.

The kernel lets go of a lock however its holder ends, so that what nobody holds
is known to be left over: a download's scratch is removed, a fetch's part is
kept for the next try until it is old.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from mesh_llm.defaults import LOCK_POLL_S, LOCK_TIMEOUT_S
from mesh_llm.errors import DownloadFailed

FETCH_KEEP_S = 14 * 24 * 3600.0
"""What a broken-off fetch has is kept for a fortnight: long enough for a holiday, not for ever."""


_PREFIX = ".incoming-"
_RESUMABLE = f"{_PREFIX}fetch-"


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder for the length of the block."""
    descriptor = None
    while descriptor is None:
        path = Path(tempfile.mkdtemp(dir=folder, prefix=_PREFIX))
        # None: somebody cleaned up in between, and took it for a left-over.
        descriptor = _try_lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


@asynccontextmanager
async def resumable(folder: Path, key: str, *, waiting: Callable[[], None]) -> AsyncIterator[Path]:
    """The folder of one fetch, held against all others; what is in it stays.

    `waiting` is called once where another one holds it.
    """
    path = folder / resumable_name(key)
    try:
        async with asyncio.timeout(LOCK_TIMEOUT_S):
            path.mkdir(mode=0o700, exist_ok=True)
            if (descriptor := _try_lock(path)) is None:
                waiting()
            while descriptor is None:
                await asyncio.sleep(LOCK_POLL_S)
                path.mkdir(mode=0o700, exist_ok=True)
                descriptor = _try_lock(path)
    except TimeoutError:
        raise DownloadFailed(
            f"another mesh-llm has been fetching the same model to {folder} "
            f"for {LOCK_TIMEOUT_S / 60:.0f} minutes",
            hint=f"run this again when it is done; fuser {path} shows which process that is",
        ) from None
    try:
        yield path
    finally:
        os.close(descriptor)


def resumable_name(key: str) -> str:
    return f"{_RESUMABLE}{key}"


def clean(folder: Path, *, now: float) -> None:
    """Remove what processes that are gone have left in `folder`; parts of fetches only when they are old."""
    for path in folder.glob(f"{_PREFIX}*"):
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            descriptor = _try_lock(path)
        except OSError:
            continue  # somebody else's, or no locks here: not ours to judge
        if descriptor is None:
            continue
        try:
            if not path.name.startswith(_RESUMABLE) or now - _last_change(path) > FETCH_KEEP_S:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _last_change(path: Path) -> float:
    try:
        return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return path.stat().st_mtime


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the folder; None where somebody else does, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A folder that was removed after it was opened locks nothing.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
