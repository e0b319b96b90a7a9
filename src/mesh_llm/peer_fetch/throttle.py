"""How fast a node sends model files: as fast as it can, and slowly while it answers requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

OFFER_BUSY_BYTES_PER_S = 8e6
"""To all peers while answers are under way: a fifteenth of a gigabit line, less than fast Wi-Fi carries."""


_LATE_S = 0.01
"""A loop wakes up late by less; what is missed within it may be caught up with, and no more."""


class Throttle:
    """A bucket of bytes that all files of a node share; `busy` is asked before every chunk."""

    def __init__(
        self,
        *,
        busy: Callable[[], bool],
        busy_bytes_per_s: float = OFFER_BUSY_BYTES_PER_S,
        idle_bytes_per_s: float = math.inf,
    ) -> None:
        self.busy = busy
        self._busy_bytes_per_s = busy_bytes_per_s
        self._idle_bytes_per_s = idle_bytes_per_s
        self._free_at = -math.inf

    def reserve(self, size_bytes: int, now: float) -> float:
        """Seconds to wait before so many bytes may go. They count as sent from here on."""
        rate = self._busy_bytes_per_s if self.busy() else self._idle_bytes_per_s
        start = max(self._free_at, now - _LATE_S)
        self._free_at = start + size_bytes / rate
        return max(0.0, start - now)

    async def take(self, size_bytes: int) -> None:
        wait_s = self.reserve(size_bytes, asyncio.get_running_loop().time())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
