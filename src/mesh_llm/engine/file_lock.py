"""A lock between processes, held by the kernel: it cannot be left behind."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from mesh_llm.defaults import LOCK_POLL_S, LOCK_TIMEOUT_S
from mesh_llm.errors import MeshError


@asynccontextmanager
async def file_lock(
    path: Path, *, waiting_for: str, timeout_s: float = LOCK_TIMEOUT_S
) -> AsyncIterator[None]:
    """Hold `path` exclusively. Asked again and again rather than waited for, so that Ctrl-C works."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            async with asyncio.timeout(timeout_s):
                while not _try_lock(descriptor):
                    await asyncio.sleep(LOCK_POLL_S)
        except TimeoutError:
            raise MeshError(
                f"another mesh-llm has been busy with {waiting_for} for {timeout_s / 60:.0f} minutes",
                hint=f"see what holds {path} (fuser {path}) and end it",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
