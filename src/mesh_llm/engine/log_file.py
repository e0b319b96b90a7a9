"""The engine's own log: kept beside the node's, bounded in size, written a moment late.

An engine says some twenty lines of a request, just as it begins to compute. What is written for each
of them then, every client waits for.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from mesh_llm.defaults import ENGINE_LOG_HELD_BYTES

ENGINE_LOG_BYTES = 4 << 20
ENGINE_LOG_COUNT = 2
"""Kept beside the current log: enough for the run that failed and the one before."""
ENGINE_LOG_LATE_S = 0.25
"""Lines are gathered for so long: by then the first tokens of what they tell of are out."""


log = logging.getLogger(__name__)


class LogFile:
    def __init__(self, path: Path) -> None:
        self._handler = _Handler(
            path, maxBytes=ENGINE_LOG_BYTES, backupCount=ENGINE_LOG_COUNT, encoding="utf-8"
        )
        self._held: list[str] = []
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, line: str) -> None:
        self._held.append(line)
        self._held_bytes += len(line)
        if self._held_bytes > ENGINE_LOG_HELD_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ENGINE_LOG_LATE_S, self.flush)

    def flush(self) -> None:
        """Write what is held back; for those who read the file now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            lines = "\n".join(self._held)
            self._held.clear()
            self._held_bytes = 0
            self._handler.handle(logging.makeLogRecord({"msg": lines, "levelno": logging.INFO}))

    def close(self) -> None:
        """With what was held back until now."""
        self.flush()
        self._handler.close()


class PrivateLog(RotatingFileHandler):
    """A log of bounded size that only its owner can read, whoever can look into its folder."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_open_privately)


def _open_privately(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    with suppress(OSError):  # of another user, who lets us write there
        os.fchmod(descriptor, 0o600)
    return descriptor


class _Handler(PrivateLog):
    """One that cannot write says so once, and the engine goes on without it."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.exception("the engine's log cannot be written path=%s", self.baseFilename)
